"""A consumer of programs that block, which undoes just what the server does not have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.kit.consuming import fill_one_partition
from tests.kit.forked import in_forked_process
from tests.kit.mirror import Mirror
from tests.kit.threaded import ThreadedFake, trio_thread
from upr_protocol.client import (
    Address,
    BarrierReached,
    BlockingRollbackConsumer,
    ChunkReceived,
    DamagedFileError,
    Event,
    SnapshotEnd,
    Undone,
)
from upr_protocol.client.blocking.trio_thread import TrioThread
from upr_protocol.errors import ClosedError
from upr_protocol.failover import Position
from upr_protocol.ids import PartitionId

URL = "upr://fake/b"


@pytest.fixture
def fake() -> Iterator[ThreadedFake]:
    with trio_thread() as thread:
        fake = ThreadedFake(thread)
        thread.call(lambda: fill_one_partition(fake.server, 10, b"old"))
        yield fake


def consumer(fake: ThreadedFake, folder: Path, **more: Any) -> BlockingRollbackConsumer:
    async def dial(address: Address) -> trio.abc.Stream:
        connection = await trio.to_thread.run_sync(fake.dial, address, 1.0)
        connection.setblocking(False)
        return trio.SocketStream(trio.socket.from_stdlib_socket(connection))

    return BlockingRollbackConsumer(
        URL, folder / "received-keys", resume=folder / "resume", dial=dial, **more
    )


def until(stream: BlockingRollbackConsumer, cookie: bytes) -> list[Event | Undone]:
    """The events until a barrier has come back."""
    stream.barrier(cookie)
    events: list[Event | Undone] = []
    for event in stream:
        if isinstance(event, BarrierReached) and event.cookie == cookie:
            return events
        events.append(event)
    raise AssertionError("the streams ended")


def test_a_blocking_program_undoes_a_rollback_key_by_key(
    fake: ThreadedFake, tmp_path: Path
) -> None:
    with consumer(fake, tmp_path) as stream:
        assert any(isinstance(event, ChunkReceived) for event in until(stream, b"1"))
        fake.thread.call(lambda: fake.server.put(b"3", b"never had"))
        until(stream, b"2")
        fake.thread.call(lambda: fake.server.partitions[0].fail_over(77, 8))
        fake.thread.call(lambda: fake.server.put(b"9", b"new"))
        fake.cut()
        events = until(stream, b"3")
    (undone,) = [event for event in events if isinstance(event, Undone)]
    assert (undone.ceiling, undone.to) == (8, 8)
    values = {key: item and item.value for key, item in undone.documents.items()}
    assert values == {b"3": b"old", b"8": None, b"9": b"new"}
    assert SnapshotEnd in map(type, events)
    with consumer(fake, tmp_path, end="now") as stream:
        assert not [event for event in stream if isinstance(event, ChunkReceived | Undone)]


def test_the_position_is_saved_when_the_context_ends(fake: ThreadedFake, tmp_path: Path) -> None:
    with consumer(fake, tmp_path, end="now") as stream:
        mirror = Mirror()
        for event in stream:
            assert not isinstance(event, Undone)
            mirror.apply(event)
        assert stream.next_event() is None
        state = stream.resume_state
    assert mirror.contents == fake.server.contents()
    assert state.position(PartitionId(0)).highest_received == 10
    fake.thread.call(lambda: fake.server.put(b"more", b"v"))
    with consumer(fake, tmp_path, end="now") as stream:
        chunks = [event.chunk for event in stream if isinstance(event, ChunkReceived)]
    assert [chunk.keys() for chunk in chunks] == [[b"more"]]


def test_ctrl_c_after_an_event_has_arrived_does_not_lose_it(
    fake: ThreadedFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrioThread.run

    def run_and_interrupt(self: TrioThread, *args: Any) -> None:
        run(self, *args)
        raise KeyboardInterrupt

    mirror = Mirror()
    positions_before, positions_after = list[Position](), list[Position]()
    with consumer(fake, tmp_path, end="now") as stream:
        event = None
        while not isinstance(event, SnapshotEnd):
            with monkeypatch.context() as patch:
                patch.setattr(TrioThread, "run", run_and_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    stream.next_event()
            positions_before.append(stream.resume_state.position(PartitionId(0)))
            event = stream.next_event()
            positions_after.append(stream.resume_state.position(PartitionId(0)))
            assert not isinstance(event, Undone | None)
            mirror.apply(event)
    assert mirror.contents == fake.server.contents()
    # What has arrived does not count as processed before the program was given it.
    assert positions_before[1:] == positions_after[:-1]
    assert positions_before != positions_after


def test_waiting_for_an_event_ends_in_time(fake: ThreadedFake, tmp_path: Path) -> None:
    with consumer(fake, tmp_path) as stream:
        until(stream, b"1")
        while stream.next_event(0.05) is not None:
            pass
        fake.thread.call(lambda: fake.server.put(b"late", b"v"))
        assert any(isinstance(event, ChunkReceived) for event in until(stream, b"2"))


def test_a_program_that_does_not_wait_is_given_what_has_come(
    fake: ThreadedFake, tmp_path: Path
) -> None:
    deadline = time.monotonic() + 10
    kinds = set[type]()
    with consumer(fake, tmp_path) as stream:
        while SnapshotEnd not in kinds and time.monotonic() < deadline:
            kinds.add(type(stream.next_event(0)))
    assert {ChunkReceived, SnapshotEnd} <= kinds


def test_errors_are_raised_in_the_program(fake: ThreadedFake, tmp_path: Path) -> None:
    with consumer(fake, tmp_path) as stream:
        until(stream, b"1")
    stream.close()
    for use in (stream.next_event, stream.save, stream.flush_received_keys, stream.__enter__):
        with pytest.raises(ClosedError):
            use()
    keys = tmp_path / "received-keys"
    data = bytearray(keys.read_bytes())
    data[15] ^= 1
    keys.write_bytes(data)
    with pytest.raises(DamagedFileError, match="damaged at byte 0"), consumer(fake, tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_the_files_to_its_parent(
    fake: ThreadedFake, tmp_path: Path
) -> None:
    def leave() -> None:
        with pytest.raises(ClosedError, match="forked"):
            stream.flush_received_keys()
        stream.close()
        assert path.read_bytes() == saved_bytes

    path = tmp_path / "received-keys"
    with consumer(fake, tmp_path, buffer_received_keys=True) as stream:
        saved_bytes = path.read_bytes()
        while not isinstance(next(stream), ChunkReceived):
            pass
        in_forked_process(leave)
        until(stream, b"end")
