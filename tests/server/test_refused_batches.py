"""Batches that are refused for a temporary reason: no later batch of the same publisher is applied
before them."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.server.connected_peer import P0, sets
from tests.server.modelled_partition import Model
from tests.server.served_bucket import (
    MEMORY,
    answer_to,
    increment,
    send,
    serving,
    speaking,
    status_of,
    value_of,
)
from upr_protocol.errors import Status
from upr_server.buckets.upkeep import REFUSALS_AGE_S
from upr_server.engine import WriterToken
from upr_server.storage.calls import FindItems, StoreCall
from upr_server.storage.errors import DiskFullError
from upr_server.storage.simulated import SimulatedStore


@pytest.mark.usefixtures("autojump_clock")
async def test_no_later_batch_overtakes_one_that_was_refused_while_the_disk_was_full() -> None:
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        (disk,) = server.catalog.disks.values()

        async def put(counter: int) -> Status:
            chunk = sets(b"k", value=b"%d" % counter)
            return status_of(await answer_to(peer, await send(peer, chunk, MEMORY, P0, counter)))

        disk.flusher.disk_full_reason = "full"
        assert await put(1) is Status.TEMPORARY_FAILURE
        disk.flusher.disk_full_reason = ""
        assert [await put(2), await put(3)] == 2 * [Status.TEMPORARY_FAILURE]
        assert await value_of(peer, b"k") is None
        assert [await put(counter) for counter in (1, 2, 3, 4)] == 4 * [Status.OK]
        assert await value_of(peer, b"k") == b"4"


@pytest.mark.usefixtures("autojump_clock")
async def test_refusals_of_a_publisher_that_never_returns_are_forgotten_after_minutes() -> None:
    """While the partition remembers a refusal, it must look at the writer of each batch."""
    async with serving(SimulatedStore()) as server, trio.open_nursery() as nursery:
        (disk,) = server.catalog.disks.values()
        async with speaking(server) as peer:
            disk.flusher.disk_full_reason = "full"
            answer = await answer_to(peer, await send(peer, sets(b"k"), MEMORY, P0, 1))
            assert status_of(answer) is Status.TEMPORARY_FAILURE
            disk.flusher.disk_full_reason = ""
        answers = disk.bucket.partitions[P0].repeated_batches.answers
        other_token = WriterToken(b"another writer!!", 1)
        nursery.start_soon(server.upkeep.run_expiring)
        await trio.sleep(REFUSALS_AGE_S / 2)
        assert not answers.is_certainly_new(other_token, 0)
        await trio.sleep(2 * REFUSALS_AGE_S)
        assert answers.is_certainly_new(other_token, 0)
        nursery.cancel_scope.cancel()


class FailingRead(SimulatedStore):
    """A store whose next read of keys fails if `fails_next_read`."""

    fails_next_read = False

    async def wait(self, call: StoreCall[Any]) -> None:
        await super().wait(call)
        if isinstance(call, FindItems) and self.fails_next_read:
            self.fails_next_read = False
            raise DiskFullError("not now")


async def test_no_later_batch_overtakes_one_that_was_refused_while_the_disk_failed_to_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = FailingRead()
    async with serving(store) as server, speaking(server) as peer:
        (disk,) = server.catalog.disks.values()
        model = Model(disk, disk.bucket.partitions[0])
        model.write((b"n", b"10"))
        await model.persist()
        await trio.sleep(3)
        model.forget()
        store.fails_next_read = True
        first, second = [await send(peer, increment(b"n", 1), MEMORY, P0, n) for n in (1, 2)]
        assert status_of(await answer_to(peer, first)) is Status.TEMPORARY_FAILURE
        assert status_of(await answer_to(peer, second)) is Status.TEMPORARY_FAILURE
        opaques = [await send(peer, increment(b"n", 1), MEMORY, P0, index) for index in (1, 2, 3)]
        assert [status_of(await answer_to(peer, opaque)) for opaque in opaques] == 3 * [Status.OK]
        assert await value_of(peer, b"n") == b"13"
