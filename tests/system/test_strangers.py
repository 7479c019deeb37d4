"""Up to ten thousand strangers who never get as far as a log-in, beside a good client.

Real processes and sockets, encrypted, with users. First come some who greet, are answered, and say
nothing more: they take the most memory. Then come those who begin a greeting of TLS and do not end
it: ten thousand, or as many as the server accepts while their time lasts. The good client's rate is
measured in the server's processor time for a fixed piece of work while they are there, and nobody
comes or goes: rates mean nothing on a machine that others use.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.to_thread import run_sync as to_thread

from tests.fuzz.tls import HELLO
from tests.kit.certificates import Certificates, encrypted
from tests.kit.effort import thorough
from tests.kit.process import ServerProcess, many_descriptors, server_process
from tests.server.test_log_in import BOB, USERS
from tests.system.test_tls import options
from upr_protocol.client import Publisher, connect, publisher
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S
from upr_protocol.security import Security
from upr_server.storage.offline.first_users import save_first_users

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

STRANGERS: Final = 10_000
GREETING: Final = 1_000
DESCRIPTORS_BESIDE: Final = 200
STRANGER_BYTES_MAX: Final = 64 * 1024
SHARE: Final = 0.95
COME_S: Final = 4.0
STEP: Final = 250
STRANGERS_MIN: Final = 500
BUCKET: Final = "b"
ROUNDS: Final = 5
BATCHES: Final = 200
BATCH: Final = 1000
VALUE: Final = bytes(100)


def processor_s(server: ServerProcess) -> float:
    """What the server's process has computed."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def work(server: ServerProcess, sink: Publisher) -> float:
    """A fixed piece of the good client's work, and what it cost the server."""
    before = processor_s(server)
    for _ in range(BATCHES):
        for index in range(BATCH):
            await sink.set(b"key-%d" % index, VALUE)
        await sink.flush()
    return processor_s(server) - before


def gathered(server: ServerProcess, count: int, said: bytes) -> list[socket.socket]:
    """So many connections, each of which says this."""
    connections: list[socket.socket] = []
    for _ in range(count):
        connections.append(socket.create_connection((server.host, server.port)))
        connections[-1].sendall(said)
    return connections


@thorough
@pytest.mark.timeout(300)
async def test_strangers_leave_a_good_client_its_rate(
    certificates: Certificates, tmp_path: Path
) -> None:
    save_first_users(tmp_path / "data", USERS)
    with many_descriptors() as limit:
        count = min(STRANGERS, limit - DESCRIPTORS_BESIDE)
        async with server_process(
            *options(certificates.server, "--log-level", "error"),
            data_dir=tmp_path / "data",
            variables={"UPR_SERVER_CONNECTIONS_MAX": str(STRANGERS + 100)},
        ) as server:
            security = Security(certificates.security().tls, BOB)
            url = server.url().replace("upr:", "uprs:")
            async with connect(encrypted(url, security)) as asking:
                await asking.create_bucket(BUCKET, 4)
                async with publisher(encrypted(f"{url}{BUCKET}", security)) as sink:
                    await work(server, sink)
                    alone_s = [await work(server, sink) for _ in range(ROUNDS)]

                    async def connections() -> int:
                        return int((await asking.stats())["server"]["connections"])

                    async def come(count: int, said: bytes) -> list[socket.socket]:
                        """So many strangers, or fewer if the server takes long to accept them:
                        the first ones must still be there when the last have come."""
                        there: list[socket.socket] = []
                        until = trio.current_time() + COME_S
                        while len(there) < count and trio.current_time() < until:
                            more = min(STEP, count - len(there))
                            there += await to_thread(gathered, server, more, said)
                            while await connections() < good + len(there):  # noqa: ASYNC110
                                await trio.sleep(0.01)
                        return there

                    async def gone() -> None:
                        with trio.fail_after(6 * HANDSHAKE_TIMEOUT_S):
                            while await connections() > good:  # noqa: ASYNC110  nobody tells
                                await trio.sleep(0.5)

                    good, resident = await connections(), server.resident_bytes
                    greeting = await come(GREETING, HELLO)
                    bytes_each = (server.resident_bytes - resident) / len(greeting)
                    await gone()

                    half = HELLO[: len(HELLO) // 2]
                    before_s = processor_s(server)
                    strangers = await come(count, half)
                    each_s = (processor_s(server) - before_s) / len(strangers)
                    beside_s = await work(server, sink)
                    still_present = await connections() - good
                    await gone()
                    for stranger in (*greeting, *strangers):
                        stranger.close()
                print(  # noqa: T201
                    f"{len(greeting)} who greet: {bytes_each:.0f} bytes each; {len(strangers)} "
                    f"strangers, {still_present} of them to the end, {1e6 * each_s:.0f} us each to "
                    f"come; the good client's work: {min(alone_s):.2f} s to {max(alone_s):.2f} s "
                    f"alone, {beside_s:.2f} s beside them"
                )
        assert bytes_each < STRANGER_BYTES_MAX
        assert still_present == len(strangers) > STRANGERS_MIN, "the machine is too busy for this"
        assert max(alone_s) >= SHARE * beside_s
