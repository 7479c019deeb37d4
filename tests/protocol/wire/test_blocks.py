"""Memory that is used again: never while anyone can see it, and only a little of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.protocol.wire.test_frame import admit, frame_of
from upr_protocol.chunk import Buffer
from upr_protocol.wire import FrameBuffer
from upr_protocol.wire.blocks import BLOCK_BYTES, BLOCKS, Blocks


def whose(view: Buffer) -> object:
    return view.obj if isinstance(view, memoryview) else view


def test_a_block_is_taken_again_when_its_last_view_is_gone() -> None:
    blocks = Blocks(2)
    first = blocks.take(100_000)
    block = whose(first)
    part = np.frombuffer(memoryview(first)[8:80].cast("Q"), dtype=np.uint64)
    del first
    assert whose(blocks.take(100_000)) is not block
    del part
    again = blocks.take(150_000)
    assert whose(again) is block
    assert len(again) == 150_000


@pytest.mark.parametrize("size", [0, 1, 1_000, BLOCK_BYTES + 1])
def test_what_is_short_or_long_has_memory_of_its_own(size: int) -> None:
    taken = Blocks(1).take(size)
    assert isinstance(taken, bytearray)
    assert len(taken) == size


def test_who_keeps_bodies_keeps_a_few_blocks() -> None:
    blocks = Blocks(BLOCKS)
    kept = [blocks.take(100_000) for _ in range(3 * BLOCKS)]
    assert sum(isinstance(one, memoryview) for one in kept) == BLOCKS
    assert all(len(one) == 100_000 for one in kept)


@pytest.mark.parametrize("keep", [0, 1, 10])
def test_bodies_that_are_kept_stay_what_they_are(keep: int) -> None:
    buffer = FrameBuffer(admit)
    buffer.reuse_memory()
    kept: list[tuple[bytes, Buffer]] = []
    for number in range(40):
        body = bytes([number]) * (60_000 + 8 * number)
        frame = frame_of(body)
        for at in range(0, len(frame), 50_000):
            buffer.receive(frame[at : at + 50_000])
            if (got := buffer.next()) is not None:
                kept.append((body, got[1]))
        assert all(bytes(one) == was for was, one in kept)
        del kept[: max(0, len(kept) - keep)]
    assert len(kept) == keep
