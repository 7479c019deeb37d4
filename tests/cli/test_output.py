from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from upr_protocol.cli.output import Output, ProgressDisplay, rate_text

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    read, write = os.pipe()
    with open(read, "rb", 0) as reader, open(write, "wb", 0) as writer:
        yield reader.fileno(), writer.fileno()


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 1_000_000])
async def test_everything_written_arrives(tmp_path: Path, size: int) -> None:
    path = tmp_path / "out"
    data = os.urandom(size)
    with path.open("wb") as file:
        await Output(file.fileno()).write(data)
    assert path.read_bytes() == data


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_slow_reader_does_not_block_other_tasks(pipe: Pipe, blocking: bool) -> None:
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    data = os.urandom(1_000_000)
    received = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Output(writer).write, data)
        await trio.testing.wait_all_tasks_blocked()
        while len(received) < len(data):
            received += await trio.to_thread.run_sync(os.read, reader, 10_000)
    assert received == data


async def test_a_short_write_to_a_full_pipe_does_not_block_other_tasks(
    pipe: Pipe,
) -> None:
    reader, writer = pipe
    output = Output(writer)
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, bytes(4096))
        except BlockingIOError:
            break
    async with trio.open_nursery() as nursery:
        nursery.start_soon(output.write, b"end")
        await trio.testing.wait_all_tasks_blocked()
        os.read(reader, 8192)
    data = b""
    while not data.endswith(b"end"):
        data = os.read(reader, 1_000_000)


async def test_a_closed_reader_is_a_broken_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        await Output(writer).write(b"x")
    with pytest.raises(BrokenPipeError):
        await Output(writer).wait_until_closed()
    os.close(writer)


async def test_watching_continues_while_somebody_reads(pipe: Pipe, autojump_clock: object) -> None:
    with trio.move_on_after(60) as scope:
        await Output(pipe[1]).wait_until_closed()
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("before", "after"), [(b"", b""), (b"whole\n", b"whole\n"), (b"cut", b"cut\n")]
)
@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_half_a_line_at_the_end_of_a_file_is_ended(
    tmp_path: Path, mode: str, before: bytes, after: bytes
) -> None:
    path = tmp_path / "out"
    path.write_bytes(before)
    with path.open(mode) as file:
        file.seek(0, os.SEEK_END)
        Output(file.fileno()).end_line()
    assert path.read_bytes() == after


def test_a_pipe_gets_no_newline(pipe: Pipe) -> None:
    Output(pipe[1]).end_line()
    os.set_blocking(pipe[0], False)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)


async def shown_for(progress: ProgressDisplay, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await progress.run()
    progress.clear()


async def test_progress_in_a_log_is_a_line_now_and_then(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = iter(["one", "two", "three"])
    await shown_for(ProgressDisplay(lambda: next(texts), interval_s=5.0), 11.0)
    assert capsys.readouterr().err == "one\ntwo\n"


async def test_progress_on_a_terminal_overwrites_itself_and_is_cleared(
    autojump_clock: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    texts = iter(["longer", "short"])
    await shown_for(ProgressDisplay(lambda: next(texts)), 0.5)
    assert capsys.readouterr().err == "\rlonger\rshort \r     \r"


def test_rates_are_written_per_second() -> None:
    assert rate_text(120_000, 2.0) == "60,000/s"
    assert rate_text(0, 0.0) == "0/s"
