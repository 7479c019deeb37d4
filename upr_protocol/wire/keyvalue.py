"""Reading keys and sequence numbers, waiting for durability, and leasing ranges."""

from __future__ import annotations

from enum import IntEnum, unique
from struct import Struct
from struct import error as StructError
from typing import Any, Final

import construct as cs

from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.errors import Status
from upr_protocol.ids import Durability, HistoryId, SeqNo
from upr_protocol.limits import FRAME_BODY_BYTES_MAX, GET_KEYS_MAX
from upr_protocol.wire.columns import CHUNK, member, octets, row, text, tuple_of
from upr_protocol.wire.message import DATA, Message, Role, check_end

_GET_REPLY: Final = Struct("<QI4x")
_GET: Final = Struct("<QH")


class GetReply(Message, frozen=True):
    """The requested items, in the order of the keys. An existing item is a `SET` with its sequence
    number and CAS. A missing item is a `DELETE` with sequence number 0 and flags 0. If the server
    refuses a key, its row is a `DELETE` with the status in its flags: `BAD_KEY` if the key is empty
    or too long, `DAMAGED` if its record on disk is damaged. An answer has at most 256 keys,
    and about 1 MiB unless one value is longer. `next_index` is the first key without an answer; ask
    again from there."""

    opcode = 0x93
    sender = Role.SERVER
    states = DATA
    about_partition = True
    body_bytes_max = FRAME_BODY_BYTES_MAX
    layout = cs.Struct(
        "history_id" / cs.Int64ul * "the history that the sequence numbers belong to",
        "next_index" / cs.Int32ul * "the first key not answered; the count of keys when all are",
        "padding" / cs.Padding(4),
        "chunk" / CHUNK * "the items, in the order of the keys",
    )

    history_id: HistoryId
    next_index: int
    chunk: Chunk

    # A value of 20 MiB is copied twice by the layout, and not at all by this.

    def body_buffers(self) -> tuple[Buffer, ...]:
        return (_GET_REPLY.pack(self.history_id, self.next_index), *self.chunk.pieces())

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        history_id, next_index = _GET_REPLY.unpack_from(body)
        chunk = Chunk(memoryview(body)[_GET_REPLY.size :])
        return history_id, next_index, chunk


