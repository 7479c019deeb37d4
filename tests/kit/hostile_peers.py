"""A process full of peers that do harm, all at once: `python -m tests.kit.hostile_peers HOST PORT
BUCKET IDLE`.

- *Slow greeters* begin a greeting of 4,000 bytes and send 20 of them a second.
- *Idlers*, `IDLE` of them, greet, and every fourth opens the bucket; then they say nothing.
- *Silent consumers* stream all of the bucket, read what comes, and acknowledge nothing.
- *Flooders* ask for streams and close them, as fast as the server takes it.
- *Announcers* announce frames of up to 4 GiB, and are disconnected.
- *Partial senders* announce frames of 30 MiB, send 2 MiB of each, and no more.

A peer that is disconnected connects again. The process prints `{"ready": true}` when all of them
are at work, and then twice a second, as a line of JSON, what each kind has done so far.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

import trio

from tests.kit.peer import Peer, peer
from upr_kernel import pack_header
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.limits import WINDOW_BYTES_MIN
from upr_protocol.wire import CloseStream, Get, Go, Hello, Mutate, Stream

SLOW_GREETERS: Final = 300
GREETING_BYTE_S: Final = 0.05
GREETING_BYTES: Final = 4_000
SILENT_CONSUMERS: Final = 50
FLOODERS: Final = 10
FLOOD: Final = 50
ANNOUNCERS: Final = 10
ANNOUNCED_BYTES: Final = (0xFFFF_FFF8, 0x8000_0000, 0x0200_0008)
PARTIAL_SENDERS: Final = 20
PARTIAL_FRAME_BYTES: Final = 30 * 1024 * 1024
SENT_BYTES: Final = 2 * 1024 * 1024
SILENCE_S: Final = 3600
SAY_S: Final = 0.5
CONNECT_AT_ONCE: Final = 20


class HostilePeers:
    """Runs the peers; see the module.

    Attributes:
        done: By kind, counts of what the peers have done.
    """

    def __init__(self, host: str, port: int, bucket: str) -> None:
        self.done: Counter[str] = Counter()
        self._at = host, port
        self._bucket = bucket
        self._connecting = trio.CapacityLimiter(CONNECT_AT_ONCE)
        self._slow_streams: set[trio.SocketStream] = set()

    async def gather(self, nursery: trio.Nursery, idlers: int) -> None:
        """Returns when all peers are connected."""
        for count, kind in (
            (idlers, self._idle),
            (SLOW_GREETERS, self._greet_slowly),
            (SILENT_CONSUMERS, self._consume_silently),
            (FLOODERS, self._flood),
            (ANNOUNCERS, self._announce_long_frames),
            (PARTIAL_SENDERS, self._send_partial_frames),
        ):
            there = [trio.Event() for _ in range(count)]
            for index, is_there in enumerate(there):
                nursery.start_soon(self._again_and_again, kind, index, is_there)
            for is_there in there:
                await is_there.wait()
        nursery.start_soon(self._send_greeting_bytes)

    async def _again_and_again(
        self,
        kind: Callable[[int, Callable[[], None]], Awaitable[None]],
        index: int,
        is_there: trio.Event,
    ) -> None:
        while True:
            with suppress(OSError, trio.BrokenResourceError, AssertionError):
                await kind(index, is_there.set)
            await trio.sleep(0.01)

    # One of each kind.

    async def _idle(self, index: int, is_at_it: Callable[[], None]) -> None:
        bucket = self._bucket if index % 4 == 0 else ""
        async with AsyncExitStack() as stack:
            async with self._connecting:
                idle = await stack.enter_async_context(
                    peer(*self._at, bucket, idle_interval_s=SILENCE_S)
                )
            self.done["idle"] += 1
            is_at_it()
            try:
                # `expect_end` gives up after a minute.
                while await idle.stream.receive_some():
                    pass
            finally:
                self.done["idle"] -= 1

    async def _greet_slowly(self, index: int, is_at_it: Callable[[], None]) -> None:
        async with peer(*self._at, greeted=False) as slow:
            await slow.send_bytes(pack_header(Hello.opcode, 0, 0, 0, GREETING_BYTES, 0))
            self._slow_streams.add(slow.stream)
            is_at_it()
            try:
                while await slow.stream.receive_some():
                    pass
                self.done["disconnected"] += 1
            finally:
                self._slow_streams.discard(slow.stream)

    async def _send_greeting_bytes(self) -> None:
        """Sends a byte for each of the slow greeters."""
        while True:
            await trio.sleep(GREETING_BYTE_S)
            for stream in list(self._slow_streams):
                with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                    await stream.send_all(b"\0")
                    self.done["greeting bytes"] += 1

    async def _consume_silently(self, index: int, is_at_it: Callable[[], None]) -> None:
        async with peer(*self._at, greeted=False) as consumer:
            await consumer.greet(idle_interval_s=SILENCE_S, window_bytes=WINDOW_BYTES_MIN)
            await consumer.open(self._bucket)
            await consumer.stream_all()
            self.done["unacknowledged"] += 1
            is_at_it()
            try:
                while await consumer.receive() is not None:
                    pass
            finally:
                self.done["unacknowledged"] -= 1

    async def _flood(self, index: int, is_at_it: Callable[[], None]) -> None:
        async with (
            peer(*self._at, self._bucket, idle_interval_s=SILENCE_S) as flooder,
            trio.open_nursery() as nursery,
        ):
            await flooder.send(Go())
            nursery.start_soon(self._drain, flooder, nursery.cancel_scope)
            is_at_it()
            while True:
                requests: list[Stream | CloseStream] = []
                for _ in range(FLOOD):
                    opaque = flooder.opaque()
                    partition = PartitionId(opaque % flooder.partition_count)
                    requests += (
                        Stream(
                            PartitionState.ACTIVE, NOTHING_YET, partition=partition, opaque=opaque
                        ),
                        CloseStream(partition=partition, opaque=opaque),
                    )
                await flooder.send(*requests)
                self.done["streams"] += FLOOD

    async def _drain(self, flooder: Peer, scope: trio.CancelScope) -> None:
        while data := await flooder.stream.receive_some():
            self.done["answered bytes"] += len(data)
        self.done["flooders disconnected"] += 1
        scope.cancel()

    async def _announce_long_frames(self, index: int, is_at_it: Callable[[], None]) -> None:
        opcode = (Mutate.opcode, Get.opcode, Hello.opcode)[index % 3]
        greeted = opcode != Hello.opcode
        async with peer(*self._at, self._bucket if greeted else "", greeted=greeted) as announcer:
            length = ANNOUNCED_BYTES[self.done["announced frames"] % len(ANNOUNCED_BYTES)]
            await announcer.send_bytes(pack_header(opcode, 0, 0, 99, length, 0))
            while await announcer.stream.receive_some():
                pass
        self.done["announced frames"] += 1
        is_at_it()

    async def _send_partial_frames(self, index: int, is_at_it: Callable[[], None]) -> None:
        async with peer(*self._at, self._bucket, idle_interval_s=SILENCE_S) as sender:
            await sender.send_bytes(pack_header(Mutate.opcode, 0, 0, 99, PARTIAL_FRAME_BYTES, 0))
            is_at_it()
            with trio.move_on_after(5):
                await sender.send_bytes(bytes(SENT_BYTES))
            self.done["partial frames"] += 1
            while await sender.stream.receive_some():
                pass


def say(counts: dict[str, int]) -> None:
    """Writes a line to the test."""
    print(json.dumps(counts), flush=True)  # noqa: T201  # it is how they speak


async def main(host: str, port: str, bucket: str, idlers: str) -> None:
    """Runs until it is killed."""
    peers = HostilePeers(host, int(port), bucket)
    async with trio.open_nursery() as nursery:
        await peers.gather(nursery, int(idlers))
        say({"ready": True})
        while True:
            await trio.sleep(SAY_S)
            say(dict(peers.done))


if __name__ == "__main__":
    host, port, bucket, idlers = sys.argv[1:]
    trio.run(main, host, port, bucket, idlers)
