"""The client in JavaScript: its vectors, the conformance runner, and a torture."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.kit.process import ROOT, ServerProcess, run, server_process
from tests.kit.proxy import Proxy, proxy_to
from upr_protocol.client import connect
from upr_server.conformance import CLIENT_SCENARIOS, check_client

CLIENT: Final = ROOT / "clients" / "node"
NODE: Final = shutil.which("node")

pytestmark = pytest.mark.skipif(
    NODE is None, reason="the command node is missing: install Node.js 20 to test clients/node"
)


async def test_its_own_tests_pass() -> None:
    done = await run(("node", "--test", str(CLIENT / "test")))
    assert done.code == 0, done.out


def test_it_stays_small() -> None:
    modules = ("wire", "connection", "consumer", "publisher")
    texts = [(CLIENT / f"{name}.js").read_text() for name in modules]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) < 600


async def test_it_passes_every_scenario(subtests: pytest.Subtests) -> None:
    command = ("node", str(CLIENT / "conformance.js"))
    async with aclosing(check_client(command)) as verdicts:
        async for verdict in verdicts:
            with subtests.test(verdict.scenario):
                assert verdict.failure == ""


def test_every_scenario_says_what_it_is_about() -> None:
    assert all(scenario.about for scenario in CLIENT_SCENARIOS.values())


ROUNDS: Final = 9
PARTITIONS: Final = 8


@pytest.mark.timeout(400)
async def test_kills_cuts_and_rollbacks(tmp_path: Path) -> None:
    """What the server acknowledged as on disk is there once, and the copy that was followed all the
    while has it; counters were counted once a round."""
    torture = Torture(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(torture.serve)
        async with proxy_to("127.0.0.1", torture.port) as proxy:
            async with connect(proxy.url()) as client:
                await client.create_bucket("b", PARTITIONS)
            command = ("node", str(CLIENT / "torture.js"), "127.0.0.1", str(proxy.port), "b")
            done = await torture.play(proxy, (*command, str(PARTITIONS), str(ROUNDS)))
        nursery.cancel_scope.cancel()
    assert done["keys"] == 720
    assert done["connections"] > ROUNDS // 2


class Torture:
    """A server that is killed and comes back at the same port, with the same disk."""

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self._data_dir = folder / "data"
        self._server: ServerProcess | None = None

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        while True:
            listen = f"127.0.0.1:{self.port}"
            async with server_process(listen=listen, data_dir=self._data_dir) as server:
                self._server = server
                if not self.port:
                    self.port = server.port
                    task_status.started()
                await server.process.wait()

    async def play(self, proxy: Proxy, command: tuple[str, ...]) -> dict[str, int]:
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        text, rounds = "", 0
        async for data in process.stdout:
            text += bytes(data).decode()
            while rounds < text.count("round"):
                rounds += 1
                if rounds % 3 == 0:
                    assert self._server is not None
                    self._server.kill()
                else:
                    proxy.cut()
        assert await process.wait() == 0, text
        result: dict[str, int] = json.loads(text.splitlines()[-1])
        return result
