"""Reads what a process writes to its standard output: one JSON object a line."""

from __future__ import annotations

import json
from typing import Any

import trio


class JsonLines:
    """Reads the lines of a process, one after the other.

    Args:
        process: The process; its output is a pipe.
        name: The name of the process, for the error if it has ended.
        late_s: How many seconds to wait for the next line.
    """

    def __init__(self, process: trio.Process, name: str, late_s: float) -> None:
        self._process = process
        self._name = name
        self._late_s = late_s
        self._received = bytearray()

    async def next(self) -> dict[str, Any]:
        """The next object that the process writes."""
        assert self._process.stdout is not None
        with trio.fail_after(self._late_s):
            await trio.lowlevel.checkpoint()
            while b"\n" not in self._received:
                data = await self._process.stdout.receive_some()
                assert data, f"{self._name} ended without a word"
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
