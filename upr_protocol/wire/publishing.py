"""Publishing: bundles of mutations, and the credit that paces them."""

from __future__ import annotations

from array import array
from functools import lru_cache, partial
from itertools import chain
from struct import Struct
from typing import Any, Final, NamedTuple

import construct as cs

from upr_protocol.chunk import RUN_BYTES, Buffer, Bundle, Chunk
from upr_protocol.errors import ChunkError, Status
from upr_protocol.ids import Cas, Durability, HistoryId, PartitionId, SeqNo
from upr_protocol.limits import BUNDLE_RUNS_MAX, FRAME_BODY_BYTES_MAX
from upr_protocol.wire.columns import BUNDLE, member, member_of, row, tuple_of
from upr_protocol.wire.message import DATA, Message, Role, U64Message, check_end

_MUTATE: Final = Struct("<16sQBB2xI")
_RESULT: Final = Struct("<IIQQQQ")
_ONE_RUN: Final = Struct("<QQIIQQQQQQ")
_TWO_U64: Final = Struct("<QQ")
_U64: Final = Struct("<Q")


class RunResult(NamedTuple):
    """What became of one run of a bundle.

    The mutations that succeeded have consecutive sequence numbers and CAS values, in the order of
    their rows; those that failed have none.

    Attributes:
        partition: The run's partition.
        status: `OK`, or why the run was refused as a whole, or `NOT_DURABLE_YET`. A `Status`, or
            one of a later version.
        history_id: The history that the sequence numbers belong to.
        first_seq: The first sequence number given; 0 when nothing succeeded.
        last_seq: The last sequence number given; 0 when nothing succeeded.
        first_cas: The first CAS value given.
    """

    partition: PartitionId
    status: int = 0
    history_id: HistoryId = HistoryId(0)
    first_seq: SeqNo = SeqNo(0)
    last_seq: SeqNo = SeqNo(0)
    first_cas: Cas = Cas(0)


# `RunResult._make` does the same, with a call of Python for each.
_AS_RESULT: Final = partial(tuple.__new__, RunResult)

RESULT_BYTES: Final = _RESULT.size
"""What a run takes in the answer to its bundle."""


def decode_results(lines: Buffer) -> list[RunResult]:
    """What became of runs, from the lines of an answer."""
    return list(map(_AS_RESULT, _RESULT.iter_unpack(lines)))


class MutateReply(Message, frozen=True):
    """The results of a bundle's runs, when every run has its result.

    Attributes:
        map_revision: If runs were refused because another node is active: the revision of this
            server's map. Otherwise 0.
        runs: The result of each run, in their order. `first_seq`, `last_seq` and `first_cas` are 0
            if no row succeeded. `history_id` is 0, too, if the status is neither `OK` nor
            `NOT_DURABLE_YET`.
        failures: (row of the bundle, from 0; status) of each row that failed, by row.
        counters: (row of the bundle, from 0; new value) of each increment and decrement that
            succeeded.
    """

    opcode = 0x91
    sender = Role.SERVER
    states = DATA
    body_bytes_max = FRAME_BODY_BYTES_MAX
    layout = cs.Struct(
        "map_revision" / cs.Int64ul * "the revision of the partition map, or 0",
        "runs"
        / tuple_of(
            row(
                partition=cs.Int32ul,
                status=cs.Int32ul,
                history_id=cs.Int64ul,
                first_seq=cs.Int64ul,
                last_seq=cs.Int64ul,
                first_cas=cs.Int64ul,
            ),
            cs.Int64ul,
        )
        * "what became of each run",
        "failures"
        / tuple_of(row(index=cs.Int32ul, status=cs.Int32ul), cs.Int64ul)
        * "what failed, by row of the bundle",
        "counters"
        / tuple_of(
            row(index=cs.Int32ul, padding=cs.Padding(4), value=cs.Int64ul),
            cs.Int64ul,
        )
        * "new values of counters, by row of the bundle",
    )

    map_revision: int
    runs: tuple[RunResult, ...]
    failures: tuple[tuple[int, int], ...] = ()
    counters: tuple[tuple[int, int], ...] = ()

    def body_buffers(self) -> tuple[Buffer, ...]:
        runs, failures, counters = self.runs, self.failures, self.counters
        if len(runs) == 1 and not failures and not counters:
            # The answer to a single operation that was done, or refused as a run.
            return (_ONE_RUN.pack(self.map_revision, 1, *runs[0], 0, 0),)
        return (
            b"".join(
                (
                    _TWO_U64.pack(self.map_revision, len(runs)),
                    _structs("IIQQQQ", len(runs)).pack(*chain.from_iterable(runs)),
                    _U64.pack(len(failures)),
                    array("I", chain.from_iterable(failures)).tobytes(),
                    _U64.pack(len(counters)),
                    # A row's index and what pads it are one number.
                    array("Q", chain.from_iterable(counters)).tobytes(),
                )
            ),
        )

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        map_revision, run_count = _TWO_U64.unpack_from(body)
        failures_at = 24 + _RESULT.size * run_count
        (failure_count,) = _U64.unpack_from(body, failures_at - 8)
        counters_at = failures_at + 8 * failure_count + 8
        (counter_count,) = _U64.unpack_from(body, counters_at - 8)
        # Before anything is made of them: the counts may promise what never came.
        check_end(body, counters_at + 16 * counter_count)
        view = memoryview(body)
        failures = array("I", view[failures_at : counters_at - 8].tobytes())
        counters = Struct("<" + "I4xQ" * counter_count).unpack_from(body, counters_at)
        return (
            map_revision,
            tuple(decode_results(view[16 : failures_at - 8])),
            tuple(zip(failures[::2], failures[1::2], strict=True)),
            tuple(zip(counters[::2], counters[1::2], strict=True)),
        )


