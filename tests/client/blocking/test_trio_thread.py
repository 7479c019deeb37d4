"""A thread in which Trio runs, for callers that block."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator

import pytest
import trio

from tests.kit.process import no_descriptors
from upr_protocol.client.blocking.trio_thread import TrioThread, _Call, _Runner, _stop
from upr_protocol.errors import ClosedError


@pytest.fixture
def thread() -> Iterator[TrioThread]:
    thread = TrioThread()
    yield thread
    thread.close()


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "upr-client"]


async def add(left: int, right: int) -> int:
    await trio.lowlevel.checkpoint()
    return left + right


async def fail() -> None:
    await trio.lowlevel.checkpoint()
    raise ValueError("from the thread")


def test_a_call_gives_its_result(thread: TrioThread) -> None:
    assert thread.run(add, 1, right=2) == 3
    assert client_threads()


def test_an_error_comes_with_the_traceback_of_the_thread(thread: TrioThread) -> None:
    with pytest.raises(ValueError, match="from the thread") as caught:
        thread.run(fail)
    functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert functions[0] == "test_an_error_comes_with_the_traceback_of_the_thread"
    assert functions[-1] == "fail"
    assert thread.run(add, 1, 2) == 3


def test_calls_that_nobody_waits_for_are_made_in_order(thread: TrioThread) -> None:
    called: list[int] = []
    for index in range(100):
        thread.run_soon(called.append, index)

    async def count() -> int:
        await trio.lowlevel.checkpoint()
        return len(called)

    assert thread.run(count) == 100
    assert called == list(range(100))


def test_ctrl_c_cancels_the_call_and_waits_for_its_end(thread: TrioThread) -> None:
    ended_names: list[str] = []

    async def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await trio.sleep_forever()
        finally:
            ended_names.append("cancelled")

    with pytest.raises(KeyboardInterrupt):
        thread.run(wait)
    assert ended_names == ["cancelled"]
    assert thread.run(add, 1, 2) == 3


def test_ctrl_c_as_a_call_has_ended_does_not_wait_for_its_end_again(
    thread: TrioThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = _Call.wait
    waits = 0

    def wait_and_interrupt(call: _Call[int]) -> None:
        nonlocal waits
        waits += 1
        wait(call)
        if waits == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Call, "wait", wait_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.run(add, 1, 2)
    assert waits == 2
    assert thread.run(add, 1, 2) == 3


def test_closing_cancels_tasks_and_ends_the_thread() -> None:
    ended_names: list[str] = []
    before = client_threads()

    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended_names.append("cancelled")

    thread = TrioThread()
    thread.run_soon(thread.nursery.start_soon, task)
    assert thread.run(add, 1, 2) == 3
    thread.close()
    thread.close()
    assert ended_names == ["cancelled"]
    assert client_threads() == before
    with pytest.raises(ClosedError, match="the client was closed"):
        thread.run(add, 1, 2)
    with pytest.raises(ClosedError):
        thread.run_soon(ended_names.append, "never")


def test_a_call_that_waits_while_another_thread_closes_ends(thread: TrioThread) -> None:
    async def wait() -> None:
        threading.Thread(target=thread.close).start()
        await trio.sleep_forever()

    with pytest.raises(ClosedError):
        thread.run(wait)


def test_an_unexpected_error_of_a_task_is_raised_by_the_next_call() -> None:
    thread = TrioThread()
    thread.run_soon(thread.nursery.start_soon, fail)
    with pytest.raises(ValueError, match="from the thread"):
        thread.run(trio.sleep_forever)
    with pytest.raises(ValueError, match="from the thread"):
        thread.run(add, 1, 2)
    thread.close()


def test_a_thread_that_nobody_refers_to_ends() -> None:
    before = client_threads()
    thread = TrioThread()
    thread.run_soon(thread.nursery.start_soon, trio.sleep_forever)
    assert client_threads() != before
    del thread
    gc.collect()
    assert client_threads() == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_must_create_its_own_client(thread: TrioThread) -> None:
    child = os.fork()
    if not child:  # it must not come back to pytest
        code = 1
        try:
            with pytest.raises(ClosedError, match="forked process"):
                thread.run(add, 1, 2)
            thread.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.run(add, 1, 2) == 3


def test_a_program_that_forgets_to_close_exits() -> None:
    program = """
import trio
from upr_protocol.client.blocking.trio_thread import TrioThread

async def task():
    try:
        await trio.sleep_forever()
    finally:
        print("cancelled", flush=True)

thread = TrioThread()
thread.run_soon(thread.nursery.start_soon, task)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (result.stdout, result.stderr) == ("cancelled\n", "")


def test_a_thread_that_cannot_start_says_why() -> None:
    before = client_threads()
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        TrioThread()
    assert client_threads() == before


def test_a_thread_that_is_stopped_before_it_runs_ends_at_once() -> None:
    runner = _Runner()
    thread = threading.Thread(target=runner.run, daemon=True)
    _stop(runner, thread, os.getpid())
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
