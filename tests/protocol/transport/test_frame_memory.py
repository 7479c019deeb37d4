"""Memory that is used again: never while anyone can see it, and only a little of it."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from tests.protocol.wire.frames import admit, frame_of
from upr_protocol.chunk import Buffer
from upr_protocol.transport import FrameMemory, new_memory
from upr_protocol.transport.frame_memory import BLOCK_BYTES, BLOCKS
from upr_protocol.wire import FrameBuffer


def owner(view: Buffer) -> object:
    return view.obj if isinstance(view, memoryview) else view


def test_a_block_is_handed_out_again_when_its_last_view_is_gone() -> None:
    memory = FrameMemory(2)
    first = memory.allocate(100_000)
    block = owner(first)
    part = np.frombuffer(memoryview(first)[8:80].cast("Q"), dtype=np.uint64)
    del first
    assert owner(memory.allocate(100_000)) is not block
    del part
    again = memory.allocate(150_000)
    assert owner(again) is block
    assert len(again) == 150_000


@pytest.mark.parametrize("size", [0, 1, 1_000, BLOCK_BYTES + 1])
def test_short_and_long_bodies_have_memory_of_their_own(size: int) -> None:
    body = FrameMemory(1).allocate(size)
    assert isinstance(body, bytearray)
    assert len(body) == size


def test_large_memory_has_pages_only_where_bytes_were_put() -> None:
    """A peer that announces 32 MiB and sends little must cost little."""
    size = 64 * 1024 * 1024
    before = resident_bytes()
    body = memoryview(new_memory(size))
    assert resident_bytes() - before < size // 4
    body[: size // 2] = bytes(size // 2)
    assert resident_bytes() - before >= size // 2
    assert (body[0], body[-1], len(body)) == (0, 0, size)


def resident_bytes() -> int:
    """The memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_an_application_that_keeps_all_bodies_keeps_only_a_few_blocks() -> None:
    memory = FrameMemory()
    bodies = [memory.allocate(100_000) for _ in range(3 * BLOCKS)]
    assert sum(isinstance(body, memoryview) for body in bodies) == BLOCKS
    assert all(len(body) == 100_000 for body in bodies)


@pytest.mark.parametrize("kept_count", [0, 1, 10])
def test_bodies_that_are_kept_do_not_change(kept_count: int) -> None:
    buffer = FrameBuffer(admit, FrameMemory().allocate)
    bodies: list[tuple[bytes, Buffer]] = []
    for index in range(40):
        body = bytes([index]) * (60_000 + 8 * index)
        frame = frame_of(body)
        for start in range(0, len(frame), 50_000):
            buffer.receive(frame[start : start + 50_000])
            if (received := buffer.next_frame()) is not None:
                bodies.append((body, received[1]))
        assert all(bytes(received) == original for original, received in bodies)
        del bodies[: max(0, len(bodies) - kept_count)]
    assert len(bodies) == kept_count
