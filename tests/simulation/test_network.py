"""The simulated network does what networks do."""

from __future__ import annotations

from random import Random

import pytest
import trio

from tests.simulation.network import PORT, WINDOW_BYTES, Network
from tests.simulation.world import JumpingClock, run_in_world
from upr_protocol.client import Address

DELAY_S = 0.5


async def _connection(network: Network) -> tuple[trio.abc.Stream, trio.abc.Stream]:
    listener = network.listen("b")
    near = await network.dial("a", Address.parse(f"upr://b:{PORT}/x"))
    return near, await listener.accept()


async def _receive(far: trio.abc.Stream, nbytes: int) -> float:
    while nbytes:
        nbytes -= len(await far.receive_some(nbytes))
    return trio.current_time()


def test_held_back_bytes_arrive_at_once_when_the_link_is_mended() -> None:
    async def main(clock: JumpingClock) -> None:
        network = Network(clock, Random(1), DELAY_S, 0.0)
        near, far = await _connection(network)
        link = network.link("a", "b")
        before = trio.current_time()
        await near.send_all(bytes(WINDOW_BYTES))
        assert await _receive(far, WINDOW_BYTES) - before < DELAY_S + 0.01
        link.bytes_per_s = 100.0
        before = trio.current_time()
        for _ in range(64):
            await near.send_all(bytes(1000))
        assert await _receive(far, 1000) - before == pytest.approx(DELAY_S + 10.0)
        async with trio.open_nursery() as nursery:

            async def rest() -> None:
                assert await _receive(far, 63_000) - before == pytest.approx(20.0)

            nursery.start_soon(rest)
            await clock.sleep(20.0 - DELAY_S - 10.0)
            link.mend()
        before = trio.current_time()
        await near.send_all(b"more")
        assert await _receive(far, 4) - before < DELAY_S + 0.01

    run_in_world(1, main)


def test_a_cut_link_holds_back_bytes_on_their_way() -> None:
    async def main(clock: JumpingClock) -> None:
        network = Network(clock, Random(1), DELAY_S, 0.0)
        near, far = await _connection(network)
        network.link("a", "b").cut()
        await near.send_all(b"one way")
        await far.send_all(b"the other")
        assert await _receive(near, 9) == pytest.approx(1.0 + DELAY_S)
        with trio.move_on_after(100.0) as scope:
            await _receive(far, 7)
        assert scope.cancelled_caught
        network.mend()
        before = trio.current_time()
        assert await _receive(far, 7) == before

    run_in_world(1, main)
