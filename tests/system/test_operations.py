"""Procedures of docs/operations.md work as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from tests.kit import commands
from tests.kit.documents import fenced_code
from tests.kit.process import ROOT, UPR, UPR_SERVER, run, server_process
from upr_protocol.failover import StartReason

OPERATIONS: Final = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


async def upr(*arguments: str, stdin: bytes = b"") -> str:
    finished = await commands.upr(*arguments, stdin=stdin)
    assert finished.code == 0, finished
    return finished.out


async def tail(*arguments: str) -> None:
    """Runs `upr tail` until it has caught up, in a process, as it listens for signals."""
    finished = await run((*UPR, "tail", *arguments, "--until", "caught-up"))
    assert finished.code == 0, finished


async def upr_server(*arguments: str) -> str:
    finished = await run((*UPR_SERVER, *arguments))
    assert finished.code == 0, finished
    return finished.out


async def test_a_bucket_is_replaced_by_its_dump(tmp_path: Path) -> None:
    section = OPERATIONS.partition("### Load a dump")[2].partition("\n## ")[0]
    (program,) = fenced_code(section, "python")
    (tmp_path / "load_dump.py").write_text(program)
    data = tmp_path / "data"

    async with server_process(data_dir=data) as server:
        url = server.url("planes")
        await upr("bucket", "create", url, "--partitions", "4")
        await upr("set", url, "text", "one")
        await upr("set", url, "gone", "two")
        await upr("set", url, "bytes", "-", "--flags", "7", "--expire-in", "3600", stdin=b"\xff\0")
        await upr("delete", url, "gone")
        before = json.loads(await upr("get", url, "bytes", "--json"))

    dump = await upr_server("dump", "--data-dir", str(data), "--bucket", "planes")
    (data / "buckets" / "planes").rename(tmp_path / "planes.old")
    async with server_process(data_dir=data) as server:
        url = server.url("planes")
        await upr("bucket", "create", url, "--partitions", "2")
        command = (sys.executable, str(tmp_path / "load_dump.py"), url)
        assert (await run(command, stdin=dump.encode())).code == 0
        after = json.loads(await upr("get", url, "bytes", "--json"))
        assert await upr("get", url, "text") == "one\n"
        assert (await commands.upr("get", url, "gone")).code != 0
    for field in ("value", "value_encoding", "flags", "expiry"):
        assert after[field] == before[field]


async def test_a_bucket_is_restored_from_a_local_copy(tmp_path: Path) -> None:
    (program,) = fenced_code(OPERATIONS, "python")
    (loop,) = re.findall(r"^    ( +for item in .*?)\n\n", OPERATIONS, re.DOTALL | re.MULTILINE)
    load_loop = program[program.index("        for row in") : program.index("\n\ntrio.run(main)")]
    program = program.replace(load_loop, loop.replace("\n    ", "\n") + "\n")
    program = program.replace("import publisher", "import LocalCopyReader, publisher")
    (tmp_path / "restore_copy.py").write_text(program)
    copy = tmp_path / "copy"

    async with server_process(data_dir=tmp_path / "data") as server:
        url, new_url = server.url("planes"), server.url("new")
        await upr("bucket", "create", url, "--partitions", "4")
        await upr("bucket", "create", new_url, "--partitions", "2")
        await upr("set", url, "gone", "one")
        await upr("set", url, "bytes", "-", "--flags", "7", "--expire-in", "3600", stdin=b"\xff\0")
        await upr("delete", url, "gone")
        await tail(url, "--state", str(copy))
        restore = (sys.executable, str(tmp_path / "restore_copy.py"), new_url, str(copy))
        finished = await run(restore)
        assert finished.code == 0, finished
        before = json.loads(await upr("get", url, "bytes", "--json"))
        after = json.loads(await upr("get", new_url, "bytes", "--json"))
        assert (await commands.upr("get", new_url, "gone")).code != 0
    for field in ("value", "value_encoding", "flags", "expiry"):
        assert after[field] == before[field]


async def test_one_bucket_is_restored_and_consumers_of_the_others_continue(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    async with server_process(data_dir=data) as server:
        for name in ("planes", "others"):
            await upr("bucket", "create", server.url(name), "--partitions", "1")
            await upr("set", server.url(name), "key", "old")
    shutil.copytree(data, backup)
    async with server_process(data_dir=data) as server:
        for name in ("planes", "others"):
            await upr("set", server.url(name), "key", "new")
            await tail(server.url(name), "--resume", str(tmp_path / name))

    await upr_server("restore", "--new-histories", "--data-dir", str(backup))
    (data / "buckets" / "planes").rename(tmp_path / "planes.damaged")
    shutil.copytree(backup / "buckets" / "planes", data / "buckets" / "planes")
    (data / "event-queues").unlink(missing_ok=True)
    async with server_process(data_dir=data) as server:
        assert await upr("get", server.url("planes"), "key") == "old\n"
        assert "rolls back" in await upr("explain", server.url("planes"), str(tmp_path / "planes"))
        assert await upr("get", server.url("others"), "key") == "new\n"
        others = await upr("explain", server.url("others"), str(tmp_path / "others"))
        assert "goes on" in others
        assert StartReason.SAME_HISTORY.value in others
