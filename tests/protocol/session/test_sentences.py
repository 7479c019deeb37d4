"""What a peer hears when it breaks the protocol: sentences, with nothing of Python in them."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.protocol.session.kit import SAMPLES
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.ids import PartitionId
from upr_protocol.wire import MESSAGES, Message

PYTHON: Final = re.compile(
    r"unpack|codec|Error\b|position \d|valid [A-Z]|out of range|None\b|\bb'|struct|construct|"
    r"parsing|object|<class|stream read|byte string|FailoverLog\(|Position\("
)
"""What the exceptions of Python, of `struct` and of construct say."""


def damaged(body: bytes) -> list[bytes]:
    """Bodies that are cut, too long, or have one byte changed."""
    bodies = [body[:length] for length in range(len(body))] + [body + bytes(8), body + b"x"]
    for index in range(min(len(body), 400)):
        bodies += [body[:index] + bytes((byte,)) + body[index + 1 :] for byte in (0, 3, 200, 255)]
    return bodies


@pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_an_error_about_a_body_names_no_python_type(kind: type[Message]) -> None:
    for body in damaged(b"".join(map(bytes, SAMPLES[kind].body()))):
        try:
            kind.parse(body, PartitionId(0), 0, 0)
        except RemoteProtocolError as error:
            name, _, sentence = str(error).partition(": ")
            assert name == kind.__name__
            assert not PYTHON.search(sentence), sentence


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ((9, 3, 0, 0, 0), "highest_received is 3, below last_complete, which is 9"),
        ((9, 3, 7, 0, 20), "highest_received is 3, below last_complete, which is 9"),
        ((3, 9, 0, 0, 0), "highest_received is above last_complete, but no partial snapshot"),
        ((3, 9, 7, 0, 8), r"highest_received is 9, outside the partial snapshot \(0, 8\]"),
    ],
)
def test_a_position_that_cannot_be_says_what_contradicts_what(
    numbers: tuple[int, ...], sentence: str
) -> None:
    stream = MESSAGES[0x06]
    head = bytes((1,)) + bytes(17)
    body = head + b"".join(number.to_bytes(8, "little") for number in numbers) + bytes(2)
    with pytest.raises(RemoteProtocolError, match=sentence):
        stream.parse(body, PartitionId(0), 0, 0)
