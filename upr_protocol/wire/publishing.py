"""Publishing: batches of mutations, and the credit that paces them."""

from __future__ import annotations

from array import array
from itertools import chain
from struct import Struct
from typing import Any, Final

import construct as cs

from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.ids import Cas, Durability, HistoryId, SeqNo
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_protocol.wire.columns import CHUNK, member, row, tuple_of
from upr_protocol.wire.message import DATA, Message, Role, U64Message, check_end

_MUTATE: Final = Struct("<BB2xI16sQQ")
_REPLY: Final = Struct("<QQQQI")
_U32: Final = Struct("<I")


class MutateReply(Message, frozen=True):
    """The result of a batch.

    The mutations that succeeded have consecutive sequence numbers and CAS values, in the order of
    the batch; those that failed have none.

    Attributes:
        history_id: The history that the sequence numbers belong to.
        first_seq: The first sequence number given; 0 when every mutation failed.
        last_seq: The last sequence number given; 0 when every mutation failed.
        first_cas: The first CAS value given.
        failures: (index in the batch, status) of each mutation that failed, by index.
        counters: (index in the batch, new value) of each increment and decrement that succeeded.
    """

    opcode = 0x91
    sender = Role.SERVER
    states = DATA
    about_partition = True
    body_bytes_max = FRAME_BODY_BYTES_MAX
    layout = cs.Struct(
        "history_id" / cs.Int64ul * "the history that the sequence numbers belong to",
        "first_seq" / cs.Int64ul * "the first sequence number given, or 0",
        "last_seq" / cs.Int64ul * "the last sequence number given, or 0",
        "first_cas" / cs.Int64ul * "the first CAS value given, or 0",
        "failures"
        / tuple_of(row(index=cs.Int32ul, status=cs.Int32ul), cs.Int32ul)
        * "what failed, by index in the batch",
        "counters"
        / tuple_of(row(index=cs.Int32ul, value=cs.Int64ul), cs.Int32ul)
        * "new values of counters, by index in the batch",
    )

    history_id: HistoryId
    first_seq: SeqNo
    last_seq: SeqNo
    first_cas: Cas
    failures: tuple[tuple[int, int], ...] = ()
    counters: tuple[tuple[int, int], ...] = ()

    def body(self) -> tuple[Buffer, ...]:
        head = _REPLY.pack(
            self.history_id, self.first_seq, self.last_seq, self.first_cas, len(self.failures)
        )
        return (
            b"".join(
                (
                    head,
                    array("I", chain.from_iterable(self.failures)).tobytes(),
                    Struct("<I" + "IQ" * len(self.counters)).pack(
                        len(self.counters), *chain.from_iterable(self.counters)
                    ),
                )
            ),
        )

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        history_id, first_seq, last_seq, first_cas, failure_count = _REPLY.unpack_from(body)
        offset = _REPLY.size + 8 * failure_count
        (counter_count,) = _U32.unpack_from(body, offset)
        # Before anything is made of them: the counts may promise what never came.
        check_end(body, offset + 4 + 12 * counter_count)
        failures = array("I", bytes(body[_REPLY.size : offset]))
        counters = Struct("<" + "IQ" * counter_count).unpack_from(body, offset + 4)
        return (
            history_id,
            first_seq,
            last_seq,
            first_cas,
            tuple(zip(failures[::2], failures[1::2], strict=True)),
            tuple(zip(counters[::2], counters[1::2], strict=True)),
        )


class Mutate(Message, frozen=True):
    """A batch of operations on one partition.

    Attributes:
        durability: What must hold before the answer.
        copies: How many replicas beside the active, for the replicated levels.
        writer: The publisher's 16-byte ID; zeros: the batch has no token.
        counter: Rises with each new batch of this writer to this partition, from 1. The same
            counter means the same batch again.
        attempt: Which run of its task the writer is, for engines that rerun tasks. Once a batch of
            a later attempt has come, those of earlier ones are refused. 0 for no attempts.
        chain: CRC32C over the CRCs of all batches of this writer to this partition, up to and with
            this one (`Chunk.chained`). A batch that is sent again must have the same. 0 for none.
        chunk: The operations, as a published chunk.
    """

    opcode = 0x11
    sender = Role.CLIENT
    states = DATA
    about_partition = True
    body_bytes_max = FRAME_BODY_BYTES_MAX
    answers = (MutateReply,)
    layout = cs.Struct(
        "durability" / member(Durability) * "0 memory, 1 persisted, 2 replicated, 3 both",
        "copies" / cs.Int8ul * "replicas beside the active, for levels 2 and 3",
        "padding" / cs.Padding(2),
        "chain" / cs.Int32ul * "CRC32C over all batches so far, or 0",
        "writer" / cs.Bytes(16) * "the writer's ID; zeros for none",
        "counter" / cs.Int64ul * "the batch's number at this writer and partition",
        "attempt" / cs.Int64ul * "which run of the writer's task this is, or 0",
        "chunk" / CHUNK * "a published chunk",
    )

    chunk: Chunk
    writer: bytes = bytes(16)
    counter: int = 0
    durability: Durability = Durability.MEMORY
    copies: int = 0
    attempt: int = 0
    chain: int = 0

    def body(self) -> tuple[Buffer, ...]:
        head = _MUTATE.pack(
            self.durability, self.copies, self.chain, self.writer, self.counter, self.attempt
        )
        return (head, self.chunk.encode())

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        durability, copies, chain, writer, counter, attempt = _MUTATE.unpack_from(body)
        return (
            Chunk(memoryview(body)[_MUTATE.size :]),
            writer,
            counter,
            Durability(durability),
            copies,
            attempt,
            chain,
        )


class Credit(U64Message, frozen=True):
    """The client may send so many more bytes of `Mutate` frames, headers counted."""

    opcode = 0x92
    sender = Role.SERVER
    states = DATA
    layout = cs.Struct("bytes" / cs.Int64ul * "bytes, in addition to earlier ones")

    bytes: int
