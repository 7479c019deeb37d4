"""A connection that records how it is written to."""

from __future__ import annotations

from upr_server.net.step_writes import StepWrites


class Recorder:
    """A connection that records how it is written to."""

    def __init__(self, writes: StepWrites, nbytes: int = 10) -> None:
        self.calls: list[str] = []
        self._writes = writes
        self._nbytes = nbytes

    def wake_writer(self) -> None:
        self.calls.append("woken")

    def flush_now(self, now: float) -> int:
        self.calls.append("written")
        # When the write has made room, the writer must send the rest.
        self._writes.add(self)
        return self._nbytes
