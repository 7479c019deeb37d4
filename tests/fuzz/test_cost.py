"""Twice the bytes cost at most about twice as much, whatever they are."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Final

import pytest

from tests.fuzz.corpus import corpus
from tests.fuzz.cost import Cost, cost_of
from tests.fuzz.frames import MENDED
from tests.fuzz.targets import TARGETS
from tests.protocol.session.kit import encoded, stored, stream
from upr_protocol.bucket_event import BucketEvent, BucketFate
from upr_protocol.chunk import chunk_of_plain_sets, published_chunk
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.partition_map import Assignment, PartitionMap
from upr_protocol.wire import (
    Ack,
    BarrierReply,
    ChangeUsers,
    EventsReply,
    Get,
    LeaseReply,
    ListBucketsReply,
    Message,
    MutateReply,
    Noop,
    PartitionAnswers,
    ReplicaAck,
    RunResult,
    Seqnos,
    SeqnosAt,
    SeqnosAtReply,
    SeqnosReply,
    StatsReply,
    UsersReply,
)

_BYTEWISE: Final = bytes([MENDED])
_WHOLE: Final = bytes([MENDED | 7])


def test_the_counting_itself_sees_work_and_copies() -> None:
    """The counting itself: work, copies that are kept, and copies that are not."""

    def work(count: int) -> int:
        return sum(len(bytes(1000)) for _ in range(count))

    def square(count: int) -> bytes:
        joined = b""
        for _ in range(count):
            joined = joined + bytes(100)
        return joined

    single, double = cost_of(lambda: work(100)), cost_of(lambda: work(200))
    assert single.lines >= 100
    assert single.nbytes >= 100 * 1000
    assert _is_linear(single, double)
    assert not _is_linear(cost_of(lambda: square(100)), cost_of(lambda: square(200)))
    assert not _is_linear(Cost(1000, 1000), Cost(4000, 2000))


def _is_linear(single: Cost, double: Cost) -> bool:
    """Whether twice the input costs at most about twice as much."""
    return (
        double.lines <= 2.2 * single.lines + 100 and double.nbytes <= 2.2 * single.nbytes + 10_000
    )


# Bytes of a target that grow with a number.


def _rows(count: int) -> tuple[int, ...]:
    return tuple(range(count))


LISTS: Final[dict[str, Callable[[int], Message]]] = {
    "Seqnos": lambda count: Seqnos(_rows(count)),
    "SeqnosAt": lambda count: SeqnosAt(0, _rows(count)),
    "SeqnosAtReply": lambda count: SeqnosAtReply(tuple((n, 7, n) for n in range(count))),
    "SeqnosReply": lambda count: SeqnosReply(tuple((n, 7, n, n, n) for n in range(count))),
    "Get": lambda count: Get((b"key",) * count),
    "LeaseReply": lambda count: LeaseReply(1, 2, tuple((n, 7, n, n, n) for n in range(count))),
    "ListBucketsReply": lambda count: ListBucketsReply((("bucket", 64, 0),) * count),
    "MutateReply": lambda count: MutateReply(
        0, (RunResult(PartitionId(3)),) * count, ((1, 2),) * count, ((1, 2),) * count
    ),
    "PartitionAnswers": lambda count: PartitionAnswers(((bytes(16), 1, 2, b"answer"),) * count),
    "ReplicaAck": lambda count: ReplicaAck(
        ((PartitionId(3), HistoryId(7), SeqNo(1), SeqNo(1)),) * count
    ),
    "BarrierReply": lambda count: BarrierReply(b"cookie", ((PartitionId(3), SeqNo(1)),) * count),
    "EventsReply": lambda count: EventsReply(
        1, events=(BucketEvent("b", 1, BucketFate.NONE, 1, (b"key",) * 3),) * count
    ),
    "StatsReply": lambda count: StatsReply("é" * count),
    "UsersReply": lambda count: UsersReply(1, "é" * count),
    "ChangeUsers": lambda count: ChangeUsers("é" * count),
}


def _message(make: Callable[[int], Message]) -> Callable[[int], bytes]:
    return lambda count: encoded(make(count))


SHAPES: Final = ("to and fro", "all of it", "backwards", "negative", "beyond")


def _offsets(count: int, length: int, shape: str) -> array[int]:
    """Where `count` keys begin and end in `length` bytes, as nobody may say it."""
    inner = {
        "to and fro": cycle((length - 1, 0)),
        "all of it": cycle((0, length)),
        "backwards": iter(range(length, 0, -length // count)),
        "negative": cycle((-length, length)),
        "beyond": cycle((0x7FFF_FFFF, 0)),
    }[shape]
    return array("i", [0, *islice(inner, count - 1), length])


def _misplaced(shape: str, *, of_keys: bool) -> Callable[[int], bytes]:
    """A chunk whose keys, or values, are where nothing can be."""

    def make(count: int) -> bytes:
        data, places = bytes(8 * count), array("i", range(0, 8 * count + 1, 8))
        bad = _offsets(count, 8 * count, shape)
        keys, values = (bad, places) if of_keys else (places, bad)
        operations = bytes([Operation.SET]) * count
        chunk = published_chunk(keys.tobytes(), data, values.tobytes(), data, operations)
        return _WHOLE + bytes(chunk)

    return make


def _map(count: int) -> bytes:
    """Each replica follows the one before it."""
    names = [f"n{index}" for index in range(count)]
    replicas = dict(zip(names[1:], names, strict=False))
    assignment = Assignment(active=names[0], replicas=dict(reversed(replicas.items())))
    nodes = dict.fromkeys(names, "h:1")
    partition_map = PartitionMap(bucket="b", revision=1, nodes=nodes, partitions=(assignment,))
    return partition_map.encode().encode()


GROWING: Final[dict[tuple[str, str], Callable[[int], bytes]]] = {
    ("frames", "a long body"): lambda count: _BYTEWISE + encoded(StatsReply("e" * count)),
    ("frames", "many frames"): lambda count: _BYTEWISE + encoded(*[Noop()] * (count // 16)),
    ("frames", "nonsense"): bytes,
    ("server", "streams"): lambda count: (
        bytes([MENDED | 5, 2])
        + encoded(*(stream(index, 10 + index) for index in range(count // 4)))
    ),
    ("server", "a trickle"): lambda count: bytes([MENDED, 2]) + encoded(Seqnos(_rows(count))),
    ("server", "acks"): lambda count: bytes([MENDED | 5, 4]) + encoded(*[Ack(0)] * count),
    ("record", "map"): lambda count: bytes([MENDED]) + b"key" + _map(count // 4),
    ("chunk", "published"): lambda count: (
        _WHOLE + bytes(chunk_of_plain_sets([b"k"] * count, [b""] * count))
    ),
    ("chunk", "stored"): lambda count: _WHOLE + bytes(stored(0, count)),
    **{("messages", name): _message(make) for name, make in LISTS.items()},
    **{("chunk", f"keys {shape}"): _misplaced(shape, of_keys=True) for shape in SHAPES},
    **{("chunk", f"values {shape}"): _misplaced(shape, of_keys=False) for shape in SHAPES},
}

# construct takes a hundred lines for each item.
COUNTS: Final = {"messages": 50, "server": 100}


@pytest.mark.parametrize(("name", "kind"), GROWING)
def test_cost_is_linear(name: str, kind: str) -> None:
    target, make = TARGETS[name], GROWING[name, kind]
    target(make(64))  # what is made once is not counted
    count = COUNTS.get(name, 400)
    single, double = (cost_of(partial(target, make(times * count))) for times in (1, 2))
    assert _is_linear(single, double), (single, double)


@pytest.mark.parametrize("name", ["server", "client"])
def test_a_conversation_costs_by_its_length(name: str) -> None:
    """What was said is said again and again."""
    target = TARGETS[name]
    for file, data in corpus(name).items():
        target(data)
        single, double = (cost_of(partial(target, data[:2] + data[2:] * times)) for times in (4, 8))
        assert _is_linear(single, double), (file, single, double)
