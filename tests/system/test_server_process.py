"""`upr-server` as its operators meet it: how it starts and says so, what it refuses to start with,
how it stops, and what those who are connected see of that.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from click.testing import CliRunner

from tests.kit.effort import effort
from tests.kit.mirror import Mirror, assert_same, server_contents
from tests.kit.peer import Peer, peer
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
from upr_protocol.client import (
    BucketInfo,
    RolledBack,
    StreamEnded,
    connect,
    consume,
    publisher,
)
from upr_protocol.errors import Status, UprError
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, PartitionId
from upr_protocol.wire import Error, Message, StreamEnd
from upr_server.cli import main
from upr_server.runtime import OUT_OF_MEMORY

BUCKET: Final = "planes"
PARTITIONS: Final = 4

NO_NODE_NAME: Final = "no partition map can name this server"

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

SETTINGS: Final = f"""\
identity = "from the file"
quota_bytes = 5000000
shutdown_deadline_s = 1.5

[[buckets]]
name = "{BUCKET}"
partitions = {PARTITIONS}

[[buckets]]
name = "large"
quota_bytes = 7000000
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A file with settings."""
    path = tmp_path / "upr.toml"
    path.write_text(SETTINGS)
    return path


async def upr_server(*args: str, variables: Mapping[str, str] | None = None) -> Finished:
    """Runs `upr-server` to its end."""
    return await run((*UPR_SERVER, *args), variables=variables)


async def fill(server: ServerProcess, items: Mapping[bytes, bytes]) -> None:
    """Writes `items`."""
    async with publisher(server.url(BUCKET)) as sink:
        for key, value in items.items():
            await sink.set(key, value)


def in_every_partition(prefix: str, count: int = 400) -> dict[bytes, bytes]:
    """Items of which each partition gets some."""
    items = {b"%s-%d" % (prefix.encode(), n): b"%s %d" % (prefix.encode(), n) for n in range(count)}
    assert {partition_of(key, PARTITIONS) for key in items} == set(range(PARTITIONS))
    return items


# It starts.


@pytest.mark.parametrize("signal_number", SIGNALS)
async def test_standard_output_has_only_the_address(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    with out.open("wb") as to_out, log.open("wb") as to_log:
        process = await trio.lowlevel.open_process(
            (
                *(*UPR_SERVER, "serve", "--listen", "127.0.0.1:0", "--log-level", "debug"),
                *("--data-dir", str(tmp_path / "data")),
            ),
            stdin=subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_log,
            cwd=ROOT,
            env=environment(),
        )
    try:
        await eventually(
            lambda: b"\n" in out.read_bytes() or process.returncode is not None, "its first line"
        )
        match = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)\n", out.read_text())
        assert match, (out.read_text(), log.read_text())
        async with connect(f"upr://127.0.0.1:{match[1]}/") as client:
            assert await client.list_buckets() == []
            # Without a certificate there is nothing to read again, and it ends nothing.
            process.send_signal(signal.SIGHUP)
            await eventually(
                lambda: "SIGHUP" in log.read_text() or process.returncode is not None,
                "the hangup is noted",
            )
            assert await client.list_buckets() == []
        process.send_signal(signal_number)
        with trio.fail_after(STOP_TIMEOUT_S):
            assert await process.wait() == 0
    finally:
        process.kill()
    assert out.read_text() == match[0]
    assert signal_number.name in log.read_text()
    assert "Traceback" not in log.read_text()


async def test_a_server_whose_kernel_is_not_compiled_says_so() -> None:
    """It installs without a compiler, too, and nothing else tells why it is slow."""
    async with server_process(variables={"UPR_PURE_PYTHON": "1"}) as server:

        def warnings() -> list[dict[str, Any]]:
            return [event for event in server.events() if "kernel" in event]

        await eventually(lambda: len(warnings()) == 1, "it warns")
        (warning,) = warnings()
        assert "install a C compiler" in warning["event"]
        assert warning["level"] == "warning"
        assert warning["kernel"] == "pure Python: UPR_PURE_PYTHON is set"


async def test_an_address_of_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    async with server_process(listen="[::1]:0") as server:
        assert server.host == "::1"
        async with connect(f"upr://[::1]:{server.port}/") as client:
            assert await client.list_buckets() == []


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async with server_process() as server:
        address = f"127.0.0.1:{server.port}"
        result = await upr_server("serve", "--listen", address, "--data-dir", str(tmp_path))
        assert (result.code, result.out) == (1, "")
        assert result.err == (
            f"upr-server: cannot listen on {address}: Address already in use; name another address "
            "with --listen\n"
        )
        async with connect(server.url()) as client:
            assert await client.list_buckets() == []


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        # nobody's, by RFC 5737
        ("192.0.2.1:1", "Cannot assign requested address; name another address with --listen"),
        ("a..b:1", "'a..b' is not a valid host name; name another with --listen"),
    ],
)
async def test_an_address_that_cannot_be_bound_is_an_error(
    listen: str, message: str, tmp_path: Path
) -> None:
    result = await upr_server("serve", "--listen", listen, "--data-dir", str(tmp_path))
    assert (result.code, result.out) == (1, "")
    assert result.err == f"upr-server: cannot listen on {listen}: {message}\n"


# Its settings.


def refused(
    *args: str, message: str, command: str = "serve", variables: Mapping[str, str] | None = None
) -> None:
    """`upr-server` does not start, and says why; in this process, as there are many ways."""
    result = CliRunner().invoke(main, [command, *args], env=variables)
    assert (result.exit_code, result.stdout) == (2, ""), result
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "config"])
def test_settings_that_cannot_be(tmp_path: Path, command: str, subtests: pytest.Subtests) -> None:
    path = tmp_path / "upr.toml"
    for text, message in (
        ("listen =", f"{path} cannot be read: Invalid value (at end of document)"),
        ("listen = 'nowhere'", "listen is 'nowhere'; write HOST:PORT"),
        ("colour = 'red'", "unknown field `colour`"),
        ("quota_bytes = 'much'", "$.quota_bytes"),
        ("[[buckets]]\npartitions = 4", "missing required field `name`"),
        ("[[buckets]]\nname = 'b'\npartitions = 1025", "$.buckets[0].partitions"),
        ("[[buckets]]\nname = 'b'\n[[buckets]]\nname = 'b'", "bucket 'b' is listed twice"),
    ):
        with subtests.test(text):
            path.write_text(text)
            refused("--config", str(path), message=message, command=command)
    for variable, value, message in (
        ("UPR_SERVER_LISTEN", "h:65536", "listen is 'h:65536'; write HOST:PORT"),
        ("UPR_SERVER_LOG_LEVEL", "loud", "'loud' - at `$.log_level`"),
        ("UPR_SERVER_SEND_TIMEOUT_S", "-1", "$.send_timeout_s"),
        ("UPR_SERVER_COLOUR", "red", "the environment variable UPR_SERVER_COLOUR names no setting"),
        ("UPR_SERVER_IDENTITY", "\udcff", "identity must be UTF-8"),
        ("UPR_SERVER_CONFIG", str(tmp_path / "none.toml"), "none.toml cannot be read"),
    ):
        with subtests.test(variable):
            refused(message=message, command=command, variables={variable: value})
    for option, value, message in (
        ("--listen", "nowhere", "listen is 'nowhere'; write HOST:PORT"),
        ("--quota-bytes", "1", "$.quota_bytes"),
        ("--log-format", "prose", "'prose' - at `$.log_format`"),
    ):
        with subtests.test(option):
            refused(option, value, message=message, command=command)


async def test_what_config_prints_reads_back(tmp_path: Path, settings: Path) -> None:
    first = await upr_server(
        "config",
        *("--config", str(settings), "--listen", "[::1]:7"),
        variables={"UPR_SERVER_SEND_TIMEOUT_S": "inf", "UPR_SERVER_LISTEN": "h:1"},
    )
    assert (first.code, first.err) == (0, "")
    for line in (
        'listen = "[::1]:7"',
        'identity = "from the file"',
        "quota_bytes = 5000000",
        "send_timeout_s = inf",
        "shutdown_deadline_s = 1.5",
        f'name = "{BUCKET}"',
        f"partitions = {PARTITIONS}",
    ):
        assert line in first.out.splitlines()
    printed = tmp_path / "printed.toml"
    printed.write_text(first.out)
    assert await upr_server("config", "--config", str(printed)) == first
    assert await upr_server("config", variables={"UPR_SERVER_CONFIG": str(printed)}) == first


async def test_a_server_is_what_its_file_and_environment_say(settings: Path) -> None:
    """The environment overrides the file, and options override both: `listen`, with which
    `server_process` starts every server, is that here."""
    variables = {
        "UPR_SERVER_CONFIG": str(settings),
        "UPR_SERVER_IDENTITY": "from the environment",
        "UPR_SERVER_LISTEN": "192.0.2.1:1",
        "UPR_SERVER_NODE": "environment",
        "UPR_SERVER_QUOTA_BYTES": "6000000",
    }
    async with server_process(variables=variables) as server:
        assert NO_NODE_NAME not in server.log_text
        async with peer(server.host, server.port, greeted=False) as stranger:
            assert (await stranger.greet()).identity == "from the environment"
        async with connect(server.url()) as client:
            await client.create_bucket("later", 1)
            assert {bucket.name: bucket for bucket in await client.list_buckets()} == {
                BUCKET: BucketInfo(BUCKET, PARTITIONS, 6_000_000),
                "large": BucketInfo("large", 64, 7_000_000),
                "later": BucketInfo("later", 1, 6_000_000),
            }
        await fill(server, {b"key": b"value"})
    # Where a shell or a service manager allows few files, it takes as many as the system does.
    program = ("sh", "-c", 'ulimit -Sn 256 && exec "$@"', "sh", *UPR_SERVER)
    async with (
        server_process("--config", str(settings), program=program) as server,
        peer(server.host, server.port, greeted=False) as stranger,
    ):
        assert (await stranger.greet()).identity == "from the file"
        await eventually(lambda: NO_NODE_NAME in server.log_text, "it warns")
        if sys.platform == "linux":
            _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
            limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
            assert limits == (files_max, files_max)


async def test_a_python_that_keeps_ended_frames_is_warned_of() -> None:
    """As if this were one."""
    code = "from upr_server.cli import main, serve; serve.keeps_ended_frames = lambda: True; main()"
    async with server_process(program=(sys.executable, "-c", code)) as server:
        await eventually(lambda: "keeps ended calls" in server.log_text, "it warns")


# It stops.


async def hear_the_end(listener: Peer) -> list[Message]:
    """Everything that comes until the connection is closed."""
    messages = []
    while (message := await listener.receive()) is not None:
        messages.append(message)
    return messages


def assert_shut_down(messages: list[Message], streams: int) -> None:
    """Every stream ended with the reason, and then the conversation."""
    ends = [message for message in messages if isinstance(message, StreamEnd)]
    assert [end.status for end in ends] == [Status.SHUTTING_DOWN] * streams
    assert {end.partition for end in ends} == set(range(streams))
    last = messages[-1]
    assert isinstance(last, Error)
    assert last.status == Status.SHUTTING_DOWN


@pytest.mark.parametrize("signal_number", effort(SIGNALS[:1], SIGNALS))
async def test_stopped_it_ends_streams_with_the_reason(
    settings: Path, signal_number: signal.Signals
) -> None:
    async with server_process("--config", str(settings)) as server:
        await fill(server, in_every_partition("item"))
        async with (
            peer(server.host, server.port, BUCKET) as streaming,
            peer(server.host, server.port, BUCKET) as idle,
        ):
            await streaming.stream_all()
            server.process.send_signal(signal_number)
            messages: dict[Peer, list[Message]] = {}

            async def hear(listener: Peer) -> None:
                messages[listener] = await hear_the_end(listener)
                await listener.stream.aclose()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(hear, streaming)
                nursery.start_soon(hear, idle)
            assert_shut_down(messages[streaming], PARTITIONS)
            assert_shut_down(messages[idle], 0)
            assert await server.wait() == 0
        names = [event["event"] for event in server.events()]
        assert "stopping" in names
        assert names[-1] == "stopped"


async def take_nothing(server: ServerProcess, bad: Peer) -> None:
    """Has the server send `bad` more than any socket's buffers hold, and waits until it can send no
    more."""
    value = bytes(1_000_000)
    async with connect(server.url()) as client:
        await client.create_bucket("heavy", 1)
        async with publisher(server.url("heavy")) as sink:
            for n in range(60):
                await sink.set(b"key-%d" % n, value)
        await bad.greet("test:glutton", window_bytes=0xFFFF_FFFF)
        await bad.open("heavy")
        await bad.stream_all()
        sent_bytes = 0
        with trio.fail_after(60):
            while True:
                await trio.sleep(0.2)
                connections = (await client.stats())["connections"]
                before = sent_bytes
                sent_bytes = next(
                    c["bytes_out"] for c in connections if c["identity"] == "test:glutton"
                )
                if 0 < sent_bytes == before:
                    break


@pytest.mark.skipif(sys.platform != "linux", reason="buffers elsewhere may hold it all")
@pytest.mark.parametrize("signal_number", effort(SIGNALS[:1], SIGNALS))
async def test_stopped_it_waits_for_a_peer_that_reads_nothing_no_longer_than_its_deadline(
    signal_number: signal.Signals,
) -> None:
    """The peer would be let go after a minute; the deadline is a second. One that reads hears
    everything meanwhile."""
    deadline_s = 1.0
    variables = {"UPR_SERVER_SHUTDOWN_DEADLINE_S": str(deadline_s)}
    async with (
        server_process(variables=variables) as server,
        peer(server.host, server.port, greeted=False) as bad,
    ):
        await take_nothing(server, bad)
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        async with peer(server.host, server.port, BUCKET) as good:
            await good.stream_all()
            started = trio.current_time()
            assert await server.stop(signal_number) == 0
            took_s = trio.current_time() - started
            assert_shut_down(await hear_the_end(good), PARTITIONS)
        assert deadline_s <= took_s < deadline_s + 20, took_s


async def test_a_second_signal_drops_everybody_at_once() -> None:
    log_line = "mutations in memory are lost"
    variables = {"UPR_SERVER_SHUTDOWN_DEADLINE_S": "inf", "UPR_SERVER_SEND_TIMEOUT_S": "inf"}
    async with (
        server_process(variables=variables, errors=(log_line,)) as server,
        peer(server.host, server.port, greeted=False) as bad,
    ):
        await take_nothing(server, bad)
        server.process.send_signal(signal.SIGTERM)
        await eventually(lambda: bool(server.events("stopping")), "it is stopping")
        # How much of it is on disk by now depends on the machine.
        assert await server.stop(signal.SIGINT) in (0, 3)
        assert server.events("stopped")


async def test_a_second_signal_with_unsaved_data_says_so_by_its_exit_code() -> None:
    log_line = "mutations in memory are lost"
    async with server_process(errors=(log_line,)) as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        # The disk hangs: what comes now stays in memory.
        for pid in children_of(server.process.pid):
            os.kill(pid, signal.SIGSTOP)
        await fill(server, in_every_partition("item"))
        server.process.send_signal(signal.SIGTERM)
        await eventually(lambda: bool(server.events("stopping")), "it is stopping")
        server.process.send_signal(signal.SIGTERM)
        await eventually(lambda: bool(server.events("stopping at once")), "it is in a hurry")
        for pid in children_of(server.process.pid):
            os.kill(pid, signal.SIGCONT)
        assert await server.wait() == 3
        (event,) = server.events(log_line)
        assert event["mutations"] == {BUCKET: 400}
        assert "data that was only in memory is lost" in server.log_text


async def test_a_server_whose_first_line_cannot_be_written_serves_all_the_same(
    tmp_path: Path,
) -> None:
    """The disk with the file of its standard output is full."""
    serve = ("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    log_path = tmp_path / "log"
    with log_path.open("wb") as log:
        process = await trio.lowlevel.open_process(
            ("sh", "-c", 'exec "$@" > /dev/full', "sh", *UPR_SERVER, *serve),
            stderr=log,
            cwd=ROOT,
            env=environment(),
        )
    try:
        await eventually(lambda: "listening" in log_path.read_text(), "it listens")
        process.terminate()
        assert await process.wait() == 0
    finally:
        process.kill()
    assert "Traceback" not in log_path.read_text()


async def test_a_server_without_standard_error_serves_all_the_same(tmp_path: Path) -> None:
    """Its log must not go to what has the number of standard error then, as a file of a bucket."""
    serve = ("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    process = await trio.lowlevel.open_process(
        ("sh", "-c", 'exec "$@" 2>&-', "sh", *UPR_SERVER, *serve),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    async with process.stdout:
        try:
            assert (await process.stdout.receive_some()).startswith(b"listening on ")
            assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull
            process.terminate()
            assert await process.wait() == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    "limit", effort(["-n 15", "-v 100000"], ["-n 12", "-n 15", "-v 100000", "-v 250000"])
)
async def test_a_start_without_what_it_needs_is_one_sentence(limit: str, tmp_path: Path) -> None:
    serve = ("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    finished = await run(("sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *UPR_SERVER, *serve))
    assert finished.code == 1
    assert finished.out == ""
    assert finished.err.startswith("upr-server: cannot start: ")
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize("limit", [0, 1000])
async def test_a_start_with_too_low_a_limit_of_file_sizes_names_the_limit(
    limit: int, tmp_path: Path
) -> None:
    """The advice was to give the user write permission, or to look at all limits."""
    serve = ("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    finished = await run(("sh", "-c", f'ulimit -f {limit} && exec "$@"', "sh", *UPR_SERVER, *serve))
    assert (finished.code, finished.out) == (1, "")
    assert finished.err.endswith("raise the limit of a file's size (`ulimit -f unlimited`)\n")
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    ["from upr_server.entry import upr_server", "from upr_server.indexer.command import main"],
)
async def test_a_start_without_threads_is_one_sentence(command: str, tmp_path: Path) -> None:
    # How little memory there must be depends on the machine, so no thread can start at all.
    code = (
        "import threading\n"
        'def refuse(*_, **__): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = refuse\n"
        f"{command}\n"
        f"{command.rpartition(' ')[2]}()\n"
    )
    options = ("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    argument = "upr://127.0.0.1:1/b" if "indexer" in command else "serve"
    finished = await run((sys.executable, "-c", code, argument, *options))
    assert (finished.code, finished.out) == (1, "")
    assert "ended: the system gives it no more threads" in finished.err
    assert finished.err.count("\n") == 1


WITHOUT_MEMORY: Final = """
from upr_server.buckets.upkeep import Upkeep
from upr_server.entry import upr_server

