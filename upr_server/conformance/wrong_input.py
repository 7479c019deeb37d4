"""One thing that a client may do wrong, and what a server must make of it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, unique

import attrs

from upr_protocol.errors import Status
from upr_protocol.wire import Message
from upr_server.conformance.wrong_frames import encoded


@unique
class Progress(Enum):
    """How far a connection has come when the wrong input arrives."""

    CONNECTED = "before `Hello`"
    READY = "before `Open`"
    OPENED = "a bucket is open"
    STREAMING = "after `Go`"


@unique
class Outcome(Enum):
    """What becomes of wrong input."""

    CLOSED = "`Error`, and the connection is closed"
    REFUSED = "`Refusal`"
    NO_STREAM = "`StreamReply`"
    ROW_FAILED = "the row is in `failures`"
    LOG = "`PartitionLog`"
    KEY_REFUSED = "a `DELETE` with the code in its flags"
    IGNORED = "nothing"


@attrs.frozen
class WrongInput:
    """One thing that may be wrong.

    Attributes:
        topic: What it is about; rows of the table with the same topic stand together.
        wrong: What is wrong.
        progress: Where in a conversation it is played.
        frames: The bytes that the client sends. None for what cannot be brought about at will: then
            it is in the table only.
        outcome: What becomes of it.
        status: The code.
    """

    topic: str
    wrong: str
    progress: Progress
    frames: bytes | None
    outcome: Outcome
    status: Status


class WrongInputs:
    """A part of the table, as it is written down.

    Attributes:
        all: What it has.
    """

    def __init__(self) -> None:
        self.all: list[WrongInput] = []

    def topic(
        self, topic: str, progress: Progress
    ) -> Callable[[str, bytes | Message | None, Outcome, Status], None]:
        """What adds one thing about this topic: what is wrong, the bytes or the message, what
        becomes of it, and the code."""

        def add(wrong: str, data: bytes | Message | None, outcome: Outcome, status: Status) -> None:
            frames = encoded(data) if isinstance(data, Message) else data
            self.all.append(WrongInput(topic, wrong, progress, frames, outcome, status))

        return add
