"""What a good client keeps of its rate beside strangers who never get as far as a log-in.

    python -m tests.system.strangers [--strangers 10000] [--greeting 1000]

Real processes and sockets, encrypted, with users. Strangers have several addresses of the loopback
network, and as many descriptors as the system allows. There are two kinds:

- Some greet, are answered, and say nothing more. They take the most memory: what each takes.
- Many begin a greeting of TLS and do not end it. While all of them are there, and nobody comes or
  goes, a good client publishes. Its rate is compared with its rate alone: in the server's processor
  time, which others on the machine change little, and in time, which means nothing on a machine
  that others use.

A server lets a stranger stay for ten seconds, so the many must come in five.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, Self

import attrs
import trio
from trio.to_thread import run_sync as to_thread

from tests.fuzz.tls import HELLO
from tests.kit.certificates import Certificates, encrypted
from tests.kit.process import ServerProcess, many_descriptors, server_process
from tests.server.users import BOB, USERS
from tests.system.certificate_options import options
from upr_protocol.client import Client, Publisher, connect, publisher
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S
from upr_protocol.security import Security
from upr_server.storage.offline.first_users import save_first_users

STRANGERS: Final = 10_000
GREETING: Final = 1_000
ADDRESSES: Final = 10
DESCRIPTORS_BESIDE: Final = 200
COME_S: Final = 5.0
LEAVE_S: Final = 1.0
"""How long before the first stranger is let go nothing more is measured."""
STEP: Final = 500
BUCKET: Final = "b"
BATCHES: Final = 40
BATCH: Final = 1000
VALUE: Final = bytes(100)
PIECES_ALONE: Final = 30


@attrs.frozen
class Piece:
    """A fixed piece of the good client's work: `BATCHES` batches.

    Attributes:
        processor_s: What it cost the server.
        time_s: How long it took.
    """

    processor_s: float
    time_s: float


@attrs.frozen
class Measured:
    """What was measured.

    Attributes:
        expected_strangers: How many strangers should have come.
        greeting: How many greeted.
        greeting_bytes: Memory of each of these.
        strangers: How many began a greeting.
        stayed: How many of these were there when the good client was done.
        stranger_bytes: Memory of each of these.
        arrival_s: The server's processor time for each to come.
        came_s: How long they took to come.
        alone: The good client's work without strangers.
        beside: The same beside those who began a greeting.
    """

    expected_strangers: int
    greeting: int
    greeting_bytes: float
    strangers: int
    stayed: int
    stranger_bytes: float
    arrival_s: float
    came_s: float
    alone: list[Piece]
    beside: list[Piece]

    def share(self, of: str) -> float:
        """What the good client keeps of its rate: by the medians of `processor_s` or `time_s`."""
        alone, beside = (
            median(getattr(piece, of) for piece in pieces) for pieces in (self.alone, self.beside)
        )
        return float(alone / beside)

    def __str__(self) -> str:
        share = f"at {1e6 * self.arrival_s:.0f} us of the server's processor time each"
        sentence = f"{self.strangers:,} strangers of {self.expected_strangers:,} begin to greet"
        times = f"{len(self.alone)} times alone and {len(self.beside)} times beside them"
        lines = [
            f"{self.greeting:,} strangers greet: {self.greeting_bytes:,.0f} bytes each",
            f"{sentence}: {self.stranger_bytes:,.0f} bytes each",
            f"  they come in {self.came_s:.1f} s, {share}; {self.stayed:,} stay to the end",
            f"a good client publishes {BATCHES} batches of {BATCH}, {times}; medians:",
        ]
        for of, unit in (("processor_s", "second of processor time"), ("time_s", "second")):
            rates = [
                BATCHES * BATCH / median(getattr(piece, of) for piece in pieces)
                for pieces in (self.alone, self.beside)
            ]
            lines.append(
                f"  {rates[0]:,.0f} changes a {unit} alone, {rates[1]:,.0f} beside them: "
                f"{self.share(of):.1%}"
            )
        return "\n".join(lines)


def processor_s(server: ServerProcess) -> float:
    """What the server's process has computed."""
    # In nanoseconds, where /proc/PID/stat counts hundredths of a second.
    schedule = Path(f"/proc/{server.process.pid}/task")
    return (
        sum(int((task / "schedstat").read_text().split()[0]) for task in schedule.iterdir()) / 1e9
    )


async def work(server: ServerProcess, sink: Publisher) -> Piece:
    """A fixed piece of the good client's work."""
    before, began = processor_s(server), trio.current_time()
    for _ in range(BATCHES):
        for index in range(BATCH):
            await sink.set(b"key-%d" % index, VALUE)
        await sink.flush()
    return Piece(processor_s(server) - before, trio.current_time() - began)


def gathered(server: ServerProcess, count: int, greeting: bytes) -> list[socket.socket]:
    """So many connections, each of which says this, from `ADDRESSES` addresses."""
    connections: list[socket.socket] = []
    for number in range(count):
        source = (f"127.0.0.{2 + number % ADDRESSES}", 0)
        address = (server.host, server.port)
        connections.append(socket.create_connection(address, source_address=source))
        connections[-1].sendall(greeting)
    return connections


