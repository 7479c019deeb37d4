"""A process full of peers that do harm, all at once: `python -m tests.kit.hostile_peers HOST PORT
BUCKET IDLE`.

- *Trickles* begin a greeting of 4,000 bytes and send 20 of them a second.
- *Idlers*, `IDLE` of them, greet, and every fourth opens the bucket; then they say nothing.
- *Misers* stream all of the bucket, read what comes, and acknowledge nothing.
- *Flooders* ask for streams and close them, as fast as the server takes it.
- *Liars* announce frames of up to 4 GiB, are shown out, and come again.
- *Hoarders* announce frames of 30 MiB, send 2 MiB of each, and no more.

Whoever is shown out comes again. It says `{"ready": true}` when all of them are at it, and then
twice a second, as a line of JSON, what each kind has done so far.
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

TRICKLES: Final = 300
TRICKLE_S: Final = 0.05
GREETING_BYTES: Final = 4_000
MISERS: Final = 50
FLOODERS: Final = 10
FLOOD: Final = 50
LIARS: Final = 10
LIES: Final = (0xFFFF_FFF8, 0x8000_0000, 0x0200_0008)
HOARDERS: Final = 20
HOARD_BYTES: Final = 30 * 1024 * 1024
SENT_BYTES: Final = 2 * 1024 * 1024
SILENCE_S: Final = 3600
SAY_S: Final = 0.5
CONNECT_AT_ONCE: Final = 20


class Crowd:
    """See the module.

    Attributes:
        done: What each kind has done.
    """

    def __init__(self, host: str, port: int, bucket: str) -> None:
        self.done: Counter[str] = Counter()
        self._at = host, port
        self._bucket = bucket
        self._connecting = trio.CapacityLimiter(CONNECT_AT_ONCE)
        self._trickling: set[trio.SocketStream] = set()

    async def gather(self, nursery: trio.Nursery, idlers: int) -> None:
        """Returns when all are there."""
        for count, kind in (
            (idlers, self._idle),
            (TRICKLES, self._trickle),
            (MISERS, self._stint),
            (FLOODERS, self._flood),
            (LIARS, self._lie),
            (HOARDERS, self._hoard),
        ):
            there = [trio.Event() for _ in range(count)]
            for index, is_there in enumerate(there):
                nursery.start_soon(self._again_and_again, kind, index, is_there)
            for is_there in there:
                await is_there.wait()
        nursery.start_soon(self._drip)

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

    async def _trickle(self, index: int, is_at_it: Callable[[], None]) -> None:
        async with peer(*self._at, greeted=False) as slow:
            await slow.send_bytes(pack_header(Hello.opcode, 0, 0, 0, GREETING_BYTES, 0))
            self._trickling.add(slow.stream)
            is_at_it()
            try:
                while await slow.stream.receive_some():
                    pass
                self.done["shown out"] += 1
            finally:
                self._trickling.discard(slow.stream)

    async def _drip(self) -> None:
        """Sends a byte for each of the trickles."""
        while True:
            await trio.sleep(TRICKLE_S)
            for stream in list(self._trickling):
                with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                    await stream.send_all(b"\0")
                    self.done["trickled"] += 1

    async def _stint(self, index: int, is_at_it: Callable[[], None]) -> None:
        async with peer(*self._at, greeted=False) as miser:
            await miser.greet(idle_interval_s=SILENCE_S, window_bytes=WINDOW_BYTES_MIN)
            await miser.open(self._bucket)
            await miser.stream_all()
            self.done["unacknowledged"] += 1
            is_at_it()
            try:
                while await miser.receive() is not None:
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
        self.done["flooders shown out"] += 1
        scope.cancel()

    async def _lie(self, index: int, is_at_it: Callable[[], None]) -> None:
        opcode = (Mutate.opcode, Get.opcode, Hello.opcode)[index % 3]
        greeted = opcode != Hello.opcode
        async with peer(*self._at, self._bucket if greeted else "", greeted=greeted) as liar:
            length = LIES[self.done["lies"] % len(LIES)]
            await liar.send_bytes(pack_header(opcode, 0, 0, 99, length, 0))
            while await liar.stream.receive_some():
                pass
        self.done["lies"] += 1
        is_at_it()

    async def _hoard(self, index: int, is_at_it: Callable[[], None]) -> None:
        async with peer(*self._at, self._bucket, idle_interval_s=SILENCE_S) as hoarder:
            await hoarder.send_bytes(pack_header(Mutate.opcode, 0, 0, 99, HOARD_BYTES, 0))
            is_at_it()
            with trio.move_on_after(5):
                await hoarder.send_bytes(bytes(SENT_BYTES))
            self.done["hoards"] += 1
            while await hoarder.stream.receive_some():
                pass


def say(counts: dict[str, int]) -> None:
    """Tells the test."""
    print(json.dumps(counts), flush=True)  # noqa: T201  # it is how they speak


async def main(host: str, port: str, bucket: str, idlers: str) -> None:
    """Never ends by itself."""
    crowd = Crowd(host, int(port), bucket)
    async with trio.open_nursery() as nursery:
        await crowd.gather(nursery, int(idlers))
        say({"ready": True})
        while True:
            await trio.sleep(SAY_S)
            say(dict(crowd.done))


if __name__ == "__main__":
    host, port, bucket, idlers = sys.argv[1:]
    trio.run(main, host, port, bucket, idlers)
