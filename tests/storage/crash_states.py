"""The programs of the tests of crash states, which run as processes of their own.

`record` writes a log for a while and records every write. `replay` makes the files that a crash may
leave of it, opens each of them and reports what it found. `replay-lies` does the same with a disk
that reports too early that data is on it; the replay must detect that. They are processes because
damage in LMDB's own pages may crash the reader, and because functions that are redirected in a
library stay redirected.

A disk may do this with each write that no sync followed: keep it, lose it, or keep any of its
sectors of 512 bytes, independently of the other writes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from tests.kit.answer_rows import pack_rows
from tests.kit.effort import effort
from tests.storage.write_recorder import (
    Event,
    Recording,
    Reported,
    Resize,
    Sync,
    Write,
    WriteRecorder,
)
from upr_protocol.chunk import Chunk, ChunkBuilder
from upr_protocol.ids import Operation, PartitionState, SeqNo
from upr_server.storage import compaction
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.compaction import Compaction
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import BucketRecord, PartitionRecord
from upr_server.storage.simulated_disk import SimulatedDisk

COMMITS: Final = 280
PARTITIONS: Final = 3
KEYS: Final = 40
SECTOR_BYTES: Final = 512
MAP_BYTES: Final = 256 * 1024 * 1024
VARIANTS_MAX: Final = effort(1, 6)
"""How many states are made of one moment at which something was not synced yet."""
LIE_WRITES: Final = 20
"""How many writes a wrong disk reports as on disk although they are not."""

LIE_STATES: Final = 500
"""How many states of such a disk are enough to see what it does."""

_SIZES: Final = (1, 1, 1, 2, 3, 8, 30)
_VALUES: Final = (0, 10, 100, 100, 1_000, 6_000)


class Tally(msgspec.Struct):
    """What the replay found.

    Attributes:
        states: How many states were opened.
        different: How many different files these states are.
        lost: Writes that were lost in them.
        torn: Writes in them of which some sectors were lost.
        written_on: States in which one more commit succeeded.
        newer: States during a commit that already contain that commit.
        commits: Commits in the recording.
        wrong: The errors that were found.
    """

    states: int = 0
    different: int = 0
    lost: int = 0
    torn: int = 0
    written_on: int = 0
    newer: int = 0
    commits: int = 0
    wrong: list[str] = msgspec.field(default_factory=list)


def record_of(high: int) -> PartitionRecord:
    return PartitionRecord(PartitionState.ACTIVE, ((1, 0),), SeqNo(high), high)


def digest_of(ordered_map: OrderedMap) -> bytes:
    """A digest of all keys and values."""
    digest = hashlib.sha256()
    with ordered_map.read() as transaction:
        for key, value in transaction.scan(b"\0", b"\xff" * 40):
            digest.update(b"%d %d " % (len(key), len(value)))
            digest.update(key)
            digest.update(value)
    return digest.digest()


# Writing the log.


def some_chunk(random: Random, start: int) -> Chunk:
    builder = ChunkBuilder()
    count = random.choice(_SIZES)
    for seq in range(start + 1, start + 1 + count):
        key = b"key %d" % random.randrange(KEYS)
        if random.random() < 0.2:
            builder.append(Operation.DELETE, key, b"", seq, seq)
        else:
            value = random.randbytes(random.choice(_VALUES) if count < 5 else 20)
            builder.append(Operation.SET, key, value, seq, seq)
    return builder.build(SeqNo(start), SeqNo(start + count))


def commit_some(log: ChunkLog, random: Random) -> None:
    """Commits to one or more partitions."""
    writes = []
    for partition in sorted(random.sample(range(PARTITIONS), random.randint(1, PARTITIONS))):
        high = int(log.high_seq(partition))
        chunks = []
        for _ in range(random.choice((1, 1, 2, 5))):
            chunks.append(some_chunk(random, high))
            high = chunks[-1].end
        counter = random.randrange(20)
        answers = pack_rows([(b"a writer, really", counter, random.choice((b"", b"the answer")))])
        writes.append(PartitionWrite(partition, record_of(high), chunks, [answers]))
    log.commit(writes)


def record(folder: Path) -> Recording:
    """Records the writes of a log."""
    compaction.CHUNK_BYTES = 16 * 1024  # type: ignore[misc]
    compaction.WHOLE_BYTES_MIN = 8 * 1024  # type: ignore[misc]
    random = Random(4)
    ordered_map = LmdbOrderedMap(folder, bytes_max=MAP_BYTES, is_summed=True)
    log = ChunkLog(ordered_map)
    index = KeyIndex(SimulatedDisk(), log)
    log.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)
    path = folder / "data.mdb"
    image, digest = path.read_bytes(), digest_of(ordered_map)
    recorder = WriteRecorder(path)
    events = recorder.events
    sweeps: list[Compaction] = []
    for commit in range(COMMITS):
        if sweeps:
            step = sweeps[0].step(24 * 1024, (), purge_before_cas=1 << 62)
            index.apply_compaction(sweeps[0].partition, step.purged_tombstones, -1)
            if step.is_done:
                del sweeps[0]
        else:
            commit_some(log, random)
        if commit % 15 == 14:
            for partition in range(PARTITIONS):
                while (mark := index.follow_log(partition, 1_000)).seq < log.high_seq(partition):
                    pass
                if mark.seq and not any(sweep.partition == partition for sweep in sweeps):
                    sweeps.append(Compaction(log, index, partition, mark.seq))
        if not events or not isinstance(events[-1], Reported):
            events.append(Reported(digest_of(ordered_map)))
    ordered_map.close()
    return Recording(image, digest, events)


# Replaying it.


class Disk:
    """A file: its part on disk, and the writes since the last sync.

    Args:
        image: The initial content of the disk.
        is_honest: Whether synced data is on disk; if not, `LIE_WRITES` writes later.
    """

    def __init__(self, image: bytes, *, is_honest: bool = True) -> None:
        self._image = bytearray(image)
        self._is_honest = is_honest
        self.pending: list[Write] = []

    def take(self, event: Event) -> None:
        if isinstance(event, Write):
            if event.is_synced:
                _write(self._image, event.offset, event.data)
            else:
                self.pending.append(event)
        elif isinstance(event, Sync):
            keep = 0 if self._is_honest else LIE_WRITES
            while len(self.pending) > keep:
                write = self.pending.pop(0)
                _write(self._image, write.offset, write.data)
        elif isinstance(event, Resize):
            raise TypeError("a file that LMDB writes does not change its length otherwise")

    def crashed(self, random: Random, doing: Event | None, tally: Tally) -> bytes:
        """A file that a crash may leave. During a write, a part of it may be on disk."""
        image = bytearray(self._image)
        writes = [*self.pending, doing] if isinstance(doing, Write) else self.pending
        likely = random.choice((0.1, 0.5, 0.9))
        for write in writes:
            if random.random() < likely:
                _write(image, write.offset, write.data)
            elif random.random() < 0.5:
                tally.lost += 1
            else:
                tally.torn += _tear(image, write, random)
        return bytes(image)


def _write(image: bytearray, offset: int, data: bytes) -> None:
    if offset > len(image):
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


def _tear(image: bytearray, write: Write, random: Random) -> bool:
    """Keeps some sectors of a write, and returns whether others were lost."""
    offset, end = write.offset, write.offset + len(write.data)
    kept_sectors = lost_sectors = 0
    while offset < end:
        through = min(end, (offset // SECTOR_BYTES + 1) * SECTOR_BYTES)
        if random.random() < 0.5:
            _write(image, offset, write.data[offset - write.offset : through - write.offset])
            kept_sectors += 1
        else:
            lost_sectors += 1
        offset = through
    return bool(kept_sectors and lost_sectors)


def states(
    recording: Recording, tally: Tally, disk: Disk
) -> Iterator[tuple[str, bytes, list[bytes]]]:
    """Each state: its name, its file, and the correct digests, the older one first."""
    random = Random(5)
    reported = recording.digest
    following = [event.digest for event in recording.events if isinstance(event, Reported)]
    tally.commits = len(following)
    for position, event in enumerate(recording.events):
        started = position > 0 and not isinstance(recording.events[position - 1], Reported)
        within = started or isinstance(event, Write)
        is_certain = not disk.pending and not isinstance(event, Write)
        for variant in range(1 if is_certain else VARIANTS_MAX):
            tally.states += 1
            right = [reported, following[0]] if within else [reported]
            yield f"event {position}, variant {variant}", disk.crashed(random, event, tally), right
        disk.take(event)
        if isinstance(event, Reported):
            reported = event.digest
            del following[0]


def read_all(log: ChunkLog) -> None:
    """Reads every record and every chunk, and checks all checksums."""
    for index, partition in enumerate(log.load().partitions):
        after, high = 0, partition.record.high
        while after < high:
            after = log.read_chunks(index, after, high, bytes_max=1 << 20)[-1].end


def examine(folder: Path, right: list[bytes], tally: Tally) -> None:
    ordered_map = LmdbOrderedMap(folder, bytes_max=MAP_BYTES, is_summed=True)
    try:
        log = ChunkLog(ordered_map)
        read_all(log)
        ordered_map.verify()
        digest = digest_of(ordered_map)
        if digest not in right:
            raise AssertionError("what is there was never committed, or is too old")
        tally.newer += digest in right[1:]
        if not tally.states % 25:
            commit_some(log, Random(tally.states))
            read_all(log)
            tally.written_on += 1
    finally:
        ordered_map.close()


def replay(recording: Recording, folder: Path, states_max: int, *, is_honest: bool) -> Tally:
    """Opens every state."""
    tally = Tally()
    disk = Disk(recording.image, is_honest=is_honest)
    digests = set()
    path = folder / "data.mdb"
    for name, image, right in islice(states(recording, tally, disk), states_max):
        digests.add(hashlib.blake2b(image, digest_size=16).digest())
        path.write_bytes(image)
        with suppress(FileNotFoundError):
            (folder / "lock.mdb").unlink()
        # If the process crashes, this file has the name of the state.
        (folder / "state").write_text(name)
        try:
            examine(folder, right, tally)
        except Exception as error:  # noqa: BLE001  # anything at all is what this looks for
            tally.wrong.append(f"{name}: {type(error).__name__}: {error}")
    tally.different = len(digests)
    return tally


def main(program: str, folder: Path) -> None:
    saved = folder / "recording"
    work = folder / program
    work.mkdir()
    if program == "record":
        saved.write_bytes(msgspec.msgpack.encode(record(work)))
    else:
        recording = msgspec.msgpack.decode(saved.read_bytes(), type=Recording)
        is_honest = program == "replay"
        states_max = 1 << 32 if is_honest else LIE_STATES
        tally = replay(recording, work, states_max, is_honest=is_honest)
        (work / "tally").write_bytes(msgspec.msgpack.encode(tally))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
