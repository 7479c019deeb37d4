"""A history as somebody reads it who wants to know how it came to that."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from tests.kit.history import Failed, Fault, History, Said

WIDTH = 200


def digest(history: History) -> str:
    """The same for the same history."""
    checksum = sha256()
    for time_s, event in history.events:
        checksum.update(f"{time_s!r} {event!r}\n".encode())
    return checksum.hexdigest()


def story(history: History, last: int = 60) -> Iterator[str]:
    """What was done to the cluster, and the end of what it did, a line at a time."""
    events = list(enumerate(history.events))
    tail = len(events) - last
    for index, (time_s, event) in events:
        if index >= tail or isinstance(event, Fault | Failed | Said):
            yield f"{time_s:10.3f}  {_line(event)}"


def _line(event: object) -> str:
    if isinstance(event, Said):
        text = f"{event.who}: {event.what}"
    elif isinstance(event, Fault):
        text = f"FAULT {event.what}"
    else:
        text = repr(event)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
