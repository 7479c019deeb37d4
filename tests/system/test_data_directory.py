"""`upr-server` and the directory it is given: those it refuses, disks that fill up, stores whose
processes die, and what the next start finds.

Whatever is refused is refused in one sentence, and nothing in the directory is changed.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import msgspec
import pytest
import trio

from tests.kit.effort import effort
from tests.kit.mirror import Mirror, assert_same, server_contents
from tests.kit.process import (
    ROOT,
    STOP_TIMEOUT_S,
    UPR_SERVER,
    Finished,
    ServerProcess,
    children_of,
    environment,
    eventually,
    run,
    server_process,
)
from upr_protocol.client import Client, RolledBack, connect, consume, publisher
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import Durability

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it mounts, and looks into /proc")

BUCKET: Final = "planes"
PARTITIONS: Final = 2
DAMAGED_BUCKET: Final = "damaged bucket; the others are served; run upr-server check"
ITEMS: Final = {b"key-%d" % index: b"%d " % index * 150 for index in range(1500)}

MB: Final = 1024 * 1024
RESERVE_MB: Final = 64
"""What the store leaves for compaction."""

LARGE_BYTES: Final = 64 * 1024
NOBODY: Final = 65534

PERSISTED: Final = Durability.PERSISTED


async def serve_there(
    path: Path, *, program: Sequence[str] = UPR_SERVER, **variables: str
) -> Finished:
    """Runs a server that is expected not to start."""
    options = ("--listen", "127.0.0.1:0", "--log-level", "error", "--data-dir", str(path))
    return await run((*program, "serve", *options), variables=variables)


def everything_in(path: Path) -> dict[str, bytes | None]:
    """Every file and its bytes, and every folder; without LMDB's tables of who reads."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        str(file.relative_to(path)): file.read_bytes() if file.is_file() else None
        for file in path.rglob("*")
        if file.name != "lock.mdb"
    }


async def refused(path: Path, message: str, *, program: Sequence[str] = UPR_SERVER) -> None:
    """A server does not start there: it says so in this sentence, and leaves everything as it
    was."""
    before = everything_in(path)
    result = await serve_there(path, program=program)
    assert (result.code, result.out) == (1, ""), result
    assert result.err == f"upr-server: {message}\n"
    assert everything_in(path) == before


async def put_items(server: ServerProcess) -> None:
    """Makes the bucket and writes `ITEMS` to its disk."""
    async with connect(server.url()) as client:
        await client.create_bucket(BUCKET, PARTITIONS)
    await write(server, ITEMS)


async def write(server: ServerProcess, items: Mapping[bytes, bytes], bucket: str = BUCKET) -> None:
    """Writes `items`; they are on disk when this returns."""
    async with publisher(server.url(bucket), durability=PERSISTED) as sink:
        for key, value in items.items():
            await sink.set(key, value)


async def assert_served(
    server: ServerProcess, items: Mapping[bytes, bytes], bucket: str = BUCKET
) -> None:
    """Both a get and a stream give `items`, and nothing else."""
    async with connect(server.url(bucket)) as client:
        assert_same(await server_contents(client, items), items, PARTITIONS)
    mirror = Mirror()
    async with consume(server.url(bucket), end="now") as consumer:
        async for event in consumer:
            mirror.apply(event)
    assert_same(mirror.contents, items, PARTITIONS)


