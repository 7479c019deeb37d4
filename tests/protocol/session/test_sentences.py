"""What a peer hears when it breaks the protocol: sentences, with nothing of Python in them."""

from __future__ import annotations

import pytest

from tests.protocol.session.kit import SAMPLES, Pair, chunk, hello, start
from tests.protocol.session.python_sentences import PYTHON
from upr_protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from upr_protocol.ids import PartitionId
from upr_protocol.session import ClientSession, SessionState
from upr_protocol.wire import MESSAGES, Barrier, BarrierReply, Message


def damaged(body: bytes) -> list[bytes]:
    """Bodies that are cut, too long, or have one byte changed."""
    bodies = [body[:length] for length in range(len(body))] + [body + bytes(8), body + b"x"]
    for index in range(min(len(body), 400)):
        bodies += [body[:index] + bytes((byte,)) + body[index + 1 :] for byte in (0, 3, 200, 255)]
    return bodies


@pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_an_error_about_a_body_names_no_python_type(kind: type[Message]) -> None:
    for body in damaged(b"".join(map(bytes, SAMPLES[kind].body_buffers()))):
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
    body = head + b"".join(seq.to_bytes(8, "little") for seq in numbers) + bytes(2)
    with pytest.raises(RemoteProtocolError, match=sentence):
        stream.parse(body, PartitionId(0), 0, 0)


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ((), "the client speaks versions none; this server speaks 1"),
        ((2, 3), "the client speaks versions 2, 3; this server speaks 1"),
    ],
)
def test_a_version_that_is_refused_says_what_either_side_speaks(
    versions: tuple[int, ...], sentence: str
) -> None:
    client = Pair.in_state(SessionState.GREETING).client
    with pytest.raises(ProtocolError, match=f"^Hello: {sentence}$"):
        client.send(hello(versions=versions))


@pytest.mark.parametrize(
    ("opened", "oldest"), [([], "none"), ([b"\x0a"], "0a"), ([b"\x0b", b"\x0a"], "0b")]
)
def test_a_barrier_out_of_order_names_the_oldest(opened: list[bytes], oldest: str) -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.client_sends(*map(Barrier, opened))
    with pytest.raises(LocalProtocolError, match=f"oldest open barrier has {oldest}$"):
        pair.server.send(BarrierReply(b"\x0c", ()))


def test_an_acknowledgement_of_too_much_says_how_much_was_received() -> None:
    pair = Pair.in_state(SessionState.STREAMING)
    pair.accept(3, 9)
    pair.turn(3)
    pair.server_sends(start(3, 9, 0, 10), chunk(3, 9, 0, 10))
    client: ClientSession = pair.client
    bytes_received = client.window.used_bytes
    client.acknowledge(10)
    sentence = f"cannot acknowledge {bytes_received} bytes of the {bytes_received - 10} received"
    with pytest.raises(LocalProtocolError, match=sentence):
        client.acknowledge(bytes_received)
