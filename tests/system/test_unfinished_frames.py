"""Frames that begin and do not end, as many as a peer can open connections, beside good clients.

Real processes and sockets; the good publisher and consumer are at work all the time.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, suppress
from typing import Final

import pytest
import trio

from tests.kit.good_clients import good_clients
from tests.kit.peer import Peer, peer
from tests.kit.process import ServerProcess, many_descriptors, server_process
from upr_kernel import pack_header
from upr_protocol.client import connect
from upr_protocol.wire import Mutate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MIB: Final = 1024 * 1024
BUCKET: Final = "attacked"


async def _create(server: ServerProcess) -> None:
    async with connect(server.url()) as client:
        await client.create_bucket(BUCKET, 2)


LONGEST_TURN_S: Final = 0.2
"""In seconds of the processor. A turn serves 600 peers, and frees what some of them sent."""


async def _begin_frame(bad: Peer, length: int, count: int) -> None:
    await bad.send_bytes(pack_header(Mutate.opcode, 0, 0, 99, length, 0))
    with suppress(trio.BrokenResourceError):
        await bad.send_bytes(bytes(count))


async def test_headers_without_bodies_do_not_hold_up_others() -> None:
    """Sixteen connections announce 32 MiB each, more than the server has for unfinished frames, and
    send a byte now and then. A value of 2 MiB is taken beside them at once."""
    async with server_process() as server, good_clients(server) as good, AsyncExitStack() as stack:
        await _create(server)
        for _ in range(16):
            bad = await stack.enter_async_context(peer(server.host, server.port, BUCKET))
            await _begin_frame(bad, 32 * MIB, 1)
        async with connect(server.url(BUCKET)) as client:
            with trio.fail_after(10):
                await client.set(b"key", bytes(2 * MIB))
            stats = await client.stats()
        assert stats["server"]["frame_bytes_under_way"] < 16 * MIB
        await good.more_rounds()


async def test_frames_that_end_just_before_their_ends_are_bounded() -> None:
    """600 connections send all but 8 bytes of a frame of 1 MiB, and fall silent. The server drops
    the first to stop as soon as it is short of memory, and takes good frames all the time."""
    with many_descriptors() as limit:
        count = min(600, limit // 2 - 100)
        async with (
            server_process() as server,
            good_clients(server) as good,
            trio.open_nursery() as nursery,
        ):
            await _create(server)
            before = server.resident_bytes
            server.forget_peak()
            begun = trio.Semaphore(0)

            async def fall_silent() -> None:
                async with peer(server.host, server.port, BUCKET) as bad:
                    await _begin_frame(bad, MIB, MIB - 8)
                    begun.release()
                    with suppress(trio.BrokenResourceError):
                        await bad.receive()

            # Connected before: this process has so much to do for 600 peers that it might be late.
            async with connect(server.url(BUCKET)) as client:
                for _ in range(count):
                    nursery.start_soon(fall_silent)
                for _ in range(count):
                    await begun.acquire()
                with trio.fail_after(10):
                    await client.set(b"key", bytes(2 * MIB))
            # The budget times its factor, and what a body's growth and the allocator take for it.
            assert server.peak_bytes - before < 512 * MIB
            await good.more_rounds()
            async with connect(server.url()) as client:
                longest_turn_s = (await client.stats())["server"]["longest_turn_s"]
            nursery.cancel_scope.cancel()
            # Their reads take turns: all in one turn of the loop took half a second.
            assert longest_turn_s < LONGEST_TURN_S, f"{1000 * longest_turn_s:.0f} ms"
