"""The bundle: what a publisher sends at once, for any of the partitions that one node has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter, lt
from struct import Struct
from typing import Final, NamedTuple, cast

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
            its own, up to and with this one (`Columns.chained_crc`). A run that is sent again must
            have the same. 0 for none.
    """

    partition: PartitionId
    row_count: int
    counter: int = 0
    chain: int = 0


_RUN: Final = Struct("<IIQI4x")

RUN_BYTES: Final = _RUN.size
"""What a run takes in the directory of a bundle."""

_NO_ROWS: Final = Chunk.build(())

_PARTITION: Final = attrgetter("partition")
_ROW_COUNT: Final = attrgetter("row_count")

# Where these stand in a run of the directory, in words of 4 bytes.
_PARTITION_WORD: Final = 0
_ROW_COUNT_WORD: Final = 1


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

    __slots__ = ("_bounds", "_directory", "_partitions", "_row_counts", "_runs", "chunk")

    def __init__(self, chunk: Chunk, runs: Iterable[BundleRun]) -> None:
        self._keep(chunk, None, tuple(runs))
        self._check()

    def _keep(
        self, chunk: Chunk, directory: bytes | None, runs: tuple[BundleRun, ...] | None = None
    ) -> None:
        """Of directory and runs the one that is None is made when it is asked for."""
        self.chunk = chunk
        self._directory = directory
        self._runs = runs
        self._partitions: list[PartitionId] | None = None
        self._row_counts: list[int] | None = None
        self._bounds: tuple[int, ...] | None = None

    def _check(self) -> None:
        """Raises `ChunkError` when the runs are not those of a bundle with this chunk."""
        _check_run_count(self.run_count)
        partitions, row_counts = self.partitions, self.row_counts
        if min(row_counts) < 1:
            raise ChunkError("a run of a bundle has no rows")
        row_count = sum(row_counts)
        _check_row_count(row_count)
        if row_count != self.chunk.count:
            raise ChunkError(
                f"the runs of a bundle have {row_count} rows, and its chunk has {self.chunk.count}"
            )
        if not all(map(lt, partitions, partitions[1:])):
            raise ChunkError(_ORDER_SENTENCE)

    @property
    def runs(self) -> tuple[BundleRun, ...]:
        """The runs. O(runs) for the first call, if it was made of parts or of a directory."""
        if self._runs is None:
            self._runs = decode_runs(self.directory)
        return self._runs

    @property
    def partitions(self) -> list[PartitionId]:
        """The partition of each run. O(runs) for the first call, without an object for each."""
        if self._partitions is None:
            self._partitions = cast("list[PartitionId]", self._column(_PARTITION_WORD, _PARTITION))
        return self._partitions

    @property
    def row_counts(self) -> list[int]:
        """The rows of each run. O(runs) for the first call, without an object for each."""
        if self._row_counts is None:
            self._row_counts = self._column(_ROW_COUNT_WORD, _ROW_COUNT)
        return self._row_counts

    def _column(self, word: int, field: Callable[[BundleRun], int]) -> list[int]:
        if self._runs is not None:
            return list(map(field, self._runs))
        return memoryview(self.directory).cast("I")[word :: RUN_BYTES // 4].tolist()

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each run begins in the chunk, and where the last ends. O(runs) for the first
        call."""
        if self._bounds is None:
            self._bounds = tuple(accumulate(self.row_counts, initial=0))
        return self._bounds

    @classmethod
    def of_directory(cls, chunk: Chunk, directory: bytes) -> Bundle:
        """A bundle of which the runs are encoded.

        Raises:
            ChunkError: As for the constructor.
        """
        if len(directory) % RUN_BYTES:
            raise ChunkError("the last run of a bundle is not whole")
        bundle = cls.__new__(cls)
        bundle._keep(chunk, directory)  # noqa: SLF001  # its own, though the linter cannot tell
        bundle._check()  # noqa: SLF001
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

    def without_rows(self) -> Bundle:
        """Its runs alone, without the memory of their rows. They cannot be read, nor sent."""
        bundle = Bundle.__new__(Bundle)
        bundle._keep(_NO_ROWS, self.directory)  # noqa: SLF001  # its own
        return bundle

    def run_chunk(self, index: int) -> Chunk:
        """The rows of one run, as a chunk of their own. A copy, unless it is the only run."""
        if self.run_count == 1:
            return self.chunk
        low, high = self.bounds[index : index + 2]
        return self.chunk.rows(low, high, SeqNo(0), SeqNo(0))

    def run_chunks(self) -> list[Chunk]:
        """The rows of each run, as chunks of their own."""
        return [self.run_chunk(index) for index in range(self.run_count)]
