"""A Hypothesis strategy for every message there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hypothesis import strategies as st

from tests.protocol.strategies import (
    HISTORY_IDS,
    PARTITIONS,
    SEQS,
    U8,
    U16,
    U32,
    U64,
    failover_logs,
    positions,
    published_chunks,
    stored_chunks,
)
from upr_protocol.bucket_event import ALL_KINDS, BucketEvent, BucketFate, EventKind
from upr_protocol.ids import Durability, PartitionState, SnapshotKind
from upr_protocol.wire import (
    Ack,
    Await,
    AwaitReply,
    Barrier,
    BarrierReply,
    BucketDone,
    Close,
    CloseStream,
    Completed,
    CreateBucket,
    Credit,
    DeleteBucket,
    Error,
    EventsReply,
    Get,
    GetMap,
    GetReply,
    Go,
    Hello,
    HelloReply,
    Join,
    Lease,
    LeaseAction,
    LeaseReply,
    ListBuckets,
    ListBucketsReply,
    MapReply,
    Message,
    Mutate,
    MutateReply,
    NextEvents,
    Noop,
    Open,
    Opened,
    PartitionAnswers,
    PartitionChunk,
    PartitionEnd,
    PartitionLog,
    PartitionSnapshot,
    PartitionStart,
    Refusal,
    ReplicaAck,
    Seqnos,
    SeqnosReply,
    SetMap,
    Stats,
    StatsReply,
    Stream,
    StreamEnd,
    StreamReply,
)

TEXTS: Final = st.text(max_size=20)
OCTETS: Final = st.binary(max_size=70)


def tuples_of(*fields: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of a few rows; of a few items when there is one field only."""
    item = fields[0] if len(fields) == 1 else st.tuples(*fields)
    return st.lists(item, max_size=5).map(tuple)


FIELDS: Final[Mapping[type[Message], Mapping[str, st.SearchStrategy[Any]]]] = {
    Hello: {
        "identity": TEXTS,
        "versions": tuples_of(U8),
        "features": U32,
        "window_bytes": U32,
        "idle_interval_s": U16,
    },
    HelloReply: {
        "version": U8,
        "features": U32,
        "idle_interval_s": U16,
        "frame_body_bytes_max": U32,
        "open_barriers_max": U16,
        "requests_open_max": U16,
        "identity": TEXTS,
        "mechanisms": tuples_of(TEXTS),
    },
    Error: {"sentence": TEXTS, "advice": TEXTS},
    Open: {"bucket": TEXTS, "partitions": tuples_of(U16)},
    PartitionLog: {
        "state": st.sampled_from(PartitionState),
        "high_seq": SEQS,
        "persisted_seq": SEQS,
        "purge_seq": SEQS,
        "log": failover_logs(),
    },
    Opened: {"partition_count": U16, "map_revision": U64},
    Stream: {
        "state": st.sampled_from(PartitionState),
        "position": positions(),
        "end_seq": SEQS,
        "lease_id": U64,
        "with_answers": st.booleans(),
    },
    StreamReply: {"seq": SEQS, "reason": TEXTS, "log": failover_logs(), "map_revision": U64},
    Go: {},
    PartitionStart: {
        "history_id": HISTORY_IDS,
        "start": SEQS,
        "end": SEQS,
        "purge_seq": SEQS,
        "kind": st.sampled_from(SnapshotKind),
        "may_repeat": st.booleans(),
    },
    PartitionChunk: {"chunk": stored_chunks()},
    PartitionSnapshot: {"chunk": stored_chunks()},
    PartitionAnswers: {"rows": tuples_of(st.binary(min_size=16, max_size=16), U64, SEQS, OCTETS)},
    PartitionEnd: {"end": SEQS},
    Completed: {"cycle": U64},
    Barrier: {"cookie": OCTETS},
    BarrierReply: {"cookie": OCTETS, "ends": tuples_of(PARTITIONS, SEQS)},
    Ack: {"bytes": U64},
    Noop: {},
    StreamEnd: {},
    CloseStream: {},
    Close: {},
    Mutate: {
        "chunk": published_chunks(),
        "writer": st.binary(min_size=16, max_size=16),
        "counter": U64,
        "durability": st.sampled_from(Durability),
        "copies": U8,
        "attempt": U64,
        "chain": U32,
    },
    MutateReply: {
        "history_id": HISTORY_IDS,
        "first_seq": SEQS,
        "last_seq": SEQS,
        "first_cas": U64,
        "failures": tuples_of(U32, U32),
        "counters": tuples_of(U32, U64),
    },
    Credit: {"bytes": U64},
    Get: {"keys": tuples_of(st.binary(max_size=250)), "history_id": U64},
    GetReply: {"history_id": U64, "next_index": U32, "chunk": stored_chunks()},
    Seqnos: {"partitions": tuples_of(U16)},
    SeqnosReply: {"rows": tuples_of(PARTITIONS, U64, SEQS, SEQS, SEQS)},
    Await: {
        "history_id": U64,
        "seq": SEQS,
        "deadline_ms": U32,
        "durability": st.sampled_from(Durability),
        "copies": U8,
    },
    AwaitReply: {"seq": SEQS},
    ReplicaAck: {"history_id": U64, "received": SEQS, "persisted": SEQS},
    Lease: {
        "action": st.sampled_from(LeaseAction),
        "lease_id": U64,
        "time_to_live_s": U32,
        "owner": TEXTS,
        "ranges": tuples_of(PARTITIONS, SEQS, SEQS),
    },
    LeaseReply: {
        "lease_id": U64,
        "time_to_live_s": U32,
        "ranges": tuples_of(PARTITIONS, U64, SEQS, SEQS, U64),
    },
    CreateBucket: {"name": TEXTS, "partition_count": U16, "quota_bytes": U64},
    DeleteBucket: {"name": TEXTS},
    BucketDone: {},
    ListBuckets: {},
    ListBucketsReply: {"buckets": tuples_of(TEXTS, U16, U64)},
    Stats: {"bucket": TEXTS},
    StatsReply: {"json": TEXTS},
    GetMap: {"bucket": TEXTS},
    Join: {"bucket": TEXTS, "address": TEXTS},
    SetMap: {"expected_revision": U64, "document": TEXTS},
    MapReply: {"revision": U64, "document": TEXTS, "node": TEXTS},
    NextEvents: {
        "consumer": TEXTS,
        "acknowledged": U64,
        "timeout_s": U32,
        "wait_ms": U32,
        "kinds": st.integers(1, ALL_KINDS).map(EventKind),
        "pattern": TEXTS,
    },
    EventsReply: {
        "batch": U64,
        "everything": st.booleans(),
        "events": st.lists(
            st.builds(
                BucketEvent,
                bucket=TEXTS,
                incarnation=U64,
                fate=st.sampled_from(BucketFate),
                updates=U64,
                designs=tuples_of(OCTETS),
            ),
            max_size=5,
        ).map(tuple),
    },
    Refusal: {"sentence": TEXTS, "map_revision": U64},
}
"""For each message the strategies of its own fields."""


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of one kind, with any header fields."""
    return st.builds(kind, partition=PARTITIONS, opaque=U32, status=U16, **FIELDS[kind])


MESSAGES_OF_ANY_KIND: Final[st.SearchStrategy[Message]] = st.sampled_from(list(FIELDS)).flatmap(
    messages_of
)
