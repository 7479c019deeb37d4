"""The bundle: what a publisher sends at once, for any of the partitions that one node has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter, lt
from struct import Struct
from typing import Final, NamedTuple

from upr_kernel import ChunkDefectError, gather
from upr_protocol.chunk.builder import ChunkBuilder
from upr_protocol.chunk.chunk import Chunk
from upr_protocol.chunk.layout import CHUNK_HEAD_BYTES, Buffer
from upr_protocol.errors import ChunkError
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, BUNDLE_RUNS_MAX


class BundleRun(NamedTuple):
    """The rows of a bundle that are for one partition: one batch of a publisher.

    Attributes:
        partition: The partition.
        row_count: How many rows of the bundle it has; they are neighbours.
        counter: Rises with each new run of its writer to this partition, from 1. The same counter
            means the same run again. 0 in a bundle without a writer.
        chain: CRC32C over the CRCs of all runs of the writer to this partition, each as a chunk of
            its own, up to and with this one (`Chunk.chained`). A run that is sent again must have
            the same. 0 for none.
    """

    partition: PartitionId
    row_count: int
    counter: int = 0
    chain: int = 0


_RUN: Final = Struct("<IIQI4x")

RUN_BYTES: Final = _RUN.size
"""What a run takes in the directory of a bundle."""

_PARTITION: Final = attrgetter("partition")
_ROW_COUNT: Final = attrgetter("row_count")


@lru_cache(maxsize=128)
def _runs_struct(count: int) -> Struct:
    return Struct("<" + "IIQI4x" * count)


def encode_runs(runs: Sequence[BundleRun]) -> bytes:
    """The directory of a bundle with these runs: partition, rows, counter and chain of each."""
    return _runs_struct(len(runs)).pack(*chain.from_iterable(runs))


def decode_runs(directory: Buffer) -> tuple[BundleRun, ...]:
    """The runs of a directory.

    Raises:
        struct.error: The last one is not whole.
    """
    # A tuple at once: CPython 3.11 crashes when its garbage collector finds such an iterator.
    return tuple(map(BundleRun._make, _RUN.iter_unpack(directory)))


class Bundle:
    """A published chunk whose rows are ordered by partition, and its runs.

    Args:
        chunk: The operations of all runs, one run behind the other.
        runs: The runs, in the order of their rows.

    Attributes:
        chunk: The operations.
        runs: The runs.
        bounds: Where each run begins in the chunk, and where the last ends.
        shortest_run_rows: The rows of the shortest run.

    Raises:
        ChunkError: There is no run or there are too many, a run has no rows, there are too many
            rows, the runs' rows are not those of the chunk, or the partitions do not rise.
    """

    __slots__ = ("_directory", "bounds", "chunk", "runs", "shortest_run_rows")

    def __init__(self, chunk: Chunk, runs: Iterable[BundleRun]) -> None:
        runs = tuple(runs)
        if not 1 <= len(runs) <= BUNDLE_RUNS_MAX:
            raise ChunkError(f"a bundle has 1 to {BUNDLE_RUNS_MAX} runs, not {len(runs)}")
        counts = list(map(_ROW_COUNT, runs))
        bounds = tuple(accumulate(counts, initial=0))
        shortest_run_rows = min(counts)
        if shortest_run_rows < 1:
            raise ChunkError("a run of a bundle has no rows")
        if bounds[-1] > BUNDLE_MUTATIONS_MAX:
            raise ChunkError(
                f"a bundle has at most {BUNDLE_MUTATIONS_MAX} mutations, not {bounds[-1]}"
            )
        if bounds[-1] != chunk.count:
            raise ChunkError(
                f"the runs of a bundle have {bounds[-1]} rows, and its chunk has {chunk.count}"
            )
        partitions = list(map(_PARTITION, runs))
        if not all(map(lt, partitions, partitions[1:])):
            raise ChunkError("the runs of a bundle must be in the order of their partitions")
        self.chunk = chunk
        self.runs = runs
        self.bounds = bounds
        self.shortest_run_rows = shortest_run_rows
        self._directory: bytes | None = None

    @classmethod
    def of_directory(cls, chunk: Chunk, directory: bytes) -> Bundle:
        """A bundle of which the runs are encoded.

        Raises:
            ChunkError: As for the constructor.
        """
        bundle = cls(chunk, decode_runs(directory))
        bundle._directory = directory
        return bundle

    @property
    def directory(self) -> bytes:
        """The runs, encoded. O(runs) for the first call."""
        if self._directory is None:
            self._directory = encode_runs(self.runs)
        return self._directory

    @classmethod
    def of_one_run(
        cls, partition: PartitionId, chunk: Chunk, counter: int = 0, chain: int = 0
    ) -> Bundle:
        """A bundle of one run, over the same bytes."""
        return cls(chunk, (BundleRun(partition, chunk.count, counter, chain),))

    @classmethod
    def of_chunks(cls, parts: Sequence[Chunk | ChunkBuilder], runs: Iterable[BundleRun]) -> Bundle:
        """A bundle of runs whose operations lie in chunks of their own. Two copies of the bytes,
        and little work an operation.

        Args:
            parts: The operations of each run.
            runs: The runs, by rising partition.

        Raises:
            ChunkError: As for the constructor, or a run has not as many rows as its part, or a part
                is damaged.
        """
        runs = tuple(runs)
        if list(map(_ROW_COUNT, runs)) != list(map(len, parts)):
            raise ChunkError("the runs of a bundle have other rows than its parts")
        if len(parts) == 1:
            (part,) = parts
            return cls(part if isinstance(part, Chunk) else part.build(), runs)
        chunks = [part if isinstance(part, Chunk) else part.build() for part in parts]
        try:
            joined = gather(
                [(chunk.encode(), 0, chunk.count, None, None, 0) for chunk in chunks], 0, 0
            )
        except ChunkDefectError:
            raise ChunkError("the offsets of a part leave its bytes, or decrease") from None
        # A published chunk has no numbers, whatever a caller has given it.
        numbers_end = CHUNK_HEAD_BYTES + 8 * sum(map(len, parts))
        head, numbers = joined[:CHUNK_HEAD_BYTES], bytes(numbers_end - CHUNK_HEAD_BYTES)
        return cls(Chunk(b"".join((head, numbers, memoryview(joined)[numbers_end:]))), runs)

    def __len__(self) -> int:
        """How many rows it has."""
        return self.chunk.count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bundle):
            return NotImplemented
        return self.runs == other.runs and self.chunk == other.chunk

    def __hash__(self) -> int:
        return hash((self.runs, self.chunk))

    def __repr__(self) -> str:
        return f"<Bundle of {len(self.runs)} runs, {self.chunk.count} rows>"

    def run_chunk(self, index: int) -> Chunk:
        """The rows of one run, as a chunk of their own. A copy, unless it is the only run."""
        if len(self.runs) == 1:
            return self.chunk
        low, high = self.bounds[index : index + 2]
        return self.chunk.rows(low, high, SeqNo(0), SeqNo(0))

    def run_chunks(self) -> list[Chunk]:
        """The rows of each run, as chunks of their own."""
        return [self.run_chunk(index) for index in range(len(self.runs))]
