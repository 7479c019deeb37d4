"""The memory that the server shares with the process that reads, compared with copies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.storage.log_model import chunk_of, row
from upr_protocol.chunk import Chunk
from upr_protocol.ids import Operation
from upr_server.storage.shared_slots import NO_SLOT, SlotBuffer, SlotPool, make_shared_memory

COUNT: Final = 4
SLOT_BYTES: Final = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(make_shared_memory() is None, reason="no memory without a name")


def a_chunk(seq: int, size: int) -> Chunk:
    return chunk_of([row(Operation.SET, b"key", seq, seq, size=size)], seq - 1, seq)


def memory() -> int:
    descriptor = make_shared_memory()
    assert descriptor is not None
    return descriptor


@contextmanager
def both_ends() -> Iterator[tuple[SlotPool, SlotBuffer, int]]:
    """Both users of one piece of memory, and its descriptor."""
    descriptor = memory()
    slots = SlotPool(descriptor, COUNT, SLOT_BYTES)
    yield slots, SlotBuffer(os.dup(descriptor), SLOT_BYTES), descriptor
    os.close(descriptor)


def resident_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def trim(slots: SlotPool) -> int:
    """Frees unused memory. Returns the number of steps."""
    return sum(1 for _ in slots.trim())


class SlotsMachine(RuleBasedStateMachine):
    """Chunks are read, kept and dropped in any order; the bytes of each must not change."""

    def __init__(self) -> None:
        super().__init__()
        self._both = both_ends()
        self._slots, self._writer, self._descriptor = self._both.__enter__()
        self._seq = 0
        self._answers: list[list[tuple[Chunk, bytes]]] = []
        """For each answer in a slot, the chunks that are kept, and copies of their bytes."""
        self._beside: list[tuple[Chunk, bytes]] = []
        self._trimming: Iterator[None] = iter(())

    @rule(sizes=st.lists(st.integers(1, SLOT_BYTES), max_size=6))
    def read(self, sizes: list[int]) -> None:
        slot = self._slots.acquire()
        assert (slot is None) == (len(self._answers) == COUNT)
        self._writer.begin_answer(NO_SLOT if slot is None else slot.number)
        written_slots = []
        for size in sizes:
            self._seq += 1
            written_slots.append(self._writer.put_chunk(a_chunk(self._seq, size)))
        buffers = [chunk.encode() for chunk in written_slots]
        chunks, offset = [], 0
        for chunk, is_there in zip(
            written_slots, self._writer.are_in_slot(list(buffers)), strict=True
        ):
            if is_there:
                assert slot is not None
                read_chunk = Chunk(slot.view[offset : offset + chunk.nbytes], chunk.crc)
                offset += chunk.nbytes
                chunks.append((read_chunk, bytes(chunk)))
            else:
                self._beside.append((chunk, bytes(chunk)))
        if slot is not None and chunks:
            self._answers.append(chunks)

    @precondition(lambda self: self._answers)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        chunks = data.draw(st.sampled_from(self._answers))
        del chunks[data.draw(st.integers(0, len(chunks) - 1))]
        if not chunks:
            # Compared by emptiness, not by equality: two answers may have equal chunks.
            self._answers = [answer for answer in self._answers if answer]

    @rule()
    def trim(self) -> None:
        # Do one step only, so that other rules run between two steps.
        for _ in self._trimming:
            return
        self._trimming = self._slots.trim()

    @invariant()
    def no_chunk_has_changed(self) -> None:
        for chunks in (*self._answers, self._beside):
            for chunk, expected in chunks:
                assert bytes(chunk) == expected
                chunk.check(chunk.crc)

    @invariant()
    def unused_slots_are_free(self) -> None:
        assert len(self._slots) == COUNT - len(self._answers)

    def teardown(self) -> None:
        self._both.__exit__(None, None, None)


test_slots = SlotsMachine.TestCase


def test_a_slot_stays_in_use_while_a_column_of_its_chunk_is_used() -> None:
    with both_ends() as (slots, buffer, _):
        slot = slots.acquire()
        assert slot is not None
        buffer.begin_answer(slot.number)
        nbytes = buffer.put_chunk(a_chunk(1, 100)).nbytes
        chunk = Chunk(slot.view[:nbytes])
        del slot
        values = chunk.value_bytes
        expected = bytes(values)
        del chunk
        assert len(slots) == COUNT - 1
        with pytest.raises(TypeError, match="read-only"):
            values[0] = 0
        assert bytes(values) == expected
        del values
        assert len(slots) == COUNT


def test_unused_memory_is_freed() -> None:
    with both_ends() as (slots, buffer, descriptor):
        assert resident_bytes(descriptor) == 0
        lent = [
            slot for slot in (slots.acquire(), slots.acquire(), slots.acquire()) if slot is not None
        ]
        for index in (slot.number for slot in lent):
            buffer.begin_answer(index)
            buffer.put_chunk(a_chunk(1, 1000))
        assert resident_bytes(descriptor) == 3 * SLOT_BYTES
        before = bytes(lent[0].view)
        del lent[1:]
        trim(slots)
        assert resident_bytes(descriptor) == 3 * SLOT_BYTES, "it was in use a moment ago"
        # The slot that was released last is used next; the other one stays unused.
        slots.acquire()
        trim(slots)
        assert resident_bytes(descriptor) == 2 * SLOT_BYTES
        trim(slots)
        assert resident_bytes(descriptor) == SLOT_BYTES
        assert bytes(lent[0].view) == before


def test_one_step_frees_one_slot() -> None:
    with both_ends() as (slots, buffer, descriptor):
        lent = [slot for slot in (slots.acquire() for _ in range(COUNT)) if slot is not None]
        for slot in lent:
            buffer.begin_answer(slot.number)
            buffer.put_chunk(a_chunk(1, 1000))
        del lent, slot
        assert trim(slots) == 0, "they were in use a moment ago"
        trimming = slots.trim()
        next(trimming)
        assert resident_bytes(descriptor) == (COUNT - 1) * SLOT_BYTES
        # Some slots are used between two steps; only the others are freed.
        lent = [slot for slot in (slots.acquire(), slots.acquire()) if slot is not None]
        for slot in lent:
            buffer.begin_answer(slot.number)
            buffer.put_chunk(a_chunk(1, 1000))
        del lent, slot
        assert sum(1 for _ in trimming) == 1
        assert resident_bytes(descriptor) == 2 * SLOT_BYTES
        assert trim(slots) == 2
        assert resident_bytes(descriptor) == 0


def test_a_view_is_valid_after_both_users_are_gone() -> None:
    draw = Random(1)
    with both_ends() as (slots, buffer, _):
        slot = slots.acquire()
        assert slot is not None
        buffer.begin_answer(slot.number)
        chunk = a_chunk(1, draw.randrange(1000))
        buffer.put_chunk(chunk)
        view = slot.view[: chunk.nbytes]
        del slot, slots, buffer
    assert bytes(view) == bytes(chunk)


def test_a_chunk_in_the_slot_must_be_in_the_answer() -> None:
    with both_ends() as (slots, buffer, _):
        slot = slots.acquire()
        assert slot is not None
        buffer.begin_answer(slot.number)
        buffer.put_chunk(a_chunk(1, 10))
        second = buffer.put_chunk(a_chunk(2, 10))
        with pytest.raises(AssertionError, match="not in the answer"):
            buffer.are_in_slot([second.encode()])