async def histories(server: ServerProcess) -> list[int]:
    """The history of each partition."""
    async with connect(server.url(BUCKET)) as client:
        return [numbers.history_id for numbers in await client.seqnos()]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with `ITEMS` in it, all of them indexed."""
    path = tmp_path_factory.mktemp("original") / "data"

    async def make() -> None:
        async with server_process(data_dir=path) as server:
            await put_items(server)
            async with connect(server.url()) as client:
                unindexed = len(ITEMS)
                while unindexed:
                    await trio.sleep(0.02)
                    unindexed = (await client.stats(BUCKET))["disk"]["unindexed_mutations"]

    trio.run(make)
    return path


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    """A copy of `original`."""
    return Path(shutil.copytree(original, tmp_path / "data"))


# Two servers.


async def test_a_second_server_exits_with_an_error_and_the_first_keeps_serving(
    tmp_path: Path,
) -> None:
    """While the second waits for the directory and gives up, the first takes writes to disk and
    streams them."""
    data = tmp_path / "data"
    async with server_process(data_dir=data) as first:
        await put_items(first)
        mirror = Mirror()
        written_items = dict(ITEMS)
        async with consume(first.url(BUCKET)) as consumer, trio.open_nursery() as nursery:

            async def follow() -> None:
                async for event in consumer:
                    assert not isinstance(event, RolledBack)
                    mirror.apply(event)

            async def go_on() -> None:
                async with publisher(first.url(BUCKET), durability=PERSISTED) as sink:
                    while True:
                        key = b"later-%d" % len(written_items)
                        await sink.set(key, b"value")
                        await sink.flush()
                        written_items[key] = b"value"

            nursery.start_soon(follow)
            nursery.start_soon(go_on)
            result = await serve_there(data)
            nursery.cancel_scope.cancel()
        assert (result.code, result.out) == (1, ""), result
        assert result.err == (
            f"upr-server: {data} is in use by another server; stop it, or choose another "
            "directory with --data-dir\n"
        )
        assert len(written_items) > len(ITEMS) + 10
        assert mirror.contents.items() >= ITEMS.items()
        async with connect(first.url(BUCKET)) as client:
            # One that was under way when it ended may be there.
            await client.set(b"later-%d" % len(written_items), b"value", durability=PERSISTED)
            written_items[b"later-%d" % len(written_items)] = b"value"
        await assert_served(first, written_items)
    async with server_process(data_dir=data) as second:
        await assert_served(second, written_items)


# Mount namespaces: a disk that is full or read-only, for one server and nobody else.


@attrs.frozen
class Namespace:
    """A view of the file system that a few processes share.

    Attributes:
        pid: A process in it.
    """

    pid: int

    @property
    def program(self) -> tuple[str, ...]:
        """`upr-server` in it."""
        return self._enter(*UPR_SERVER)

    def _enter(self, *command: str) -> tuple[str, ...]:
        options = ("--preserve-credentials", "--user", "--mount", f"--wd={ROOT}")
        return ("nsenter", *options, "--target", str(self.pid), *command)

    async def resize(self, disk: Path, megabytes: int) -> None:
        """Gives a tmpfs that is mounted in it another size."""
        result = await run(self._enter("mount", "-o", f"remount,size={megabytes}m", str(disk)))
        assert result.code == 0, result

    def inside(self, path: Path) -> Path:
        """Where this process finds what is at `path` in it."""
        return Path(f"/proc/{self.pid}/root{path}")


@asynccontextmanager
async def namespace(mounts: str = "true") -> AsyncIterator[Namespace]:
    """A namespace after these commands; the test is skipped where there can be none. In it one is
    root, but only of what is one's own."""
    try:
        process = await trio.lowlevel.open_process(
            (
                *("unshare", "--map-root-user", "--mount"),
                *("sh", "-c", f"{mounts} && echo ready && exec sleep infinity"),
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
    except OSError as error:
        pytest.skip(f"there is no unshare: {error}")
    try:
        assert process.stdout is not None
        async with process.stdout:
            if await process.stdout.receive_some() != b"ready\n":
                pytest.skip("this machine allows no namespace with mounts of its own")
            yield Namespace(process.pid)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def write_advice(path: Path, why: str) -> str:
    advice = "give the server's user write permission"
    if why == "Read-only file system":
        advice = "mount its file system for writing"
    return f"{path} cannot be written: {why}; {advice}, or choose another directory with --data-dir"


@pytest.mark.parametrize("state", ["with data", "empty", "missing"])
async def test_a_read_only_disk(data: Path, state: str) -> None:
    disk = data.parent
    path = data if state == "with data" else disk / "other"
    if state == "empty":
        path.mkdir()
    async with namespace(
        f"mount --bind {disk} {disk} && mount -o remount,bind,ro {disk} {disk}"
    ) as mounted:
        why = "Read-only file system"
        await refused(path, write_advice(path, why), program=mounted.program)
    assert path.exists() == (state != "missing")


@pytest.mark.parametrize(
    "part",
    effort(
        [".", "lock", "log/data.mdb"],
        [".", "format", "lock", "buckets", "log", "log/data.mdb", "index/data.mdb"],
    ),
)
async def test_a_directory_of_which_something_belongs_to_another_user(
    data: Path, part: str
) -> None:
    bucket = data / "buckets" / BUCKET
    path = bucket / part if part.startswith(("log", "index")) else data / part
    path.chmod(0o500 if path.is_dir() else 0o400)
    if os.geteuid():
        path.chmod(0)
    else:
        for server_items in (path, *path.rglob("*")):
            os.chown(server_items, NOBODY, NOBODY)
    before = everything_in(data)
    async with namespace() as mounted:
        result = await serve_there(data, program=mounted.program)
    assert (result.code, result.out) == (1, ""), result
    assert result.err.startswith(f"upr-server: {data}")
    assert ": Permission denied; give the server's user " in result.err
    assert result.err.count("\n") == 1
    assert everything_in(data) == before


# Directories that are none, or not ours.


async def test_a_directory_of_another_version(data: Path) -> None:
    (data / "format").write_text("upr 2\n")
    await refused(
        data,
        f"{data} has the format 'upr 2', and this server writes 'upr 1'; use the server that "
        "wrote it, or another directory",
    )


@pytest.mark.parametrize(
    "name", ["letter.txt", "buckets/letter.txt", "buckets/planes/log/data.mdb"]
)
async def test_a_directory_of_somebody_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "documents"
    (path / name).parent.mkdir(parents=True)
    (path / name).write_text("Dear Sir")
    await refused(
        path, f"{path} is not empty and not a data directory; choose another with --data-dir"
    )


@pytest.mark.parametrize("below", ["", "data"])
async def test_a_file_instead_of_a_directory(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("Dear Sir")
    path = file / below
    why = "Not a directory" if below else "File exists"
    result = await serve_there(path)
    assert (result.code, result.out) == (1, ""), result
    assert result.err == f"upr-server: {write_advice(path, why)}\n"
    assert file.read_text() == "Dear Sir"


# Files that were cut.


@pytest.mark.parametrize("part", ["log", "index"])
async def test_a_file_that_was_cut_is_noticed_before_anything_is_written(
    data: Path, original: Path, part: str, subtests: pytest.Subtests
) -> None:
    file = data / "buckets" / BUCKET / part / "data.mdb"
    whole = file.read_bytes()
    assert len(whole) > 20 * 4096
    # More than the last page is cut off: that one may be free again, and then nothing is missing.
    for length in (len(whole) // 3, len(whole) * 2 // 3):
        with subtests.test(length=length):
            file.write_bytes(whole[:length])
            before = everything_in(data / "buckets")
            async with (
                server_process(data_dir=data, errors=(DAMAGED_BUCKET,)) as server,
                connect(server.url()) as client,
            ):
                damage = (await client.stats())["damaged_buckets"][BUCKET]
                assert damage.startswith(f"{file} was cut off: it has {length} bytes, ")
                with pytest.raises(ServerError, match="because it is damaged"):
                    await client.stats(BUCKET)
            assert everything_in(data / "buckets") == before
    file.write_bytes(whole[: len(whole) // 3])
    checked = await run((*UPR_SERVER, "check", "--data-dir", str(data)))
    assert (checked.code, checked.out != "") == (1, True), checked
    assert part in checked.out
    # And nothing is wrong with it once it is whole again.
    file.write_bytes(whole)
    assert everything_in(data) == everything_in(original)
    async with server_process(data_dir=data) as server:
        await assert_served(server, ITEMS)


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_deleted_index_is_rebuilt(data: Path, is_there: bool) -> None:
    file = data / "buckets" / BUCKET / "index" / "data.mdb"
    file.unlink()
    if is_there:
        file.touch()
    async with server_process(data_dir=data) as server:
        await assert_served(server, ITEMS)
    result = await run((*UPR_SERVER, "check", "--data-dir", str(data)))
    assert result.code == 0, result


# Buckets that cannot be opened.

OTHER: Final = "other"


def flip_record(bucket: Path) -> None:
    """Flips a bit in the name that the bucket's own record holds, wherever the log has it."""
    file = bucket / "log" / "data.mdb"
    content = bytearray(file.read_bytes())
    name = b"\xa4name" + msgspec.msgpack.encode(bucket.name)
    assert name in content
    file.write_bytes(content.replace(name, name[:-1] + b"r"))


def put_a_file_in_place_of_the_index(bucket: Path) -> None:
    shutil.rmtree(bucket / "index")
    (bucket / "index").touch()


DAMAGES: Final[Mapping[str, Callable[[Path], None]]] = {
    "no log": lambda bucket: (bucket / "log" / "data.mdb").unlink(),
    "an empty log": lambda bucket: os.truncate(bucket / "log" / "data.mdb", 0),
    "a log of one byte": lambda bucket: os.truncate(bucket / "log" / "data.mdb", 1),
    "an index of one byte": lambda bucket: os.truncate(bucket / "index" / "data.mdb", 1),
    "a file in place of the index": put_a_file_in_place_of_the_index,
    "a record": flip_record,
}


async def test_buckets_that_cannot_be_opened_are_refused_and_the_others_are_served(
    data: Path, subtests: pytest.Subtests
) -> None:
    """One for each damage, at one server."""
    names = {damage: f"damaged-{number}" for number, damage in enumerate(DAMAGES)}
    async with server_process(data_dir=data) as server, connect(server.url()) as client:
        for name in names.values():
            await client.create_bucket(name, PARTITIONS)
            await write(server, ITEMS, name)
    folders = {damage: data / "buckets" / name for damage, name in names.items()}
    for damage, folder in folders.items():
        DAMAGES[damage](folder)
    before = {damage: everything_in(folder) for damage, folder in folders.items()}
    configured = data.parent / "configured.toml"
    configured.write_text("".join(f'[[buckets]]\nname = "{name}"\n' for name in names.values()))
    started = server_process("--config", str(configured), data_dir=data, errors=(DAMAGED_BUCKET,))
    async with started as server, connect(server.url()) as client:
        events = await server.logged(DAMAGED_BUCKET, len(DAMAGES))
        reported = {event["bucket"]: event["damage"] for event in events}
        assert len(events) == len(reported)
        assert (await client.stats())["damaged_buckets"] == reported
        assert reported.keys() == set(names.values())
        for damage, name in names.items():
            with subtests.test(damage):
                await assert_refused(server, client, name)
        await client.create_bucket(OTHER, PARTITIONS)
        await write(server, ITEMS, OTHER)
        await assert_served(server, ITEMS, OTHER)
        await assert_served(server, ITEMS)
        for damage, name in names.items():
            with subtests.test(damage):
                assert everything_in(folders[damage]) == before[damage]
                # A user who has another copy may delete this one.
                await client.delete_bucket(name)
                assert not folders[damage].exists()
                await client.create_bucket(name, PARTITIONS)
                await write(server, ITEMS, name)
                await assert_served(server, ITEMS, name)


async def assert_refused(server: ServerProcess, client: Client, bucket: str) -> None:
    """Every use of a damaged bucket is refused, and says why."""
    for refused_call in (
        lambda: client.create_bucket(bucket, PARTITIONS),
        lambda: client.stats(bucket),
    ):
        with pytest.raises(ServerError, match="because it is damaged") as refusal:
            await refused_call()
        assert refusal.value.status is Status.DAMAGED
    with pytest.raises(ServerError, match="because it is damaged") as refusal:
        async with connect(server.url(bucket)):
            pass
    assert refusal.value.status is Status.DAMAGED


# Disks that are full.


def large(prefix: str, megabytes: int) -> dict[bytes, bytes]:
    """Items that come to so much, each half of noise, which nothing makes smaller."""
    count = megabytes * MB // LARGE_BYTES
    return {b"%s-%d" % (prefix.encode(), n): os.urandom(LARGE_BYTES) for n in range(count)}


async def fill_up(client: Client, prefix: str) -> tuple[dict[bytes, bytes], str]:
    """Writes until the server says that the disk is full; gives what it acknowledged, and what it
    said."""
    written_items: dict[bytes, bytes] = {}
    for key, value in large(prefix, 200).items():
        try:
            await client.set(key, value, durability=PERSISTED)
        except ServerError as error:
            if error.status is not Status.TEMPORARY_FAILURE:
                raise
            return written_items, error.sentence
        written_items[key] = value
    raise AssertionError("the disk is never full")


FULL: Final = "disk full"
LOST: Final = "mutations in memory are lost"


@pytest.mark.parametrize(
    "way", effort(["the disk grows"], ["a file goes", "a bucket goes", "the disk grows"])
)
async def test_a_full_disk_refuses_writes_and_serves_reads_until_it_has_room(
    tmp_path: Path, way: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    async with namespace(f"mount -t tmpfs -o size={RESERVE_MB + 32}m tmpfs {disk}") as mounted:
        data = disk / "data"
        ballast = mounted.inside(disk / "ballast")
        async with server_process(data_dir=data, program=mounted.program, errors=[FULL]) as server:
            await put_items(server)
            written_items = dict(ITEMS)
            if way != "a bucket goes":
                ballast.write_bytes(bytes(20 * MB))
            else:
                async with connect(server.url()) as client:
                    await client.create_bucket("ballast", 1)
                await write(server, large("ballast", 20), "ballast")
            async with consume(server.url(BUCKET)) as consumer, trio.open_nursery() as nursery:
                mirror = Mirror()

                async def follow() -> None:
                    async for event in consumer:
                        mirror.apply(event)

                nursery.start_soon(follow)
                async with connect(server.url(BUCKET)) as client:
                    acknowledged, message = await fill_up(client, "full")
                    assert len(acknowledged) > 10
                    written_items |= acknowledged
                    refusal = "the run was taken in, but cannot be put on disk now"
                    assert message == refusal or "bytes left" in message
                    # From now on nothing is taken in, at whatever level, and the reason is told.
                    for level in Durability.MEMORY, PERSISTED:
                        with pytest.raises(ServerError, match="bytes left") as refused_write:
                            await client.set(b"no", b"room", durability=level)
                        assert refused_write.value.status is Status.TEMPORARY_FAILURE
                    assert "bytes left" in (await client.stats(BUCKET))["flusher"]["full"]
                    assert await client.get(b"no") is None
                    # Reads and streams go on.
                    server_items = await server_contents(client, written_items)
                    assert_same(server_items, written_items, PARTITIONS)
                    await consumer.barrier()
                    assert mirror.contents.items() >= written_items.items()
                    # A publisher waits, and goes on by itself when there is room.
                    wait_event = trio.Event()

                    async def publish() -> None:
                        await write(server, {b"later": b"value"})
                        wait_event.set()

                    nursery.start_soon(publish)
                    await trio.sleep(0.5)
                    assert not wait_event.is_set()
                    if way == "a file goes":
                        ballast.unlink()
                    elif way == "the disk grows":
                        # The files outgrow what the disk could hold at the start.
                        await mounted.resize(disk, 3 * RESERVE_MB + 200)
                        more = large("more", RESERVE_MB + 64)
                        await write(server, more)
                        written_items |= more
                    else:
                        await client.delete_bucket("ballast")
                    with trio.fail_after(STOP_TIMEOUT_S):
                        await wait_event.wait()
                    assert (await client.stats(BUCKET))["flusher"]["full"] == ""
                    await client.set(b"again", b"value", durability=PERSISTED)
                    await consumer.barrier()
                    # What was taken in and could not be promised is on disk now, too.
                    written_items |= {b"later": b"value", b"again": b"value"}
                    for key in mirror.contents.keys() - written_items.keys():
                        assert key == b"full-%d" % len(acknowledged)
                    server_items = await server_contents(client, mirror.contents)
                    assert_same(mirror.contents, server_items, PARTITIONS)
                    written_items = server_items
                nursery.cancel_scope.cancel()
            for name in (FULL, "disk has space again"):
                assert len(await server.logged(name)) == 1
            before = await histories(server)
        async with server_process(data_dir=data, program=mounted.program) as server:
            await assert_served(server, written_items)
            assert await histories(server) == before


async def test_a_limit_of_the_configuration_is_a_full_disk(data: Path) -> None:
    def limit(more_mb: int) -> dict[str, str]:
        return {"UPR_SERVER_DISK_BYTES_MAX": str((RESERVE_MB + more_mb) * MB)}

    async with server_process(data_dir=data, variables=limit(6), errors=[FULL]) as server:
        async with connect(server.url(BUCKET)) as client:
            acknowledged, _ = await fill_up(client, "full")
            expected = {**ITEMS, **acknowledged}
            assert_same(await server_contents(client, expected), expected, PARTITIONS)
        server.kill()
        await server.wait()
    async with server_process(data_dir=data, variables=limit(20)) as server:
        async with connect(server.url(BUCKET)) as client:
            assert_same(await server_contents(client, expected), expected, PARTITIONS)
        await write(server, {b"again": b"value"})


async def test_a_limit_of_file_sizes_is_a_full_disk_until_it_is_raised(data: Path) -> None:
    def limit(server: ServerProcess, nbytes: int) -> None:
        for pid in server.process.pid, *children_of(server.process.pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    async with server_process(data_dir=data, errors=[FULL]) as server:
        limit(server, (RESERVE_MB + 6) * MB)
        async with connect(server.url(BUCKET)) as client:
            acknowledged, _ = await fill_up(client, "full")
            expected = {**ITEMS, **acknowledged}
            assert_same(await server_contents(client, expected), expected, PARTITIONS)
            (event, *_) = await server.logged(FULL)
            assert "(ulimit -f)" in event["error"]
            assert f"`prlimit --fsize=unlimited --pid {worker(server, 'writer')}`" in event["error"]
            limit(server, resource.RLIM_INFINITY)
        await write(server, {b"again": b"value"})
    async with server_process(data_dir=data) as server, connect(server.url(BUCKET)) as client:
        assert_same(await server_contents(client, expected), expected, PARTITIONS)


async def test_stopped_and_started_on_a_disk_without_room(data: Path, tmp_path: Path) -> None:
    """What was acknowledged as persisted is there afterwards; what was not may be gone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    async with namespace(f"mount -t tmpfs -o size={RESERVE_MB + 24}m tmpfs {disk}") as mounted:
        there = disk / "data"
        shutil.copytree(data, mounted.inside(there))
        ballast, rest_path = mounted.inside(disk / "ballast"), mounted.inside(disk / "rest")
        ballast.write_bytes(bytes(12 * MB))
        async with server_process(
            data_dir=there, program=mounted.program, errors=[FULL, LOST]
        ) as server:
            async with connect(server.url(BUCKET)) as client:
                acknowledged, _ = await fill_up(client, "full")
            # Not even a page is left, and nothing for a clean stop.
            with pytest.raises(OSError, match="No space left"):
                rest_path.write_bytes(bytes(200 * MB))
            server.process.send_signal(signal.SIGTERM)
            assert await server.wait() == 3
            (message,) = [line for line in server.log_text.splitlines() if line.startswith("upr-")]
            assert "stopped on a full disk" in message
            assert "bytes left" in message
            assert "data that was only in memory is lost" in message
            # The batch that the full disk refused was taken in, and so it is what is lost.
            (loss,) = server.events(LOST)
            assert loss["mutations"] == {BUCKET: 1}
            assert "Traceback" not in server.log_text
        expected = {**ITEMS, **acknowledged}
        async with server_process(data_dir=there, program=mounted.program, errors=[FULL]) as server:
            mirror = Mirror()
            async with consume(server.url(BUCKET), end="now") as consumer:
                async for event in consumer:
                    mirror.apply(event)
            assert mirror.contents.items() >= expected.items()
            ballast.unlink()
            rest_path.unlink()
            with trio.fail_after(STOP_TIMEOUT_S):
                await write(server, {b"later": b"value"})
            await assert_served(server, {**mirror.contents, b"later": b"value"})


# Processes that die.


def worker(server: ServerProcess, role: str) -> int:
    """The process for the disk with this role."""
    (worker,) = [
        pid
        for pid in children_of(server.process.pid)
        if role in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]
    return worker


@pytest.mark.parametrize("role", ["writer", "reader"])
async def test_a_process_of_the_store_that_is_killed_ends_the_server(
    tmp_path: Path, role: str
) -> None:
    """Under load. What was acknowledged as persisted is there at the next start."""
    data = tmp_path / "data"
    acknowledged: dict[bytes, bytes] = {}
    # That the bucket was made may be on its way to the event bus's store.
    errors = ("events wait: their store cannot be written", "the server has to stop")
    async with server_process(data_dir=data, errors=errors) as server:
        await put_items(server)
        before = await histories(server)

        async def load(load: int) -> None:
            try:
                async with connect(server.url(BUCKET)) as client:
                    while True:
                        key = b"load-%d-%d" % (load, len(acknowledged))
                        await client.set(key, key, durability=PERSISTED)
                        acknowledged[key] = key
            except (UprError, OSError):
                pass

        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(load, index)
            await eventually(lambda: len(acknowledged) > 100, "some writes")
            os.kill(worker(server, role), signal.SIGKILL)
            assert await server.wait() == 1
        (message,) = [line for line in server.log_text.splitlines() if line.startswith("upr-")]
        sentence = "was killed by SIGKILL; the system's log may say why; start the server again"
        assert message == f"upr-server: the store's {role} process {sentence}"
        assert "Traceback" not in server.log_text
    async with server_process(data_dir=data) as server:
        async with connect(server.url(BUCKET)) as client:
            expected = {**ITEMS, **acknowledged}
            assert_same(await server_contents(client, expected), expected, PARTITIONS)
        assert not set(before) & set(await histories(server))


async def test_a_clean_stop_keeps_the_history_and_a_crash_begins_another(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with server_process(data_dir=data) as server:
        await put_items(server)
        first = await histories(server)
        assert await server.stop(signal.SIGTERM) == 0
    async with server_process(data_dir=data) as server:
        assert await histories(server) == first
        await assert_served(server, ITEMS)
        (recovered,) = await server.logged("bucket recovered")
        assert recovered["after"] == "a clean stop"
        server.kill()
        assert await server.wait() == -signal.SIGKILL
    async with server_process(data_dir=data) as server:
        second = await histories(server)
        assert not set(first) & set(second)
        await assert_served(server, ITEMS)
        (recovered,) = await server.logged("bucket recovered")
        assert recovered["after"] == "an unclean stop: new histories"
        assert await server.stop(signal.SIGTERM) == 0
    async with server_process(data_dir=data) as server:
        assert await histories(server) == second