@attrs.define
class StrangerGroup:
    """Strangers at a server, beside connections that were there before.

    Attributes:
        server: The server.
        asking: Tells how many connections the server has.
        good: Connections that are no strangers'.
        sockets: The strangers.
    """

    server: ServerProcess
    asking: Client
    good: int = 0
    sockets: list[socket.socket] = attrs.field(factory=list)

    @classmethod
    async def of_good_clients(cls, server: ServerProcess, asking: Client, sink: Publisher) -> Self:
        """No strangers yet, at a server that has done some work for the good client."""
        for _ in range(5):
            await work(server, sink)
        group = cls(server, asking)
        group.good = await group.present()
        return group

    async def present(self) -> int:
        """How many the server has accepted and not let go."""
        return int((await self.asking.stats())["server"]["connections"]) - self.good

    async def come(self, count: int, greeting: bytes) -> None:
        """Connects this many, or fewer if the server takes long to accept them: the first ones must
        still be there when the last have come."""
        until = trio.current_time() + COME_S
        while len(self.sockets) < count and trio.current_time() < until:
            more = min(STEP, count - len(self.sockets))
            self.sockets += await to_thread(gathered, self.server, more, greeting)
            while await self.present() < len(self.sockets):  # noqa: ASYNC110  nobody tells
                await trio.sleep(0.01)

    async def leave(self) -> None:
        """The server lets all of them go."""
        with trio.fail_after(6 * HANDSHAKE_TIMEOUT_S):
            while await self.present():  # noqa: ASYNC110  nobody tells
                await trio.sleep(0.5)
        for stranger in self.sockets:
            stranger.close()
        self.sockets.clear()


async def measure(
    certificates: Certificates,
    folder: Path,
    stranger_count: int = STRANGERS,
    greeting: int = GREETING,
) -> Measured:
    """Measures; see the module. Fewer strangers come if the system allows fewer descriptors.

    Args:
        certificates: The server's and its authority's.
        folder: Where the server keeps its data.
        stranger_count: Strangers who begin a greeting.
        greeting: Strangers who greet.
    """
    with many_descriptors() as limit:
        count = min(stranger_count, limit - DESCRIPTORS_BESIDE)
        # Each kind comes to a server of its own: what one frees is not returned to the system.
        async with served(certificates, folder / "greeting") as (server, asking, sink):
            group = await StrangerGroup.of_good_clients(server, asking, sink)
            resident = server.resident_bytes
            await group.come(min(greeting, count), HELLO)
            greeted = len(group.sockets)
            greeting_bytes = (server.resident_bytes - resident) / greeted
            await group.leave()
        async with served(certificates, folder / "strangers") as (server, asking, sink):
            group = await StrangerGroup.of_good_clients(server, asking, sink)
            alone = [await work(server, sink) for _ in range(PIECES_ALONE // 2)]
            resident, began = server.resident_bytes, trio.current_time()
            before_s = processor_s(server)
            await group.come(count, HELLO[: len(HELLO) // 2])
            arrived_count, came_s = len(group.sockets), trio.current_time() - began
            arrival_s = (processor_s(server) - before_s) / arrived_count
            stranger_bytes = (server.resident_bytes - resident) / arrived_count
            beside = [await work(server, sink)]
            while trio.current_time() < began + HANDSHAKE_TIMEOUT_S - LEAVE_S - beside[-1].time_s:
                beside.append(await work(server, sink))
            stayed = await group.present()
            await group.leave()
            alone += [await work(server, sink) for _ in range(PIECES_ALONE // 2)]
    return Measured(
        stranger_count, greeted, greeting_bytes, arrived_count, stayed, stranger_bytes, arrival_s,
        came_s, alone, beside,
    )  # fmt: skip


@asynccontextmanager
async def served(
    certificates: Certificates, folder: Path
) -> AsyncIterator[tuple[ServerProcess, Client, Publisher]]:
    """A server with users and a bucket, and two connections of a good client."""
    save_first_users(folder, USERS)
    async with server_process(
        *options(certificates.server, "--log-level", "error"),
        data_dir=folder,
        # The strangers of an address leave as many places as they take.
        variables={"UPR_SERVER_CONNECTIONS_MAX": str(2 * STRANGERS)},
    ) as server:
        security = Security(certificates.security().tls, BOB)
        url = server.url().replace("upr:", "uprs:")
        async with connect(encrypted(url, security)) as asking:
            await asking.create_bucket(BUCKET, 4)
            async with publisher(encrypted(f"{url}{BUCKET}", security)) as sink:
                yield server, asking, sink


def main() -> None:
    """Measures, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strangers", type=int, default=STRANGERS)
    parser.add_argument("--greeting", type=int, default=GREETING)
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        certificates = Certificates(folder)
        measured = trio.run(measure, certificates, folder, arguments.strangers, arguments.greeting)
    sys.stdout.write(f"{measured}\n")


if __name__ == "__main__":
    main()
