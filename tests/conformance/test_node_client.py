"""The client in JavaScript: its vectors, the conformance runner, and a stress test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.kit.effort import effort
from tests.kit.process import ROOT, ServerProcess, children_of, run, server_process
from tests.kit.proxy import Proxy, proxy_to
from upr_protocol.client import Client, connect
from upr_server.conformance import CLIENT_SCENARIOS, check_client

CLIENT: Final = ROOT / "clients" / "node"
NODE: Final = shutil.which("node")

pytestmark = pytest.mark.skipif(
    NODE is None, reason="the command node is missing: install Node.js 20 to test clients/node"
)


async def test_its_own_tests_pass() -> None:
    paths = sorted(map(str, (CLIENT / "test").glob("*.test.js")))
    result = await run(("node", "--test", *paths))
    assert result.code == 0, result.out


def test_the_node_client_has_less_than_630_lines() -> None:
    """And the steps of SCRAM, which are not UPR's, less than 40 of their own."""

    def lines(*modules: str) -> int:
        texts = [(CLIENT / f"{name}.js").read_text() for name in modules]
        return sum(bool(line.strip()) for text in texts for line in text.splitlines())

    assert lines("wire", "connection", "consumer", "publisher") < 630
    assert lines("scram") < 40


async def test_it_passes_every_scenario(subtests: pytest.Subtests) -> None:
    command = ("node", str(CLIENT / "conformance.js"))
    async with aclosing(check_client(command)) as verdicts:
        async for verdict in verdicts:
            with subtests.test(verdict.scenario):
                assert verdict.failure == ""


async def test_keys_and_values_in_any_script_come_back_as_they_were() -> None:
    async def outcome(task: str, **more: object) -> Any:
        place = {"task": task, "host": server.host, "port": server.port, "bucket": "b"}
        command = ("node", str(CLIENT / "conformance.js"))
        result = await run(command, stdin=json.dumps({**place, **more}).encode())
        assert result.code == 0, result.err
        return json.loads(result.out)

    items = {"ключ": "ü", "鍵": "値", "k": ""}
    async with server_process() as server:
        async with connect(server.url()) as client:
            await client.create_bucket("b", 1)
        sets = [{"operation": "SET", "key": key, "value": items[key]} for key in items]
        published = await outcome("publish", partition_count=1, operations=sets)
        assert [result["status"] for result in published["results"]] == [0, 0, 0]
        found = await outcome("get", partition=0, keys=list(items))
        assert found == {"items": items, "refused": {}}
        options = {"window_bytes": WINDOW_BYTES, "idle_interval_s": 20, "positions": {}}
        streamed = await outcome("consume", partitions=[0], end_seqs={"0": "3"}, **options)
        assert streamed["items"] == items


def test_every_scenario_says_what_it_is_about() -> None:
    assert all(scenario.about for scenario in CLIENT_SCENARIOS.values())


ROUNDS: Final = effort(3, 9)
"""The server is killed in each third one, and connections are cut in the others."""

KEYS: Final = 2 * 100 + 20
"""Two sets of a hundred, which the rounds write in turn, and counters."""
PARTITIONS: Final = 8
WINDOW_BYTES: Final = 64 * 1024
"""The window of the consumers of the stress test."""


@pytest.mark.timeout(400)
async def test_kills_cuts_and_rollbacks(tmp_path: Path) -> None:
    """What the server acknowledged as on disk is there once, and the copy that was followed all the
    while has it; counters were counted once a round."""
    restarted = RestartedServer(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(restarted.serve)
        async with proxy_to("127.0.0.1", restarted.port) as proxy:
            async with connect(proxy.url()) as client:
                await client.create_bucket("b", PARTITIONS)
            command = ("node", str(CLIENT / "stress.js"), "127.0.0.1", str(proxy.port), "b")
            result = await restarted.play(proxy, (*command, str(PARTITIONS), str(ROUNDS)))
        nursery.cancel_scope.cancel()
    assert result["keys"] == KEYS
    assert result["connections"] > ROUNDS // 2
    assert result["rollbacks"] >= ROUNDS // 3


class RestartedServer:
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
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        text, rounds = "", 0
        async for data in process.stdout:
            text += bytes(data).decode()
            while rounds < text.count("round"):
                rounds += 1
                if rounds % 3 == 0:
                    await self._kill_with_unsaved_changes()
                else:
                    proxy.cut()
                await process.stdin.send_all(b"go on\n")
        assert await process.wait() == 0, text
        result: dict[str, int] = json.loads(text.splitlines()[-1])
        return result

    async def _kill_with_unsaved_changes(self) -> None:
        """Kills the server when the consumer has handled changes that are not on disk: it must roll
        back."""
        assert self._server is not None
        storage_pids = children_of(self._server.process.pid)
        async with connect(self._server.url()) as client:
            is_ahead = False
            while not is_ahead:
                for pid in storage_pids:
                    os.kill(pid, signal.SIGSTOP)
                # A consumer that has to read from disk first gets nothing. Then the disk goes on.
                is_ahead = await consumers_get_ahead(client)
                if not is_ahead:
                    for pid in storage_pids:
                        os.kill(pid, signal.SIGCONT)
        self._server.kill()
        for pid in storage_pids:
            # A stopped process does not notice that its server has gone.
            os.kill(pid, signal.SIGKILL)


async def consumers_get_ahead(client: Client) -> bool:
    """Waits until the consumers have handled something new, for a while."""
    # Beyond a whole window the server sends only what a consumer makes room for.
    enough_bytes = await streamed_bytes(client) + 2 * WINDOW_BYTES
    for _ in range(40):
        await trio.sleep(0.05)
        if await streamed_bytes(client) >= enough_bytes:
            return True
    return False


async def streamed_bytes(client: Client) -> int:
    """What the server has sent over the connections that stream."""
    connections = (await client.stats())["connections"]
    return sum(figures["bytes_out"] for figures in connections if figures["streams"])
