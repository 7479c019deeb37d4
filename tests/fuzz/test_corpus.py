"""Every input of the corpus, and what chance makes of each, breaks no promise.

What Atheris finds in hours is not found here; that nothing of it comes back is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from zlib import crc32

import pytest

from tests.fuzz import sessions
from tests.fuzz.corpus import corpus, made
from tests.fuzz.mutations import mutations
from tests.fuzz.targets import TARGETS
from tests.kit.effort import effort
from upr_protocol.session import Session
from upr_protocol.wire import MESSAGES, Close, Error, Message

MUTATIONS: Final = effort(5_000, 200_000)
MUTATIONS_OF_SLOW: Final = {
    "frames": effort(800, 15_000),
    "server": effort(1000, 20_000),
    "client": effort(1000, 20_000),
    "log-in": effort(1500, 30_000),
    "tls": effort(150, 5000),
    "links": effort(500, 20_000),
}
"""Of each target's corpus together: one to three seconds."""


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_its_mutations(name: str) -> None:
    target, inputs = TARGETS[name], corpus(name)
    donors, count = list(inputs.values()), MUTATIONS_OF_SLOW.get(name, MUTATIONS)
    for file, data in inputs.items():
        target(data)
        for changed in mutations(data, donors, crc32(file.encode()), count // len(inputs)):
            try:
                target(changed)
            except Exception as error:
                error.add_note(f"to repeat: python -m tests.fuzz {name} --hex {changed.hex()}")
                raise


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_small_and_what_the_messages_make(name: str) -> None:
    inputs = corpus(name)
    recorded = {file: data for file, data in inputs.items() if not file.startswith("found-")}
    assert recorded == made(name), "python -m tests.fuzz.corpus writes it anew"
    assert max(map(len, inputs.values())) <= 4096


@pytest.mark.parametrize(
    ("name", "reaction", "sender"), [("server", "_serve", 1), ("client", "_follow", 2)]
)
def test_every_message_is_heard(
    name: str, reaction: str, sender: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus gets as far as to every message that leaves the session open."""
    kinds: set[type[Message]] = set()
    react: Callable[[Session, Message], None] = getattr(sessions, reaction)

    def listen(session: Session, message: Message) -> None:
        kinds.add(type(message))
        react(session, message)

    monkeypatch.setattr(sessions, reaction, listen)
    for data in corpus(name).values():
        TARGETS[name](data)
    assert kinds == {kind for kind in MESSAGES.values() if kind.sender & sender} - {Close, Error}
