"""How much of a bucket's disk each partition uses, as the process that writes it counts.

The bucket's storage counts what it writes, and maintenance decides by it.
"""

from __future__ import annotations

import msgspec

from upr_protocol.ids import SeqNo
from upr_server.storage.records import Watermark


class PartitionUsage(msgspec.Struct):
    """What decides when a partition is indexed and compacted.

    Attributes:
        high: Its persisted snapshot end.
        purge_seq: Its purge number.
        watermark: How far the index is, with its items and garbage there.
        chunk_bytes: What its chunks take in the log.
        damage: The first damage that was met in it; empty for none. It is not compacted then: a
            compaction begins at the oldest chunk, and knows a superseded mutation by the index.
        is_stuck: Whether its index is damaged, and follows its log no further.
        is_refused: Whether one of its records is damaged: then nothing of it is read or written.
        has_old_entries: Whether only some of its index entries were deleted. The others go before
            it is indexed from the beginning.
        leased_bytes: What of its garbage compaction has left for leased ranges. It does not count
            while these are held: otherwise the partition would be compacted again and again.
    """

    high: SeqNo
    purge_seq: SeqNo
    watermark: Watermark
    chunk_bytes: int
    damage: str = ""
    is_stuck: bool = False
    is_refused: bool = False
    has_old_entries: bool = False
    leased_bytes: dict[tuple[int, int], int] = {}

    @property
    def lag(self) -> int:
        """How many sequence numbers the index is behind the log, and can follow it."""
        return 0 if self.is_stuck else self.high - self.watermark.seq

    @property
    def garbage_bytes(self) -> int:
        """About what superseded mutations take of its chunks, without those that leases protect."""
        return max(0, self.watermark.garbage_bytes - sum(self.leased_bytes.values()))
