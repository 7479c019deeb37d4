"""What became of a batch, and the few bytes in which it is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, SeqNo


class MutateResult(msgspec.Struct, frozen=True, gc=False):
    """What became of one batch.

    A batch is not a transaction: each mutation fails alone, and those that succeed get consecutive
    numbers and CAS values, in the batch's order.

    Attributes:
        history_id: The history in which the numbers count.
        first_seq: The first success's number; with no success, one more than `last_seq`.
        last_seq: The last success's number.
        first_cas: The first success's CAS.
        failures: Index in the batch and reason, for each that failed.
        counters: Index in the batch and new value, for each increment or decrement that succeeded.
        is_repeated: Whether this answer was given before: the batch had its effect then.
        status: `OK`, or why the batch as a whole was refused, without any effect: `WRONG_STATE`,
            `TOKEN_TOO_OLD`, `SUPERSEDED`, `REPLAY_DIFFERS`, or `TEMPORARY_FAILURE` when an earlier
            batch of the publisher was refused and must come first.
        chain: What the publisher gave to vouch for the batch and all before it; 0 for nothing.
        attempt: Which run of the publisher's task sent it, or has run since; 0 for none.
    """

    history_id: HistoryId
    first_seq: SeqNo
    last_seq: SeqNo
    first_cas: Cas
    failures: list[tuple[int, Status]] = []
    counters: list[tuple[int, int]] = []
    is_repeated: bool = False
    status: Status = Status.OK
    chain: int = 0
    attempt: int = 0


class _PackedResult(msgspec.Struct, frozen=True, array_like=True):
    """A result as it is remembered: with a thousand counters it takes 3 to 10 KB, not 120.

    Attributes:
        failure_gaps: The distance of each failure from the one before it, in the batch.
        reasons: Why each failed, a byte each.
        counter_gaps: The distance of each counter from the one before it, in the batch.
        values: The counters' values.
        chain: As in `MutateResult`.
        attempt: As in `MutateResult`.
    """

    history_id: HistoryId
    first_seq: SeqNo
    last_seq: SeqNo
    first_cas: Cas
    failure_gaps: list[int]
    reasons: bytes
    counter_gaps: list[int]
    values: list[int]
    chain: int
    attempt: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_PackedResult).decode
_decode_map: Final = msgspec.msgpack.Decoder(MutateResult).decode

_MAP_HEADS: Final = range(0x80, 0x90)
"""What a msgpack map of up to 15 fields begins with. Older servers stored `MutateResult` as one."""


def _gaps(rows: Sequence[tuple[int, int]]) -> list[int]:
    return [after - before for (before, _), (after, _) in pairwise([(0, 0), *rows])]


def pack_result(result: MutateResult) -> bytes:
    """The result of a batch that was not refused, in few bytes, as memory, disk and replicas keep
    it. O(failures + counters)."""
    # As a tuple, for speed: the fields of `_PackedResult`.
    failures, counters = result.failures, result.counters
    return _encode(
        (
            result.history_id,
            result.first_seq,
            result.last_seq,
            result.first_cas,
            _gaps(failures) if failures else (),
            bytes([status for _, status in failures]) if failures else b"",
            _gaps(counters) if counters else (),
            [value for _, value in counters] if counters else (),
            result.chain,
            result.attempt,
        )
    )


def unpack_result(data: bytes, *, is_repeated: bool = False) -> MutateResult:
    """The reverse of `pack_result`, marked as repeated if asked."""
    if data[:1] and data[0] in _MAP_HEADS:
        return msgspec.structs.replace(_decode_map(data), is_repeated=is_repeated)
    packed_result = _decode(data)
    failures: list[tuple[int, Status]] = []
    counters: list[tuple[int, int]] = []
    if packed_result.failure_gaps:
        failures = list(
            zip(
                accumulate(packed_result.failure_gaps),
                map(Status, packed_result.reasons),
                strict=True,
            )
        )
    if packed_result.counter_gaps:
        counters = list(
            zip(accumulate(packed_result.counter_gaps), packed_result.values, strict=True)
        )
    return MutateResult(
        packed_result.history_id,
        packed_result.first_seq,
        packed_result.last_seq,
        packed_result.first_cas,
        failures,
        counters,
        is_repeated,
        chain=packed_result.chain,
        attempt=packed_result.attempt,
    )
