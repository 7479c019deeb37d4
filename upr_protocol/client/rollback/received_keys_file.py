"""The received keys in a file."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from upr_protocol.client.rollback.checksummed_file import ChecksummedFile, DamagedFileError
from upr_protocol.client.rollback.received_keys import (
    ForeignKeys,
    ReceivedKeys,
    ReceivedKeysLimits,
    ReceivedVersion,
)
from upr_protocol.client.rollback.received_keys_rewrite import (
    ReceivedKeysRewrite,
    encoded_floors,
)
from upr_protocol.concurrency import run_steps
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.steps import result_of

_MAGIC: Final = "ring"
_VERSION: Final = 1
_SEVERAL: Final = "several"
"""The kind of a record that holds several changes: they share a checksum, so a crash leaves all of
them or none."""

_REWRITTEN_PER_RECEIVED: Final = 4
"""How many keys are encoded anew with each that comes, while the file is rewritten. Until that is
done as many come as a quarter of the keys."""

_REWRITTEN_MAX: Final = 2000
"""How many are encoded in one step: 2 ms."""

_GARBAGE_BYTES: Final = 4 * 1024 * 1024
"""The file is rewritten when it holds this much garbage, plus as much again as it holds data."""


class ReceivedKeysFile:
    """The received keys in memory and on disk.

    Args:
        path: The file; created if it is missing. Two consumers must not share it.
        is_buffered: Whether received keys are written by `flush`, and not one chunk at a time.
        first_floors: The floors of a new file: by partition, up to which number keys were received
            that it does not know.

    Attributes:
        keys: The same keys in memory.

    Raises:
        DamagedFileError: The file is damaged, belongs to another bucket, or has another format.
        OSError: The file cannot be read or written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        bucket: str,
        limits: ReceivedKeysLimits | None = None,
        *,
        is_buffered: bool = False,
        first_floors: Mapping[PartitionId, SeqNo] | None = None,
    ) -> None:
        self.keys = ReceivedKeys(limits or ReceivedKeysLimits())
        self._bucket = bucket
        self._is_buffered = is_buffered
        # `flush` may run in a thread of the application's, and takes changes while others come: the
        # deque is one object for good, and its methods are atomic.
        self._buffer: deque[tuple[Any, ...]] = deque()
        self._write_lock = threading.Lock()
        self._file, records = ChecksummedFile.open(Path(path))
        try:
            if not records:
                # At once: without the floors, the next start would take it for one that knows all.
                records = [self._header(), *encoded_floors(first_floors or {})]
                self._file.replace(records)
            self._load(records)
        except BaseException:
            self._file.close()
            raise
        self._compacted_bytes = 0
        """How large the file was when it had no garbage. How much it has of an earlier process is
        not known."""
        self._rewrite: ReceivedKeysRewrite | None = None

    def _header(self) -> bytes:
        return msgspec.msgpack.encode([_MAGIC, _VERSION, self._bucket])

    def _load(self, records: Iterable[bytes]) -> None:
        path = self._file.path
        for index, record in enumerate(records):
            try:
                kind, *fields = msgspec.msgpack.decode(record)
                if not index:
                    self._check_header(kind, *fields)
                elif kind == _SEVERAL:
                    for change in fields[0]:
                        self._apply(*change)
                else:
                    self._apply(kind, *fields)
            except DamagedFileError:
                raise
            except (msgspec.DecodeError, ValueError, TypeError, IndexError, KeyError) as error:
                raise DamagedFileError(f"{path} is not a received-keys file: {error!r}") from error

    def _check_header(self, magic: str, version: int, bucket: str) -> None:
        path = self._file.path
        if magic != _MAGIC or version != _VERSION:
            raise DamagedFileError(f"{path} is not a received-keys file of version {_VERSION}")
        if bucket != self._bucket:
            raise DamagedFileError(
                f"{path} holds the received keys of the bucket {bucket!r}, not of "
                f"{self._bucket!r}: use one for each bucket"
            )

    def _apply(self, kind: str, partition: PartitionId, *fields: Any) -> None:
        keys = self.keys
        if kind == "received":
            keys.receive(partition, _rows(fields[0]))
        elif kind == "replaced":
            versions = {
                key: ReceivedVersion(seq, history) for key, seq, history in _rows(fields[0])
            }
            keys.replace(partition, versions)
        elif kind == "dropped":
            result_of(keys.drop(partition))
        elif kind == "floor":
            keys.raise_floor(partition, SeqNo(fields[0]))
        else:
            raise ValueError(f"unknown kind of record: {kind!r}")

    # Changes. Each is on disk when its method returns, but for `receive` with a buffer.

    async def _append(self, *fields: Any) -> None:
        await trio.to_thread.run_sync(self._write, fields)
        # Only now: a caller that was cancelled before has changed nothing.
        self._apply(*fields)

    def _write(self, *changes: tuple[Any, ...]) -> None:
        """Appends the buffer and `changes`."""
        with self._write_lock:
            buffered_changes = self._buffer.copy()
            records = [*buffered_changes, *changes]
            if not records:
                return
            fields = records[0] if len(records) == 1 else (_SEVERAL, records)
            record = msgspec.msgpack.encode(fields)
            self._file.append(record)
            if self._rewrite is not None:
                self._rewrite.appended_records.append(record)
            # Only now: Ctrl-C before it loses none. What it has written again does no harm.
            for _ in buffered_changes:
                self._buffer.popleft()

    async def receive(
        self, partition: PartitionId, rows: Iterable[tuple[bytes, SeqNo, HistoryId]]
    ) -> None:
        """Adds the keys that the application is about to be given. With a buffer it passes no
        checkpoint: each would give the interpreter to a thread that writes, and ask for it again.
        """
        received_rows = list(rows)
        if self._is_buffered:
            self._buffer.append(("received", partition, received_rows))
            self.keys.receive(partition, received_rows)
        else:
            await self._append("received", partition, received_rows)
        if self._rewrite is not None and not self._rewrite.is_done:
            count = min(_REWRITTEN_PER_RECEIVED * len(received_rows), _REWRITTEN_MAX)
            self._rewrite.step(count)

    def flush(self) -> None:
        """Writes the keys in the buffer. May be called in any thread, and blocks it.

        Raises:
            OSError: They cannot be written, and are still in the buffer.
        """
        self._write()

    async def confirm_rollback(
        self, partition: PartitionId, versions: Mapping[bytes, ReceivedVersion] | None
    ) -> None:
        """Records that the application has carried out a `RollbackPlan` with these `versions`."""
        if versions is None:
            await trio.to_thread.run_sync(self._write, ("dropped", partition))
            # Cancelled half-way, it is confirmed again.
            await run_steps(self.keys.drop(partition))
        elif versions:
            await self._append("replaced", partition, _encodable(versions))

    async def raise_floor(self, partition: PartitionId, seq: SeqNo) -> None:
        """Records that keys received at or below `seq` may be missing here."""
        await self._append("floor", partition, seq)

    async def trim(
        self, droppable_seq: Callable[[PartitionId], SeqNo], *, in_order: bool = False
    ) -> bool:
        """Drops the oldest keys; see `ReceivedKeys.trim`."""
        has_trimmed = await run_steps(self.keys.trim(droppable_seq, in_order=in_order))
        await trio.lowlevel.checkpoint()
        return has_trimmed

    async def rewrite_if_due(self) -> None:
        """Begins to write the file anew where it has much garbage, and ends that once all keys are
        encoded. Passes no checkpoint otherwise. O(1), beside the writing in a thread.

        Raises:
            OSError: It cannot be written anew; it is tried again after more keys.
        """
        if self._rewrite is None:
            if self._file.nbytes > 2 * self._compacted_bytes + _GARBAGE_BYTES:
                self._rewrite = ReceivedKeysRewrite(self.keys)
        elif self._rewrite.is_done:
            await trio.to_thread.run_sync(self._finish_rewrite, self._rewrite)

    def _finish_rewrite(self, rewrite: ReceivedKeysRewrite) -> None:
        with self._write_lock:
            # Also where there is no room: another rewrite begins, and ends after some more keys.
            self._rewrite = None
            self._file.replace([self._header(), *rewrite.records()])
            self._compacted_bytes = self._file.nbytes

    def close(self) -> None:
        """Writes what is buffered, and closes the file.

        Raises:
            OSError: It cannot be written.
        """
        try:
            self.flush()
        finally:
            self._file.close()

    # Questions, as `ReceivedKeysSource` has them.

    async def floor(self, partition: PartitionId) -> SeqNo:
        """The sequence number above which every received key is known."""
        await trio.lowlevel.checkpoint()
        return self.keys.floor(partition)

    async def foreign_keys(
        self, partition: PartitionId, log: FailoverLog, seq: SeqNo
    ) -> ForeignKeys:
        """The received keys, compared with a stream. O(the partition's keys)."""
        await trio.lowlevel.checkpoint()
        return await run_steps(self.keys.foreign_keys(partition, log, seq))


def _rows(rows: Iterable[tuple[bytes, int, int]]) -> list[tuple[bytes, SeqNo, HistoryId]]:
    return [(key, SeqNo(seq), HistoryId(history_id)) for key, seq, history_id in rows]


def _encodable(
    versions: Mapping[bytes, ReceivedVersion],
) -> list[tuple[bytes, SeqNo, HistoryId]]:
    return [(key, version.seq, version.history_id) for key, version in versions.items()]
