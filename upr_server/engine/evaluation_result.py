"""What a batch with conditions or counters comes to."""

from __future__ import annotations

from typing import NamedTuple

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, SeqNo
from upr_server.engine.snapshots import EvaluatedArray


class ContentVersion(NamedTuple):
    """What a partition's content depends on: while it is the same, so are all its items.

    Attributes:
        history_id: The history.
        high_seq: The high number.
        last_cas: The highest CAS given.
    """

    history_id: HistoryId
    high_seq: SeqNo
    last_cas: Cas


class EvaluationResult:
    """What a batch comes to, as far as that is known.

    Args:
        now: Seconds since 1970.

    Attributes:
        now: See above.
        content_version: Where the partition stood when the outcomes were worked out; None before
            that.
        copied_bytes: The bytes of values that were found and joined.
        first_seq: The number of the first success.
        last_seq: The number of the last.
        first_cas: The CAS of the first success.
        failures: As in `MutateResult`.
        counters: As in `MutateResult`.
        rows: What is to be stored, one mutation a key, by rising number; each with whether it is a
            counter.
        large_chunks: Rows with large values, as published chunks of their own, by key.
        arrays: The rows that are no counters, in arrays; None for a short batch.
        counter_rows: The others of a long batch.
    """

    __slots__ = (
        "arrays",
        "content_version",
        "copied_bytes",
        "counter_rows",
        "counters",
        "failures",
        "first_cas",
        "first_seq",
        "large_chunks",
        "last_seq",
        "now",
        "rows",
    )

    def __init__(self, now: float) -> None:
        self.now = now
        self.content_version: ContentVersion | None = None
        self.copied_bytes = 0
        self.first_seq = self.last_seq = SeqNo(0)
        self.first_cas = Cas(0)
        self.failures: list[tuple[int, Status]] = []
        self.counters: list[tuple[int, int]] = []
        self.rows: list[tuple[Mutation, bool]] = []
        self.large_chunks: dict[bytes, Chunk] = {}
        self.arrays: list[EvaluatedArray] | None = None
        self.counter_rows: list[Mutation] = []