class Mutate(Message, frozen=True):
    """A bundle: operations on any partitions for which the server is active.

    Attributes:
        writer: The publisher's 16-byte ID; zeros: the runs have no tokens.
        attempt: For engines that run a task again: which attempt of the task this is. When a
            partition has seen a later attempt, it refuses earlier ones. 0 without attempts.
        durability: How durable the runs must be before the answer.
        copies: How many replicas beside the active, for the replicated levels.
        bundle: The operations, and which of them are for which partition.
    """

    opcode = 0x11
    sender = Role.CLIENT
    states = DATA
    body_bytes_max = FRAME_BODY_BYTES_MAX
    answers = (MutateReply,)
    refusals = (
        Status.NOT_MY_PARTITION,
        Status.NO_BUCKET,
        Status.BAD_ARGUMENT,
        Status.TEMPORARY_FAILURE,
        Status.TOKEN_TOO_OLD,
        Status.LIMIT_REACHED,
        Status.DAMAGED,
        Status.SUPERSEDED,
        Status.REPLAY_DIFFERS,
        Status.TOO_FEW_REPLICAS,
    )
    layout = cs.Struct(
        "writer" / cs.Bytes(16) * "the writer's ID; zeros for none",
        "attempt" / cs.Int64ul * "which run of the writer's task this is, or 0",
        "durability" / member(Durability) * "0 memory, 1 persisted, 2 replicated, 3 both",
        "copies" / cs.Int8ul * "replicas beside the active, for levels 2 and 3",
        "padding" / cs.Padding(2),
        "bundle" / BUNDLE * "the operations",
    )

    bundle: Bundle
    writer: bytes = bytes(16)
    durability: Durability = Durability.MEMORY
    copies: int = 0
    attempt: int = 0

    def body_buffers(self) -> tuple[Buffer, ...]:
        bundle, writer, attempt = self.bundle, self.writer, self.attempt
        head = _MUTATE.pack(writer, attempt, self.durability, self.copies, bundle.run_count)
        return (head + bundle.directory, bundle.chunk.encode())

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        writer, attempt, durability, copies, run_count = _MUTATE.unpack_from(body)
        if run_count > BUNDLE_RUNS_MAX:
            raise ChunkError(f"a bundle of {run_count} runs; at most {BUNDLE_RUNS_MAX}")
        view = memoryview(body)
        chunk_at = _MUTATE.size + RUN_BYTES * run_count
        bundle = Bundle.of_directory(Chunk(view[chunk_at:]), bytes(view[_MUTATE.size : chunk_at]))
        return bundle, writer, member_of(Durability, durability), copies, attempt


@lru_cache(maxsize=128)
def _structs(layout: str, count: int) -> Struct:
    """So many of a structure, one behind the other."""
    return Struct("<" + layout * count)


class Credit(U64Message, frozen=True):
    """Adds bytes to the client's credit."""

    opcode = 0x92
    sender = Role.SERVER
    states = DATA
    layout = cs.Struct("bytes" / cs.Int64ul * "bytes, in addition to earlier ones")

    bytes: int
