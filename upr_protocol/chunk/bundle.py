"""The bundle: what a publisher sends at once, for any of the partitions that one node has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter, lt
from struct import Struct
from typing import Final, NamedTuple

from upr_kernel import ChunkDefectError, join_runs
from upr_protocol.chunk.chunk import Chunk
from upr_protocol.chunk.layout import Buffer
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


BundlePart = tuple[PartitionId, Chunk, int, int]
"""A run with its rows: its partition, a chunk of its own, its counter and its chain."""

_ORDER_SENTENCE: Final = "the runs of a bundle must be in the order of their partitions"


def _check_run_count(count: int) -> None:
    if not 1 <= count <= BUNDLE_RUNS_MAX:
        raise ChunkError(f"a bundle has 1 to {BUNDLE_RUNS_MAX} runs, not {count}")


def _check_row_count(count: int) -> None:
    if count > BUNDLE_MUTATIONS_MAX:
        raise ChunkError(f"a bundle has at most {BUNDLE_MUTATIONS_MAX} mutations, not {count}")


class Bundle:
    """A published chunk whose rows are ordered by partition, and its runs.

    Args:
        chunk: The operations of all runs, one run behind the other.
        runs: The runs, in the order of their rows.

    Attributes:
        chunk: The operations.

    Raises:
        ChunkError: There is no run or there are too many, a run has no rows, there are too many
            rows, the runs' rows are not those of the chunk, or the partitions do not rise.
    """

    __slots__ = ("_bounds", "_directory", "_runs", "chunk")

    def __init__(self, chunk: Chunk, runs: Iterable[BundleRun]) -> None:
        runs = tuple(runs)
        _check_run_count(len(runs))
        counts = list(map(_ROW_COUNT, runs))
        bounds = tuple(accumulate(counts, initial=0))
        if min(counts) < 1:
            raise ChunkError("a run of a bundle has no rows")
        _check_row_count(bounds[-1])
        if bounds[-1] != chunk.count:
            raise ChunkError(
                f"the runs of a bundle have {bounds[-1]} rows, and its chunk has {chunk.count}"
            )
        partitions = list(map(_PARTITION, runs))
        if not all(map(lt, partitions, partitions[1:])):
            raise ChunkError(_ORDER_SENTENCE)
        self._keep(chunk, None, runs, bounds)

    def _keep(
        self,
        chunk: Chunk,
        directory: bytes | None,
        runs: tuple[BundleRun, ...] | None = None,
        bounds: tuple[int, ...] | None = None,
    ) -> None:
        """What is None is made when it is asked for."""
        self.chunk = chunk
        self._directory = directory
        self._runs = runs
        self._bounds = bounds

    @property
    def runs(self) -> tuple[BundleRun, ...]:
        """The runs. O(runs) for the first call, of a bundle that was made of parts."""
        if self._runs is None:
            self._runs = decode_runs(self.directory)
        return self._runs

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each run begins in the chunk, and where the last ends. O(runs) like `runs`."""
        if self._bounds is None:
            self._bounds = tuple(accumulate(map(_ROW_COUNT, self.runs), initial=0))
        return self._bounds

    @property
    def shortest_run_rows(self) -> int:
        """The rows of the shortest run. O(runs)."""
        return min(run.row_count for run in self.runs)

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
            assert self._runs is not None
            self._directory = encode_runs(self._runs)
        return self._directory

    @classmethod
    def of_one_run(
        cls, partition: PartitionId, chunk: Chunk, counter: int = 0, chain: int = 0
    ) -> Bundle:
        """A bundle of one run, over the same bytes."""
        return cls(chunk, (BundleRun(partition, chunk.count, counter, chain),))

    @classmethod
    def of_parts(cls, parts: Sequence[BundlePart]) -> Bundle:
        """A bundle of runs whose operations lie in chunks of their own. One copy of the bytes, and
        no work of Python an operation; none at all for one run.

        Args:
            parts: The runs, by rising partition.

        Raises:
            ChunkError: As for the constructor, or a part is damaged.
        """
        _check_run_count(len(parts))
        if len(parts) == 1:
            return cls.of_one_run(*parts[0])
        try:
            directory, encoded_chunk = join_runs(
                [
                    (partition, chunk.encode(), counter, chain)
                    for partition, chunk, counter, chain in parts
                ]
            )
        except ChunkDefectError:
            raise ChunkError("the offsets of a part leave its bytes, or decrease") from None
        except ValueError:
            raise ChunkError(f"a run of a bundle has no rows, or {_ORDER_SENTENCE}") from None
        chunk = Chunk(encoded_chunk)
        _check_row_count(chunk.count)
        bundle = cls.__new__(cls)
        bundle._keep(chunk, directory)  # noqa: SLF001  # its own, though the linter cannot tell
        return bundle

    @property
    def run_count(self) -> int:
        """How many runs it has. O(1)."""
        if self._directory is not None:
            return len(self._directory) // RUN_BYTES
        assert self._runs is not None
        return len(self._runs)

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
        return f"<Bundle of {self.run_count} runs, {self.chunk.count} rows>"

    def run_chunk(self, index: int) -> Chunk:
        """The rows of one run, as a chunk of their own. A copy, unless it is the only run."""
        if self.run_count == 1:
            return self.chunk
        low, high = self.bounds[index : index + 2]
        return self.chunk.rows(low, high, SeqNo(0), SeqNo(0))

    def run_chunks(self) -> list[Chunk]:
        """The rows of each run, as chunks of their own."""
        return [self.run_chunk(index) for index in range(self.run_count)]