class Get(Message, frozen=True):
    """Asks for items of one partition. If `history_id` is not 0, and the partition is in another
    history, the server refuses with `HISTORY_CHANGED`."""

    opcode = 0x13
    sender = Role.CLIENT
    states = DATA
    about_partition = True
    body_bytes_max = 2 * 1024 * 1024
    answers = (GetReply,)
    refusals = (
        Status.NOT_MY_PARTITION,
        Status.NO_BUCKET,
        Status.BAD_ARGUMENT,
        Status.TEMPORARY_FAILURE,
        Status.HISTORY_CHANGED,
        Status.DAMAGED,
    )
    layout = cs.Struct(
        "history_id" / cs.Int64ul * "the history expected, or 0",
        "keys"
        / tuple_of(octets(cs.Int8ul))
        * "1 to 4,096 keys; another number is refused with `BAD_ARGUMENT`",
    )

    keys: tuple[bytes, ...]
    history_id: HistoryId = HistoryId(0)

    # By the layout, 4,096 keys hold the loop for 20 ms.

    def body_buffers(self) -> tuple[Buffer, ...]:
        head = _GET.pack(self.history_id, len(self.keys))
        return (b"".join([head, *[bytes((len(key),)) + key for key in self.keys]]),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        history_id, count = _GET.unpack_from(data)
        keys, offset = [], _GET.size
        # With more keys it is refused, whatever they are. To read 65,535 would hold the loop.
        for _ in range(min(count, GET_KEYS_MAX + 1)):
            start = offset + 1
            offset = start + data[offset]
            keys.append(data[start:offset])
        if offset > len(data):
            raise StructError
        if count <= len(keys):
            check_end(body, offset)
        return tuple(keys), history_id


class SeqnosReply(Message, frozen=True):
    """The sequence numbers of the requested partitions."""

    opcode = 0x94
    sender = Role.SERVER
    states = DATA
    body_bytes_max = 64 * 1024
    layout = cs.Struct(
        "rows"
        / tuple_of(
            row(
                partition=cs.Int16ul,
                history_id=cs.Int64ul,
                high_seq=cs.Int64ul,
                persisted_seq=cs.Int64ul,
                replicated_seq=cs.Int64ul,
            )
        )
        * "per partition: history; highest sequence number; last snapshot end on disk; snapshot "
        "end up to which every connected replica has everything in memory, 0 without a replica",
    )

    rows: tuple[tuple[int, int, int, int, int], ...]


class Seqnos(Message, frozen=True):
    """Asks for partitions' sequence numbers. If the server is not active for one of them, it
    refuses with `NOT_MY_PARTITION`. So a client of a bucket on several nodes names the partitions.
    With `of_copies` the server answers for any partition; a replica's numbers may be lower than
    what was acknowledged."""

    opcode = 0x14
    sender = Role.CLIENT
    states = DATA
    answers = (SeqnosReply,)
    refusals = (Status.NOT_MY_PARTITION, Status.NO_BUCKET, Status.BAD_ARGUMENT, Status.DAMAGED)
    layout = cs.Struct(
        "partitions" / tuple_of(cs.Int16ul) * "the partitions; an empty list for all of the bucket",
        "of_copies" / cs.Flag * "whether to answer also for copies, where the server is not active",
    )

    partitions: tuple[int, ...] = ()
    of_copies: bool = False


class SeqnosAtReply(Message, frozen=True):
    """The sequence numbers of the requested partitions at the requested time."""

    opcode = 0x9C
    sender = Role.SERVER
    states = DATA
    body_bytes_max = 64 * 1024
    layout = cs.Struct(
        "rows"
        / tuple_of(row(partition=cs.Int16ul, history_id=cs.Int64ul, seq=cs.Int64ul))
        * "per partition: history, and the last sequence number from before the time",
    )

    rows: tuple[tuple[int, int, int], ...]


class SeqnosAt(Message, frozen=True):
    """Asks for the sequence numbers of partitions at a given time. Of each partition the answer has
    the highest sequence number on disk whose CAS is below `time_ns`, or 0. (A CAS is the time at
    which a change was numbered.) A stream from this number has every later change; changes that are
    not on disk yet count as later. If the server is not active for one of the partitions, it
    refuses with `NOT_MY_PARTITION`. If a history changes meanwhile, it refuses with
    `HISTORY_CHANGED`. The history in the answer is the partition's current one."""

    opcode = 0x1C
    sender = Role.CLIENT
    states = DATA
    answers = (SeqnosAtReply,)
    refusals = (
        Status.NOT_MY_PARTITION,
        Status.NO_BUCKET,
        Status.BAD_ARGUMENT,
        Status.TEMPORARY_FAILURE,
        Status.HISTORY_CHANGED,
        Status.DAMAGED,
    )
    layout = cs.Struct(
        "time_ns" / cs.Int64ul * "nanoseconds since 1970",
        "partitions" / tuple_of(cs.Int16ul) * "the partitions; an empty list for all of the bucket",
    )

    time_ns: int
    partitions: tuple[int, ...] = ()


class AwaitReply(Message, frozen=True):
    """The sequence number is as durable as requested."""

    opcode = 0x95
    sender = Role.SERVER
    states = DATA
    about_partition = True
    layout = cs.Struct("seq" / cs.Int64ul * "the sequence number now reached")

    seq: SeqNo


class Await(Message, frozen=True):
    """Waits until a sequence number is as durable as requested. The server refuses with
    `HISTORY_CHANGED` if the partition is in another history, or begins one meanwhile; with
    `TIMED_OUT` after `deadline_ms`; with `BAD_ARGUMENT` if the partition has not reached the
    number, or a replicated level has 0 copies; with `TOO_FEW_REPLICAS` if the partition has fewer
    replicas than `copies`, or none at all; and with `NOT_MY_PARTITION` if the server is not active
    for it, or does not stay so while it waits for replicas."""

    opcode = 0x15
    sender = Role.CLIENT
    states = DATA
    about_partition = True
    answers = (AwaitReply,)
    refusals = (
        Status.NOT_MY_PARTITION,
        Status.NO_BUCKET,
        Status.BAD_ARGUMENT,
        Status.HISTORY_CHANGED,
        Status.TIMED_OUT,
        Status.DAMAGED,
        Status.TOO_FEW_REPLICAS,
    )
    layout = cs.Struct(
        "history_id" / cs.Int64ul * "the history that the sequence number belongs to; never 0",
        "seq" / cs.Int64ul * "the sequence number to wait for",
        "deadline_ms" / cs.Int32ul * "how long to wait; any number, without a maximum",
        "durability" / member(Durability) * "0 memory, 1 persisted, 2 replicated, 3 both",
        "copies" / cs.Int8ul * "replicas beside the active, for levels 2 and 3",
    )

    history_id: HistoryId
    seq: SeqNo
    deadline_ms: int
    durability: Durability
    copies: int = 0


@unique
class LeaseAction(IntEnum):
    """What a `Lease` asks for."""

    ACQUIRE = 1
    """A new lease."""
    RENEW = 2
    """More time for a lease."""
    RELEASE = 3
    """The end of a lease."""


class LeaseReply(Message, frozen=True):
    """The lease as it is now. A released lease has a time to live of 0 and no ranges.

    Attributes:
        lease_id: The lease.
        time_to_live_s: Seconds it holds without renewal.
        ranges: (partition, history, start, end, bytes on disk) of what it holds, start exclusive.
    """

    opcode = 0x97
    sender = Role.SERVER
    states = DATA
    body_bytes_max = 64 * 1024
    layout = cs.Struct(
        "lease_id" / cs.Int64ul * "the lease",
        "time_to_live_s" / cs.Int32ul * "seconds it holds without renewal",
        "ranges"
        / tuple_of(
            row(
                partition=cs.Int16ul,
                history_id=cs.Int64ul,
                start=cs.Int64ul,
                end=cs.Int64ul,
                bytes=cs.Int64ul,
            )
        )
        * "(start, end] of each partition, the history it was granted in, and its bytes on disk",
    )

    lease_id: int
    time_to_live_s: int
    ranges: tuple[tuple[int, int, int, int, int], ...] = ()


class Lease(Message, frozen=True):
    """Holds ranges of sequence numbers against compaction.

    Attributes:
        action: What is asked for.
        lease_id: The lease. To acquire one, a random number that the client draws, so that a
            request that is sent again does not make a second lease; or 0, and the server draws one.
        time_to_live_s: Seconds to hold without renewal. To acquire or renew a lease.
        owner: Who holds it, for statistics. To acquire a lease only.
        ranges: To acquire a lease only: (partition, start, end), start exclusive; all ones for an
            end mean the snapshot end that is on disk when the lease is granted.
    """

    opcode = 0x17
    sender = Role.CLIENT
    states = DATA
    body_bytes_max = 64 * 1024
    answers = (LeaseReply,)
    refusals = (
        Status.NOT_MY_PARTITION,
        Status.NO_BUCKET,
        Status.BAD_ARGUMENT,
        Status.TEMPORARY_FAILURE,
        Status.LIMIT_REACHED,
        Status.DAMAGED,
        Status.RANGE_GONE,
        Status.ROLLBACK_NEEDED,
    )
    layout = cs.Struct(
        "action" / member(LeaseAction) * "1 acquire, 2 renew, 3 release",
        "lease_id" / cs.Int64ul * "the lease; to acquire, one of the client's choice, or 0",
        "time_to_live_s" / cs.Int32ul * "seconds to hold without renewal",
        "owner" / text() * "who holds it, for statistics",
        "ranges"
        / tuple_of(row(partition=cs.Int16ul, start=cs.Int64ul, end=cs.Int64ul))
        * "(start, end] of each partition; all ones for the end that is on disk",
    )

    action: LeaseAction
    lease_id: int
    time_to_live_s: int
    owner: str
    ranges: tuple[tuple[int, int, int], ...]
