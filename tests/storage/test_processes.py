"""The store's processes: their deaths, their messages, and the memory that they share."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest
import trio
import trio.testing

from tests.kit.process import ROOT, children_of, environment, eventually, status_of
from tests.storage.log_model import chunk_of, record_of, row
from tests.storage.planes import (
    BUCKET,
    MAP_BYTES,
    PARTITIONS,
    PLENTY,
    create,
    one_row,
    some_write,
)
from upr_protocol.chunk import LARGE_BYTES, Chunk, Mutation
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine import FetchRequest
from upr_server.storage import processes
from upr_server.storage.api import Store
from upr_server.storage.calls import (
    CloseBucket,
    Commit,
    CreateBucketFiles,
    DeleteLeases,
    FindExpired,
    FindItems,
    FindSeqBefore,
    ItemsFound,
    LoadBuckets,
    ReadChunks,
    StoreCall,
)
from upr_server.storage.errors import (
    StoreFailedError,
)
from upr_server.storage.messages import HEAD, STEP_CHUNKS, STEP_ITEMS, Unpacker, pack_message
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.processes import (
    READS_SENT_MAX,
    SEND_BYTES,
    SEND_PARTS,
    SLOT_READ_BYTES_MIN,
    ProcessStore,
    open_store,
    send_in_steps,
)
from upr_server.storage.records import BucketRecord
from upr_server.storage.shared_slots import SLOT_BYTES, SLOTS, SlotPool, make_shared_memory

# Memory that is shared with the process that reads.


@pytest.fixture
async def reading(tmp_path: Path) -> AsyncIterator[tuple[ProcessStore, SlotPool]]:
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        if store._reader.slots is None:
            pytest.skip("no memory without a name")
        yield store, store._reader.slots


async def read_whole(store: Store, through: int) -> list[Chunk]:
    return await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(through), PLENTY))


async def test_a_slot_is_lent_for_as_long_as_a_chunk_of_it_lives(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    write = PartitionWrite(0, record_of(3), [one_row(seq) for seq in (1, 2, 3)])
    await store.ask(Commit(BUCKET.name, [write]))
    # A small read goes through the pipe.
    small = await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(3), SLOT_READ_BYTES_MIN - 1))
    assert (small, len(slots)) == (list(write.chunks), SLOTS)
    chunks = await read_whole(store, 3)
    assert (chunks, len(slots)) == (list(write.chunks), SLOTS - 1)
    values = chunks.pop().value_bytes
    chunks.clear()
    assert (bytes(values), len(slots)) == (bytes(write.chunks[-1].value_bytes), SLOTS - 1)
    del values
    assert len(slots) == SLOTS


async def test_chunks_that_do_not_fit_a_slot_go_through_the_pipe(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    sizes = (SLOT_BYTES // 2, SLOT_BYTES, 10, SLOT_BYTES // 2, 10)
    large = [
        chunk_of([row(Operation.SET, b"k", seq, seq, size=size)], seq - 1, seq)
        for seq, size in enumerate(sizes, 1)
    ]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(5), large)]))
    chunks = await read_whole(store, 5)
    assert (chunks, len(slots)) == (large, SLOTS - 1)
    for chunk in chunks:
        chunk.check(chunk.crc)


async def test_with_every_slot_lent_chunks_go_through_the_pipe(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    expected = [one_row(1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(1), expected)]))
    answers = [await read_whole(store, 1) for _ in range(SLOTS + 3)]
    assert len(slots) == 0
    assert all(answer == expected for answer in answers)
    answers.clear()
    assert len(slots) == SLOTS


async def test_a_caller_that_is_cancelled_gives_its_slot_back_when_the_answer_has_come(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, slots = reading
    expected = [one_row(1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(1), expected)]))
    os.kill(store._reader.process.pid, signal.SIGSTOP)
    for _ in range(3):
        with trio.move_on_after(0.01):
            await read_whole(store, 1)
    assert len(slots) == SLOTS - 3, "the process may still write to them"
    os.kill(store._reader.process.pid, signal.SIGCONT)
    chunks = await read_whole(store, 1)
    assert (chunks, len(slots)) == (expected, SLOTS - 1)


async def test_chunks_outlive_the_process_that_read_them(
    reading: tuple[ProcessStore, SlotPool],
) -> None:
    store, _ = reading
    expected = [one_row(1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(1), expected)]))
    chunks = await read_whole(store, 1)
    os.kill(store._reader.process.pid, signal.SIGKILL)
    with pytest.raises(StoreFailedError, match="killed by SIGKILL"):
        await read_whole(store, 1)
    assert chunks == expected


async def test_a_system_without_such_memory_reads_through_the_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "make_shared_memory", lambda: None)
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        write = some_write(0, 0)
        await store.ask(Commit(BUCKET.name, [write]))
        assert store._reader.slots is None
        assert await read_whole(store, 3) == list(write.chunks)


# Their memory, their start and their end.


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's allocator")
async def test_buckets_after_a_large_value_take_little_memory(tmp_path: Path) -> None:
    def anonymous_bytes() -> int:
        return sum(status_of(pid, "RssAnon") for pid in children_of(os.getpid()))

    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        for seq in (1, 2):
            value = row(Operation.SET, b"large", seq, seq, size=10 << 20)
            chunk = chunk_of([value], seq - 1, seq)
            await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(seq), [chunk])]))
        before = anonymous_bytes()
        for index in range(20):
            record = BucketRecord(f"bucket-{index}", 1, 1 << 20)
            await store.ask(CreateBucketFiles(record, [record_of(0)]))
        # The maps of each bucket reserve 6 MiB, and use hardly any of it.
        assert anonymous_bytes() - before < 20 << 20


@pytest.mark.parametrize("role", ["writer", "reader"])
async def test_a_killed_process_fails_the_store_and_its_callers(tmp_path: Path, role: str) -> None:
    failures: list[str] = []

    async def call(store: ProcessStore, high: int) -> None:
        try:
            while True:
                if role == "reader":
                    await store.ask(ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(3), 100))
                else:
                    await store.ask(LoadBuckets())
        except StoreFailedError as error:
            failures.append(str(error))

    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        await create(store)
        await store.ask(Commit(BUCKET.name, [some_write(0, 0)]))
        worker = store._reader if role == "reader" else store._writer
        async with trio.open_nursery() as nursery:
            for index in range(5):
                nursery.start_soon(call, store, index)
            await trio.sleep(0.05)
            os.kill(worker.process.pid, signal.SIGKILL)
            with trio.fail_after(10):
                await store.failed.wait()
        sentence = f"the store's {role} process was killed by SIGKILL; the system's log may say why"
        assert store.failure == f"{sentence}; start the server again"
        assert failures == [store.failure] * 5
        with pytest.raises(StoreFailedError, match="killed by SIGKILL"):
            await store.ask(Commit(BUCKET.name, [some_write(0, 3)]))
    # The directory is as it was.
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        (stored_bucket,) = (await store.ask(LoadBuckets())).buckets
        assert stored_bucket.partitions[0].record.high == 3


async def test_a_process_killed_by_a_signal_without_a_name_fails_the_store(tmp_path: Path) -> None:
    signal_number = signal.SIGRTMIN + 6
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        os.kill(store._writer.process.pid, signal_number)
        with trio.fail_after(10):
            await store.failed.wait()
        assert store.failure == (
            f"the store's writer process was killed by signal {signal_number}; the system's log "
            "may say why; start the server again"
        )


async def test_if_one_process_cannot_start_the_other_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EMFILE, "no descriptors")

    monkeypatch.setattr(processes, "_start_reader", refuse)
    before = set(children_of(os.getpid())), set(os.listdir("/proc/self/fd"))
    with pytest.RaisesGroup(OSError):
        async with open_store(tmp_path / "data", bytes_max=MAP_BYTES):
            pass
    assert (set(children_of(os.getpid())), set(os.listdir("/proc/self/fd"))) == before


_HOLD: Final = """
import sys, trio
from pathlib import Path
from upr_server.storage.processes import open_store

