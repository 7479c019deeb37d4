"""A worker's side of the conversation with the row that started it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from benchmarks.kit.target import target
from upr_protocol.client import Address


class Commands:
    """Commands that come in, a line of JSON each, and the answers that go out.

    Args:
        incoming: Where commands come from; its first line is `arguments`.
        outgoing: Where answers go.

    Attributes:
        arguments: What the role was given to begin with.
    """

    def __init__(self, incoming: IO[str], outgoing: IO[str]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.arguments: dict[str, Any] = json.loads(incoming.readline())

    @property
    def target(self) -> Address:
        """The bucket in the arguments: its `url`, and a `certificate` if it is encrypted."""
        return target(self.arguments["url"], self.arguments.get("certificate", ""))

    def answer(self, **fields: Any) -> None:
        """Answers the oldest command, or says `ready` to the arguments."""
        self._outgoing.write(json.dumps(fields) + "\n")
        self._outgoing.flush()

    def next(self) -> dict[str, Any] | None:
        """The next command; None when there will be none."""
        line = self._incoming.readline()
        if not line:
            return None
        command: dict[str, Any] = json.loads(line)
        return command

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (command := self.next()) is not None:
            yield command
