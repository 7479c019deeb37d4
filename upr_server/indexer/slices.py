"""Slices: an index is divided by the documents' partitions, and each slice is kept by itself.

A slice has a fixed subset of the partitions, with files, a stream, queues and builders of its own.
No change goes from one slice to another. A scan asks every slice, and merges what they answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol

import attrs
import msgspec

from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.explanation import Freshness, Wait
from upr_server.indexer.index_file import EndedBy
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import Query

SLICES_MAX: Final = 64
"""Each slice has a file of its own for each index, and each scan asks all of them."""

IndexState = Literal["building", "ready", "failed", "missing"]
"""How an index is: it is being built, can be scanned, was left out, or a slice of it does not run.
"""


@attrs.frozen
class SliceId:
    """A slice.

    Attributes:
        index: Its number, from 0.
        count: How many slices there are.
    """

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"slice {self.index} of {self.count}"

    @property
    def folder(self) -> str:
        """The name of its folder. Slices of another division have other names."""
        return f"slice-{self.index}-of-{self.count}"

    def has(self, partition: PartitionId) -> bool:
        """Whether it has the documents of a partition."""
        return partition % self.count == self.index

    def partitions(self, partition_count: int) -> list[PartitionId]:
        """The partitions of the slice, if the bucket has so many."""
        return [
            PartitionId(partition) for partition in range(self.index, partition_count, self.count)
        ]


class SliceMissingError(UprError):
    """A slice does not answer just now, so that an answer would lack its entries.

    Attributes:
        retry_after_s: When to ask again.
    """

    def __init__(self, title: SliceId | str, reason: str) -> None:
        self.retry_after_s = 1.0
        super().__init__(f"{title} {reason}; ask again in a second")


class CatalogReport(msgspec.Struct, frozen=True):
    """The design documents in the partitions of a slice.

    Attributes:
        texts: Their texts, by name.
        rollbacks: How many rollbacks the slice's stream had begun when they had been read.
        left_out: The names of some that are not among them, as all together are too long.
    """

    texts: dict[str, bytes]
    rollbacks: int
    left_out: list[str] = []


class SliceScan(msgspec.Struct, frozen=True):
    """A scan of one slice.

    Attributes:
        name: The index.
        definition: What the index must be: slices learn of another definition one by one.
        query: A query that was checked. Its `moment` is one of the slice.
        bytes_max: How many bytes of entries to answer at most.
    """

    name: IndexName
    definition: IndexDefinition
    query: Query
    bytes_max: int


class SliceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a slice has for a query, all of one moment.

    Attributes:
        entries: The entries, or the distinct beginnings of their keys, in order.
        payloads: The entries' payloads; empty if not asked for.
        ended_by: Why there are no more entries here.
        count: How many entries there are; None if that was not asked.
        lowest: The lowest entry; None if that was not asked, or if there are none.
        highest: The highest entry, likewise.
        searches: How often the slice was searched for a place.
        entries_read: How many entries were looked at.
        included_read: For how many entries the included values were read.
        index_entries: How many entries the slice has.
        timestamps: By partition, its history and number, if that was asked.
        freshness: How the slice was as fresh as asked.
        waits: What the scan waited for.
        read_seconds: How long the slice was read.
        moment: Names the moment in this slice, if it is held.
        opening: Names the opening of the file that was read; see `IndexReader`.
    """

    entries: list[bytes] = []
    payloads: list[bytes] = []
    ended_by: EndedBy = "ranges"
    count: int | None = None
    lowest: bytes | None = None
    highest: bytes | None = None
    searches: int
    entries_read: int
    included_read: int = 0
    index_entries: int
    timestamps: dict[int, tuple[int, int]] = {}
    freshness: Freshness
    waits: list[Wait]
    read_seconds: float
    moment: str = ""
    opening: str = ""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What can be told of a copy of a slice of an index.

    Attributes:
        node: The node that has it, as its URL.
        state: The state of the copy; the states are those of `SliceStatus`.
        entries: How many entries it has.
        behind: How many of the server's sequence numbers it lacks, by the server's last answer.
        failure: Why it was left out, does not answer, or stays behind; empty otherwise.
    """

    node: str
    state: IndexState
    entries: int = 0
    behind: int = 0
    failure: str = ""


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What can be told of one slice of an index; where nodes have copies, of the best of them.

    Attributes:
        slice: The slice's number, from 0.
        state: `building`; `ready` when it can be scanned; `failed` when it was left out; `missing`
            when the slice does not run.
        entries: How many entries it has.
        disk_bytes: What it takes on disk.
        too_long: Documents left out since the start, as their keys are too long.
        too_costly: Documents left out since the start, as the expressions cost too much for them.
        behind: How many of the server's sequence numbers it lacks, by the server's last answer.
        failure: Why it was left out, does not run, or stays behind; empty otherwise.
        replicas: Its copies; empty where the indexer is one node.
    """

    slice: int
    state: IndexState
    entries: int = 0
    disk_bytes: int = 0
    too_long: int = 0
    too_costly: int = 0
    behind: int = 0
    failure: str = ""
    replicas: list[ReplicaStatus] = []


class SliceObserver(Protocol):
    """What a slice calls when it begins, and when it has read its design documents."""

    def slice_restarted(self, index: int) -> None:
        """A slice has begun to run, and knows of no definitions."""

    def catalog_read(self, index: int, report: CatalogReport) -> None:
        """A slice has read its design documents."""


class SliceHolder(Protocol):
    """Keeps a slice, in this process or in another.

    Each question raises `SliceMissingError` if the slice does not answer.

    Attributes:
        slice_id: The slice.
    """

    slice_id: SliceId

    @property
    def title(self) -> str:
        """The slice, and the nodes that keep it."""

    @property
    def heard_at(self) -> float:
        """When the slice last answered, in Trio's time: `inf` for one in this process, which always
        does; `-inf` for one that does not run."""

    async def run(self, observer: SliceObserver) -> None:
        """Keeps the slice up to date, for as long as the bucket is there."""

    async def stop(self) -> None:
        """Applies what was read."""

    def close(self) -> None:
        """Closes the files; `run` has ended."""

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Says which indexes there shall be."""

    async def ping(self) -> None:
        """Waits for an answer."""

    async def confirm(self) -> int:
        """Waits until the catalog has all that was acknowledged before the call, and was reported
        since. Gives the count of rollbacks at the call: if it is still the report's, the report
        lacks no design document."""

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        """Answers a query.

        Raises:
            UprError: See `Scanner.scan`.
        """

    async def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held.
        """

    async def status(
        self, name: IndexName, definition: IndexDefinition, newest_seqs: Mapping[PartitionId, SeqNo]
    ) -> SliceStatus:
        """What can be told of an index; `newest_seqs` says how far the server is."""

    async def statistics(self) -> dict[str, Any]:
        """Figures of the slice."""