async def main():
    async with open_store(Path(sys.argv[1]), bytes_max=1 << 30) as store:
        print(store._writer.process.pid, store._reader.process.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not waited for is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def test_a_killed_server_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    process = await trio.lowlevel.open_process(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment()
    )
    try:
        assert process.stdout is not None
        async with process.stdout:
            output = b""
            while not output.endswith(b"\n"):
                output += await process.stdout.receive_some()
        pids = [int(word) for word in output.split()]
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
    finally:
        process.kill()
        with trio.fail_after(10, shield=True):
            await process.wait()
    await eventually(lambda: not any(map(is_running, pids)), "the processes end", 20)
    # And the next may begin at once.
    async with open_store(tmp_path, bytes_max=MAP_BYTES) as store:
        assert (await store.ask(LoadBuckets())).buckets == []


# What is sent and received, in steps.


def test_items_with_large_values_go_beside_the_message() -> None:
    large = bytes(LARGE_BYTES + 1)
    rows = [
        Mutation(Operation.SET, b"a", large, SeqNo(7), Cas(3), 5, 9),
        None,
        Mutation(Operation.SET, b"b", b"small", SeqNo(8), Cas(4)),
        Mutation(Operation.SET, b"c", large, SeqNo(9), Cas(5)),
    ]
    packed, buffers = pack_message(ItemsFound.of(list(rows)))
    assert len(packed) < 1000
    items = Unpacker().unpack(packed, ItemsFound, buffers)
    assert items.all_rows() == rows
    first = items.all_rows()[0]
    assert isinstance(first.value, memoryview), "it is not copied"


class RecordingStream(trio.abc.SendStream):
    """Takes all that it is given at once, as a pipe does while its reader is quick."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self.pieces.append(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_a_large_call_is_sent_in_steps() -> None:
    stream = RecordingStream()
    parts = [b"head", b"a" * (3 * SEND_BYTES), b"", b"b" * 10, b"c" * SEND_BYTES]
    await send_in_steps(stream, list(parts))
    assert b"".join(stream.pieces) == b"".join(parts)
    assert max(map(len, stream.pieces)) == SEND_BYTES
    assert len(stream.pieces) == 5


async def test_many_parts_are_sent_in_order() -> None:
    stream = RecordingStream()
    parts = [b"%d" % index for index in range(2 * SEND_PARTS + 1)]
    await send_in_steps(stream, list(parts))
    assert b"".join(stream.pieces) == b"".join(parts)
    assert len(stream.pieces) == 3


class EncodedChunk(Chunk):
    """A chunk that counts how often one of its kind was encoded."""

    __slots__ = ()
    count_encoded = 0

    def encode(self) -> memoryview:
        EncodedChunk.count_encoded += 1
        return super().encode()


class EncodedInStep(trio.abc.Instrument):
    """How many chunks each step has encoded, if any."""

    def __init__(self) -> None:
        EncodedChunk.count_encoded = 0
        self.counts: list[int] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if EncodedChunk.count_encoded:
            self.counts.append(EncodedChunk.count_encoded)
            EncodedChunk.count_encoded = 0


async def test_a_commit_of_many_chunks_is_packed_in_steps(tmp_path: Path) -> None:
    count = STEP_ITEMS * 3 // 4
    chunks = [EncodedChunk(one_row(seq).encode()) for seq in range(1, count + 1)]
    writes = [
        PartitionWrite(partition, record_of(count), chunks) for partition in range(PARTITIONS)
    ]
    async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
        await create(store)
        encoded = EncodedInStep()
        trio.lowlevel.add_instrument(encoded)
        await store.ask(Commit(BUCKET.name, writes))
        trio.lowlevel.remove_instrument(encoded)
        assert encoded.counts == [count] * PARTITIONS


class ReceivingSteps(trio.abc.Instrument):
    """Counts the steps of the tasks that receive answers.

    Args:
        on_step: Called before each, with its number.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda _: None) -> None:
        self.count = 0
        self._on_step = on_step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.endswith("_Worker.receive"):
            self.count += 1
            self._on_step(self.count)


