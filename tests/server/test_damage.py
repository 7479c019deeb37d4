"""Damage on disk, as clients of the server notice it: in the partition in which it is, alone."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.placed_keys import key_in
from tests.server.test_connection import P0, sets
from tests.server.test_durability import (
    BUCKET,
    K0,
    K1,
    P1,
    PERSISTED,
    answer_to,
    send,
    serving,
    speaking,
    statistics,
    status_of,
    value_of,
)
from upr_protocol.errors import Status
from upr_protocol.wire import Get
from upr_server.storage.online import flusher
from upr_server.storage.records import chunk_key, index_key
from upr_server.storage.simulated import SimulatedStore

OTHER: Final = key_in(0, 2, b"other")
NEVER: Final = key_in(0, 2, b"never")
INDEXED_S: Final = 5.0
"""After so long without a write everything is indexed."""
PROMPT_S: Final = 60.0


async def stored(is_index_damaged: bool) -> SimulatedStore:
    """A store with a bucket of two partitions. In the first, what the index lacks cannot be
    indexed: the chunk is damaged, or the entry of its key."""
    store = SimulatedStore()
    async with serving(store) as server, speaking(server) as peer:
        for key, partition in ((K0, P0), (K1, P1)):
            await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
        await trio.sleep(INDEXED_S)
        for key, partition in ((K0, P0), (K1, P1)):
            await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
    log, index = store.directory.disks[BUCKET]
    if is_index_damaged:
        index.flip(index_key(0, K0), 5)
    else:
        log.flip(chunk_key(0, 2), 8 * 60)
    return SimulatedStore(store.directory)


@pytest.mark.parametrize("is_index_damaged", [False, True])
async def test_damage_is_reported_at_once_and_other_partitions_are_served(
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    is_index_damaged: bool,
) -> None:
    store = await stored(is_index_damaged)
    # Commits wait for an index that is behind, but not for one that cannot go on.
    monkeypatch.setattr(flusher, "UNINDEXED_MAX", 0)
    with trio.fail_after(PROMPT_S):
        async with serving(store) as server, speaking(server) as peer:
            for key in (K0, NEVER):
                opaque = peer.opaque()
                await peer.say(Get((key,), partition=P0, opaque=opaque))
                assert status_of(await answer_to(peer, opaque)) is Status.DAMAGED
            assert await value_of(peer, K1, P1) == b"v"
            for partition, key in ((P0, OTHER), (P1, key_in(1, 2, b"other")), (P0, K0)):
                answer = await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
                assert status_of(answer) is Status.OK
                assert await value_of(peer, key, partition) == b"v"
            figures = (await statistics(peer))["disk"]
            assert figures["damaged_partitions"] == [0]
            assert figures["damaged"]
            await trio.sleep(INDEXED_S)
            assert (await statistics(peer))["disk"]["unindexed_mutations"] == 0