async def run_freeing(upkeep):
    await upkeep._relief_wanted.wait()
    raise MemoryError

Upkeep.run_freeing = run_freeing
upr_server()
"""
"""A server that gets no more memory as soon as something was put on disk."""


async def test_a_server_without_memory_ends_with_a_sentence(tmp_path: Path) -> None:
    data = tmp_path / "data"
    program = (sys.executable, "-c", WITHOUT_MEMORY)
    errors = ["the server has to stop"]
    async with server_process(data_dir=data, program=program, errors=errors) as server:
        with suppress(UprError):
            async with connect(server.url()) as client:
                await client.create_bucket("b", 1)
            async with connect(server.url("b")) as client:
                await client.set("key", "value", durability=Durability.PERSISTED)
        assert await server.wait() == 1
        # The thread that writes the log may have its last lines still to write.
        (message,) = [line for line in server.log_text.splitlines() if line.startswith("upr-")]
        assert message == f"upr-server: {OUT_OF_MEMORY}"
        assert "Traceback" not in server.log_text
    async with server_process(data_dir=data) as server, connect(server.url("b")) as client:
        item = await client.get("key")
        assert item is not None


@pytest.mark.parametrize("process", ["server", "writer"])
async def test_a_crash_in_c_tells_its_place(process: str, tmp_path: Path) -> None:
    """As an operator starts it: with nothing in the environment that has Python tell."""
    log_path = tmp_path / "log"
    command = (
        *UPR_SERVER,
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        str(tmp_path / "data"),
    )
    variables = {**environment(), "PYTHONFAULTHANDLER": ""}
    with log_path.open("wb") as log:
        server = await trio.lowlevel.open_process(
            command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=variables
        )
    assert server.stdout is not None
    async with server.stdout:
        with trio.fail_after(STOP_TIMEOUT_S):
            assert (await server.stdout.receive_some()).startswith(b"listening on")
            crashing = server.pid if process == "server" else min(children_of(server.pid))
            os.kill(crashing, signal.SIGSEGV)
            assert await server.wait() == (-signal.SIGSEGV if process == "server" else 1)
    assert "Fatal Python error: Segmentation fault" in log_path.read_text()


@pytest.mark.parametrize("delay_s", effort([0.1, 0.4], [0.1, 0.2, 0.3, 0.4, 0.6]))
async def test_ctrl_c_during_the_start_ends_it_without_a_traceback(
    delay_s: float, tmp_path: Path
) -> None:
    process = await trio.lowlevel.open_process(
        (*UPR_SERVER, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stderr is not None
    # However far it comes in this time, the end is an orderly one.
    await trio.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    with trio.fail_after(STOP_TIMEOUT_S):
        err = b"".join([data async for data in process.stderr])
        assert await process.wait() in (0, 130)
    assert b"Traceback" not in err


# What consumers see.


async def test_a_bucket_deleted_while_it_is_streamed(settings: Path) -> None:
    async with (
        server_process("--config", str(settings)) as server,
        connect(server.url()) as client,
        consume(server.url(BUCKET)) as consumer,
    ):
        mirror = Mirror()
        written_items = in_every_partition("item")
        await fill(server, written_items)
        while mirror.contents != written_items:
            mirror.apply(await anext(consumer))
        await client.delete_bucket(BUCKET)
        with trio.fail_after(STOP_TIMEOUT_S):
            events = [event async for event in consumer]
        end_events = [event for event in events if isinstance(event, StreamEnded)]
        assert sorted(end_events, key=lambda event: event.partition) == [
            StreamEnded(PartitionId(partition), Status.BUCKET_DELETED)
            for partition in range(PARTITIONS)
        ]
        assert events[-PARTITIONS:] == end_events
        assert BUCKET not in [bucket.name for bucket in await client.list_buckets()]


async def test_killed_and_started_again_it_has_consumers_begin_anew(settings: Path) -> None:
    """A server that holds everything in memory loses it. A consumer that is there all the while
    finds the new one on the same port, goes back to nothing, and ends with what is there now."""
    options = ("--config", str(settings))
    lost_items = in_every_partition("lost")
    new_items = in_every_partition("new", 500) | dict.fromkeys(list(lost_items)[::3], b"again")
    mirror = Mirror()
    rolled_back = []
    async with server_process(*options) as server, consume(server.url(BUCKET)) as consumer:

        async def follow() -> None:
            async for event in consumer:
                if isinstance(event, RolledBack):
                    rolled_back.append((event.partition, event.to))
                mirror.apply(event)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await fill(server, lost_items)
            await consumer.barrier()
            assert_same(mirror.contents, lost_items, PARTITIONS)
            server.kill()
            assert await server.wait() == -signal.SIGKILL
            await eventually(lambda: not consumer.statistics().is_connected, "it noticed")
            assert rolled_back == []
            listen = f"{server.host}:{server.port}"
            async with server_process(*options, listen=listen) as second:
                assert second.port == server.port
                await fill(second, new_items)
                with trio.fail_after(STOP_TIMEOUT_S):
                    await consumer.barrier()
                assert sorted(rolled_back) == [(partition, 0) for partition in range(PARTITIONS)]
                assert_same(mirror.contents, new_items, PARTITIONS)
                async with connect(second.url(BUCKET)) as client:
                    server_items = await server_contents(client, {*lost_items, *new_items})
                assert_same(mirror.contents, server_items, PARTITIONS)
                assert consumer.statistics().connections == 2
                nursery.cancel_scope.cancel()