@asynccontextmanager
async def a_held_worker(
    slots: SlotPool | None = None, *, receives: bool = True
) -> AsyncIterator[tuple[processes._Worker, bytearray, trio.SocketStream]]:
    """A process that answers nothing: what it has received, and the pipe to answer by."""
    own_socket, process_socket = trio.socket.socketpair()
    own_pipe, process_pipe = trio.SocketStream(own_socket), trio.SocketStream(process_socket)
    worker = processes._Worker(cast("Any", None), own_pipe, "reader", slots)
    received = bytearray()

    async def take_requests() -> None:
        while receives:
            received.extend(await process_pipe.receive_some())

    async with own_pipe, process_pipe, trio.open_nursery() as nursery:
        for task in (worker.send, worker.receive, take_requests):
            nursery.start_soon(task)
        yield worker, received, process_pipe
        nursery.cancel_scope.cancel()


async def test_reads_for_thousands_of_streams_hold_up_no_other_call() -> None:
    async with a_held_worker() as (worker, received, process_pipe), trio.open_nursery() as nursery:
        for _ in range(1000):
            nursery.start_soon(worker.call, ReadChunks("b", 0, SeqNo(0), SeqNo(9), 1))
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"ReadChunks") == READS_SENT_MAX
        for _ in range(100):
            nursery.start_soon(worker.call, FindSeqBefore("b", 0, 1))
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"FindSeqBefore") == 100
        # Each answer makes room for one more. These have no chunks.
        await process_pipe.send_all(5 * (HEAD.pack(1, 0, False) + b"\x90"))
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"ReadChunks") == READS_SENT_MAX + 5
        nursery.cancel_scope.cancel()


