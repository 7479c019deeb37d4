"""What a client may do wrong with a request."""

from __future__ import annotations

from upr_protocol.errors import Status
from upr_protocol.ids import Durability, HistoryId, SeqNo
from upr_protocol.limits import GET_KEYS_MAX, LEASE_OWNER_BYTES_MAX, LEASE_TIME_TO_LIVE_S_MAX
from upr_protocol.wire import (
    Await,
    ChangeUsers,
    CreateBucket,
    DeleteBucket,
    Get,
    GetMap,
    Lease,
    LeaseAction,
    NextEvents,
    Seqnos,
    SeqnosAt,
    SetMap,
    Stats,
)
from upr_server.conformance.wrong_frames import (
    BUCKET,
    KEY,
    MISSING,
    OPAQUE,
    P0,
    UNKNOWN_HISTORY,
    key_in,
    wrong_kinds,
)
from upr_server.conformance.wrong_input import Outcome, Progress, WrongInput, WrongInputs


def wrong_requests() -> list[WrongInput]:
    """Of requests, by message."""
    inputs = WrongInputs()
    request_refused = Outcome.REFUSED
    bad, range_gone = Status.BAD_ARGUMENT, Status.RANGE_GONE
    case = inputs.topic("`Get`", Progress.OPENED)
    case("no key", Get((), partition=P0, opaque=OPAQUE), request_refused, bad)
    keys = (KEY,) * (GET_KEYS_MAX + 1)
    case(
        f"more than {GET_KEYS_MAX:,} keys",
        Get(keys, partition=P0, opaque=OPAQUE),
        request_refused,
        bad,
    )
    bad_key = Get((b"",), partition=P0, opaque=OPAQUE)
    case("a key of 0 or more than 250 bytes", bad_key, Outcome.KEY_REFUSED, Status.BAD_KEY)
    case("a key whose record on disk is damaged", None, Outcome.KEY_REFUSED, Status.DAMAGED)
    wrong_partition = Get((KEY,), partition=MISSING, opaque=OPAQUE)
    case(
        "a partition that the node is not active for",
        wrong_partition,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    elsewhere = Get((key_in(1),), partition=P0, opaque=OPAQUE)
    case("a key that belongs to another partition", elsewhere, request_refused, bad)
    other_history = Get((KEY,), UNKNOWN_HISTORY, partition=P0, opaque=OPAQUE)
    case("another history", other_history, request_refused, Status.HISTORY_CHANGED)

    case = inputs.topic("`Seqnos`", Progress.OPENED)
    seqnos = Seqnos((MISSING,), opaque=OPAQUE)
    case(
        "a partition that the node is not active for",
        seqnos,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    named_twice = Seqnos((P0, P0), opaque=OPAQUE)
    case("a partition that is named twice", named_twice, request_refused, bad)

    case = inputs.topic("`SeqnosAt`", Progress.OPENED)
    seqnos_at = SeqnosAt(0, (MISSING,), opaque=OPAQUE)
    case(
        "a partition that the node is not active for",
        seqnos_at,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    twice = SeqnosAt(0, (P0, P0), opaque=OPAQUE)
    case("a partition that is named twice", twice, request_refused, bad)

    case = inputs.topic("`Await`", Progress.OPENED)

    def waiting(history: HistoryId, durability: Durability = Durability.MEMORY) -> Await:
        return Await(history, SeqNo(1), 0, durability, partition=P0, opaque=OPAQUE)

    case("another history", waiting(UNKNOWN_HISTORY), request_refused, Status.HISTORY_CHANGED)
    case("a number that the partition has not given", None, request_refused, bad)
    case("a number that is not durable in time", None, request_refused, Status.TIMED_OUT)
    too_many = waiting(UNKNOWN_HISTORY, Durability.REPLICATED)
    case("more copies than there are replicas", too_many, request_refused, Status.TOO_FEW_REPLICAS)
    case(
        "a replicated level with 0 copies, of a partition that has replicas",
        None,
        request_refused,
        bad,
    )

    case = inputs.topic("`Lease`", Progress.OPENED)

    def lease(
        action: LeaseAction = LeaseAction.ACQUIRE,
        *ranges: tuple[int, int, int],
        seconds: int = 1,
        owner: str = "conformance",
    ) -> Lease:
        return Lease(action, 7, seconds, owner, ranges, opaque=OPAQUE)

    acquire = LeaseAction.ACQUIRE
    case("`ACQUIRE` without a range", lease(), request_refused, bad)
    case(
        "`ACQUIRE` of two ranges of one partition",
        lease(acquire, (0, 0, 0), (0, 0, 0)),
        request_refused,
        bad,
    )
    case("`ACQUIRE` or `RENEW` for 0 s", lease(acquire, (0, 0, 0), seconds=0), request_refused, bad)
    too_long = lease(acquire, (0, 0, 0), seconds=LEASE_TIME_TO_LIVE_S_MAX + 1)
    case(
        f"`ACQUIRE` or `RENEW` for {LEASE_TIME_TO_LIVE_S_MAX + 1:,} s",
        too_long,
        request_refused,
        bad,
    )
    long_name = lease(acquire, (0, 0, 0), owner="x" * (LEASE_OWNER_BYTES_MAX + 1))
    case(
        f"`ACQUIRE` with an owner of {LEASE_OWNER_BYTES_MAX + 1} bytes",
        long_name,
        request_refused,
        bad,
    )
    case(
        "`ACQUIRE` of a range that is not on disk",
        lease(acquire, (0, 0, 1 << 40)),
        request_refused,
        bad,
    )
    case("`RENEW` of an unknown lease", lease(LeaseAction.RENEW), request_refused, range_gone)
    case("`RELEASE` of an unknown lease", lease(LeaseAction.RELEASE), request_refused, bad)

    case = inputs.topic("buckets and maps", Progress.READY)
    exists = CreateBucket(BUCKET, 1, opaque=OPAQUE)
    case("`CreateBucket` of an existing bucket", exists, request_refused, Status.BUCKET_EXISTS)
    case("a name with a slash", CreateBucket("a/b", 1, opaque=OPAQUE), request_refused, bad)
    case(
        "a name that begins with a dot", CreateBucket(".a", 1, opaque=OPAQUE), request_refused, bad
    )
    case("1,025 partitions", CreateBucket("other", 1025, opaque=OPAQUE), request_refused, bad)
    case("a quota of 1 byte", CreateBucket("other", 1, 1, opaque=OPAQUE), request_refused, bad)
    no_bucket = Status.NO_BUCKET
    case(
        "`DeleteBucket` of an unknown bucket",
        DeleteBucket("nowhere", opaque=OPAQUE),
        request_refused,
        no_bucket,
    )
    case(
        "`Stats` of an unknown bucket", Stats("nowhere", opaque=OPAQUE), request_refused, no_bucket
    )
    case(
        "`GetMap` of an unknown bucket",
        GetMap("nowhere", opaque=OPAQUE),
        request_refused,
        no_bucket,
    )
    case("`Join` with an address that does not answer", None, request_refused, bad)
    case("`ChangeUsers` without a change", ChangeUsers("{}", opaque=OPAQUE), request_refused, bad)
    case = inputs.topic("buckets and maps", Progress.OPENED)
    case(
        "`SetMap` of bytes that are not a map", SetMap(0, "{}", opaque=OPAQUE), request_refused, bad
    )
    case("`SetMap` in place of another revision", None, request_refused, Status.REVISION_CONFLICT)

    case = inputs.topic("`NextEvents`", Progress.READY)
    case("an unknown kind", wrong_kinds(), Outcome.CLOSED, Status.MALFORMED)
    case("a consumer without a name", NextEvents("", opaque=OPAQUE), request_refused, bad)
    case("a timeout of 0 s", NextEvents("c", timeout_s=0, opaque=OPAQUE), request_refused, bad)
    long = NextEvents("c", pattern="x" * 201, opaque=OPAQUE)
    case("a pattern of 201 bytes", long, request_refused, bad)
    case("a second open `NextEvents`", None, request_refused, Status.LIMIT_REACHED)
    return inputs.all
