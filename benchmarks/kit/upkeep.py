"""What a server's disk is at, as its statistics tell."""

from __future__ import annotations

import time
from typing import Any, Final

import attrs

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.processes import UprServer, pause_s
from upr_protocol.client import BlockingClient

STILL_S: Final = 2.0
"""With nothing moving for so long, nothing will."""

REST_TIMEOUT_S: Final = 300.0


def statistics(server: UprServer) -> dict[str, Any]:
    """The bucket's."""
    with BlockingClient(server.address) as client:
        return client.stats(server.BUCKET)


def persisted(server: UprServer) -> None:
    """Waits until all that was acknowledged is on disk."""
    with BlockingClient(server.address) as client:
        deadline = time.monotonic() + REST_TIMEOUT_S
        while any(row.persisted_seq < row.high_seq for row in client.seqnos()):
            if time.monotonic() > deadline:
                raise CannotMeasureError("not all is on disk in time")
            pause_s(0.02)


def rest(server: UprServer) -> float:
    """Waits until all is on disk and indexed, and compaction has come to rest.

    Returns:
        How long that took, without the time in which nothing moved any more.
    """
    started_at = moved_at = time.monotonic()
    persisted(server)
    last: object = None
    with BlockingClient(server.address) as client:
        while time.monotonic() < started_at + REST_TIMEOUT_S:
            stats = client.stats(server.BUCKET)
            now = (stats["disk"], stats["memory"], stats["flusher"])
            if now != last:
                last, moved_at = now, time.monotonic()
            elif not stats["disk"]["unindexed_mutations"] and (
                time.monotonic() > moved_at + STILL_S
            ):
                return moved_at - started_at
            pause_s(0.1)
    raise CannotMeasureError("compaction does not come to rest")


@attrs.frozen
class Disk:
    """What a bucket takes on disk, bytes.

    Attributes:
        log_file: The log's file.
        log_used: What of it is in use.
        index_file: The index's file.
        index_used: What of it is in use.
        chunks: The chunks in the log.
    """

    log_file: int
    log_used: int
    index_file: int
    index_used: int
    chunks: int

    @classmethod
    def of(cls, server: UprServer) -> Disk:
        """As of the last step of its upkeep; the files as they are now."""
        disk = statistics(server)["disk"]
        folder = server.data_dir / "buckets" / server.BUCKET
        return cls(
            (folder / "log" / "data.mdb").stat().st_blocks * 512,
            disk["log"]["bytes_used"],
            (folder / "index" / "data.mdb").stat().st_blocks * 512,
            disk["index"]["bytes_used"],
            disk["chunk_bytes"],
        )

    @property
    def files(self) -> int:
        """Both files."""
        return self.log_file + self.index_file