async def test_what_a_stream_that_has_ended_would_have_read_is_not_read() -> None:
    """Otherwise consumers that come and go would have others wait behind all that they asked
    for."""
    shared_memory = make_shared_memory()
    assert shared_memory is not None
    slots = SlotPool(shared_memory)
    os.close(shared_memory)
    scopes = [trio.CancelScope() for _ in range(READS_SENT_MAX + 100)]
    async with (
        a_held_worker(slots) as (worker, received, process_pipe),
        trio.open_nursery() as nursery,
    ):

        async def read(scope: trio.CancelScope) -> None:
            with scope:
                await worker.call(ReadChunks("ended", 0, SeqNo(0), SeqNo(9), SLOT_READ_BYTES_MIN))

        for scope in scopes:
            nursery.start_soon(read, scope)
        await trio.testing.wait_all_tasks_blocked()
        for scope in scopes:
            scope.cancel()
        nursery.start_soon(worker.call, ReadChunks("going on", 0, SeqNo(0), SeqNo(9), 1))
        await trio.testing.wait_all_tasks_blocked()
        assert len(slots) == SLOTS - READS_SENT_MAX, "those that were sent keep theirs"
        await process_pipe.send_all(HEAD.pack(1, 0, False) + b"\x90")
        await trio.testing.wait_all_tasks_blocked()
        assert received.count(b"ended") == READS_SENT_MAX
        assert received.count(b"going on") == 1
        nursery.cancel_scope.cancel()


async def test_a_read_that_waits_is_left_out_with_its_caller_and_a_change_is_not() -> None:
    """Otherwise clients that ask again and again, as answers come late, would make all later
    still."""
    requests = [FetchRequest(b"%0250d" % index, 0, True) for index in range(20_000)]
    calls: list[StoreCall[Any]] = [
        CloseBucket("b"),
        *(FindItems("b", 0, requests[:1]) for _ in range(100)),
        DeleteLeases("b", [1]),
        *(FindExpired("b", 1, b"", 1) for _ in range(100)),
    ]
    async with (
        a_held_worker(receives=False) as (worker, _, _),
        trio.open_nursery() as nursery,
    ):
        # It fills the pipe.
        nursery.start_soon(worker.call, FindItems("b", 0, requests))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01):
            async with trio.open_nursery() as clients:
                for call in calls:
                    clients.start_soon(worker.call, call)
        unsent_calls = [pending_call.call for pending_call in worker._unsent_calls]
        assert {type(call) for call in unsent_calls} == {CloseBucket, DeleteLeases}
        assert len(unsent_calls) == 2
        nursery.cancel_scope.cancel()


MANY_CHUNKS: Final = 10 * STEP_CHUNKS


async def commit_many_chunks(store: Store) -> ReadChunks:
    """Returns the call that reads them."""
    await create(store)
    chunks = [one_row(seq) for seq in range(1, MANY_CHUNKS + 1)]
    await store.ask(Commit(BUCKET.name, [PartitionWrite(0, record_of(MANY_CHUNKS), chunks)]))
    return ReadChunks(BUCKET.name, 0, SeqNo(0), SeqNo(MANY_CHUNKS), PLENTY)


async def test_an_answer_of_many_chunks_is_unpacked_in_steps(tmp_path: Path) -> None:
    async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
        call = await commit_many_chunks(store)
        steps = ReceivingSteps()
        trio.lowlevel.add_instrument(steps)
        chunks = await store.ask(call)
        trio.lowlevel.remove_instrument(steps)
        assert [chunk.end for chunk in chunks] == list(range(1, MANY_CHUNKS + 1))
        assert steps.count >= 2 * MANY_CHUNKS // STEP_CHUNKS


async def test_a_store_that_closes_while_it_unpacks_an_answer_fails_the_call(
    tmp_path: Path,
) -> None:
    with trio.CancelScope() as scope:
        async with open_store(tmp_path / "data", bytes_max=MAP_BYTES) as store:
            call = await commit_many_chunks(store)

            def close(step: int) -> None:
                if step == 2 * MANY_CHUNKS // STEP_CHUNKS:
                    scope.cancel()

            steps = ReceivingSteps(close)
            trio.lowlevel.add_instrument(steps)
            with trio.CancelScope(shield=True), pytest.raises(StoreFailedError, match="is closed"):
                await store.ask(call)
            trio.lowlevel.remove_instrument(steps)
