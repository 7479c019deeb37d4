"""A consumer of events, killed: its queue goes within its timeout, and it ends with the right
picture when it comes back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import trio

from tests.kit.process import UPR, ServerProcess, environment, eventually, server_process
from upr_protocol.client import Client, connect

TIMEOUT_S: Final = 2
LONG_TIMEOUT_S: Final = 120
"""A process is back by then, also on a slow machine with other work to do."""


class Follower:
    """`upr events` as a process."""

    def __init__(
        self, server: ServerProcess, output: Path, timeout_s: int = LONG_TIMEOUT_S
    ) -> None:
        self._output = output
        self._command = (
            *(*UPR, "events", server.url(), "--json", "--consumer", output.name),
            *("--timeout", str(timeout_s)),
        )

    async def start(self) -> trio.Process:
        self._output.write_bytes(b"")
        with self._output.open("ab") as file:
            return await trio.lowlevel.open_process(
                self._command, stdout=file, stderr=subprocess.DEVNULL, env=environment()
            )

    def lines(self) -> list[dict[str, Any]]:
        whole = self._output.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def told(self, bucket: str, **fields: Any) -> bool:
        return any(
            line.get("bucket") == bucket
            and all(line[name] == value for name, value in fields.items())
            for line in self.lines()
        )


async def figures(client: Client) -> dict[str, Any]:
    event_figures: dict[str, Any] = (await client.stats())["events"]
    return event_figures


async def test_a_consumer_that_is_killed_and_back_in_time_is_told_what_it_missed(
    tmp_path: Path,
) -> None:
    async with server_process() as server, connect(server.url()) as client:
        await client.create_bucket("kept", 2)
        follower = Follower(server, tmp_path / "lines")

        process = await follower.start()
        await eventually(lambda: bool(follower.lines()), "the follower is registered")
        assert follower.lines()[0] == {"event": "everything"}
        async with connect(server.url("kept")) as kept_client:
            await kept_client.set("k", "v")
            await eventually(lambda: follower.told("kept", updates=1), "an update is told")

            process.kill()
            await process.wait()
            await kept_client.set("_design/x", "{}")
            process = await follower.start()
            await eventually(
                lambda: follower.told("kept", designs=["_design/x"]), "what was missed is told"
            )
            assert {"event": "everything"} not in follower.lines()
        process.terminate()
        assert await process.wait() == 143


async def test_a_consumer_that_is_away_for_longer_is_cleared_and_starts_again(
    tmp_path: Path,
) -> None:
    async with server_process() as server, connect(server.url()) as client:
        await client.create_bucket("kept", 2)
        await client.create_bucket("deleted", 2)
        follower = Follower(server, tmp_path / "lines", TIMEOUT_S)
        process = await follower.start()
        await eventually(lambda: bool(follower.lines()), "the follower is registered")
        process.kill()
        await process.wait()
        killed_at = trio.current_time()
        while not (await figures(client))["consumers_cleared"]:
            await trio.sleep(0.05)
            # One look more than the timeout.
            assert trio.current_time() - killed_at < TIMEOUT_S + 5
        await client.delete_bucket("deleted")
        await client.create_bucket("new", 2)
        process = await follower.start()
        await eventually(lambda: bool(follower.lines()), "the follower is registered again")
        assert follower.lines()[0] == {"event": "everything"}
        # Now it looks, and from here on it is told.
        assert [bucket.name for bucket in await client.list_buckets()] == ["kept", "new"]
        await client.delete_bucket("new")
        await eventually(lambda: follower.told("new", deleted=True), "a deletion is told")
        process.terminate()
        assert await process.wait() == 143


async def test_a_server_that_is_killed_has_consumers_look_at_everything(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    async with server_process(data_dir=data_dir) as server:
        async with connect(server.url()) as client:
            await client.create_bucket("b", 2)
        follower = Follower(server, tmp_path / "lines")
        process = await follower.start()
        await eventually(lambda: bool(follower.lines()), "the follower is registered")
        address = f"{server.host}:{server.port}"
        server.kill()
        await server.wait()
    async with server_process(data_dir=data_dir, listen=address) as server:
        await eventually(lambda: len(follower.lines()) > 1, "it is told to look again")
        assert follower.lines()[-1] == {"event": "everything"}
        async with connect(server.url("b")) as client:
            await client.set("k", "v")
        await eventually(lambda: follower.told("b", updates=1), "an update is told")
        process.terminate()
        await process.wait()
