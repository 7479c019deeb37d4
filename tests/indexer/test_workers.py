"""Slices in worker processes, which are killed and stopped while others write."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Final

from tests.indexer.kit import by_brute_force
from tests.indexer.load import BY_A, DESIGN, KEYS, Load, compare, pause, until_ready
from tests.indexer.processes import indexer_process, workers_of
from upr_protocol.client import BlockingClient, IndexClient, IndexerError

ROUNDS = int(os.environ.get("UPR_INDEXER_WORKER_ROUNDS", "2"))
WORKERS: Final = 2
NAMES: Final = {"d/a", "d/both"}


def answers(asking: IndexClient, client: BlockingClient) -> str:
    """Compares a scan with what the server has, if it is answered; the code of its error if not."""
    items = client.get_many(KEYS)
    contents = {item.key: bytes(item.value) for item in items if item is not None}
    try:
        page = asking.scan("d/a", limit=10_000, consistency="now", timeout_s=0.5)
    except IndexerError as error:
        is_named = f" of {WORKERS} " in str(error)
        return error.code if is_named or error.code != "slice_missing" else "nameless"
    assert [(e.key, e.id) for e in page.entries] == by_brute_force(BY_A, contents)
    return ""


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_workers_that_are_killed_or_hang_never_give_half_an_answer(
    url: str, tmp_path: Path
) -> None:
    rng = random.Random(0)
    load = Load(url)
    codes: set[str] = set()
    options = ("--workers", str(WORKERS), "--log-level", "error")
    with (
        BlockingClient(url) as client,
        indexer_process(url, tmp_path, *options) as indexer,
        IndexClient(indexer.url) as asking,
    ):
        asking.create("d", DESIGN)
        load.start()
        try:
            until_ready(asking, NAMES)
            for round_ in range(ROUNDS):
                (victim,) = rng.sample(workers_of(indexer), 1)
                number = rng.choice([signal.SIGKILL, signal.SIGSTOP]) if round_ else signal.SIGKILL
                os.kill(victim, number)
                with load.paused:
                    codes.add(answers(asking, client))
                if number == signal.SIGSTOP:
                    os.kill(victim, rng.choice([signal.SIGCONT, signal.SIGKILL]))
                while True:
                    with load.paused:
                        code = answers(asking, client)
                    codes.add(code)
                    if not code:
                        break
                    pause()
                with load.paused:
                    compare(asking, client)
        finally:
            load.end()
        assert codes <= {"", "slice_missing", "building", "not_fresh"}
        assert "slice_missing" in codes
        assert len(workers_of(indexer)) == WORKERS
        status = asking.index_status("d/a")
        assert [part["slice"] for part in status["slices"]] == list(range(WORKERS))
        assert indexer.stop() == 0


def test_a_stop_applies_what_was_read_and_a_killed_indexer_leaves_no_worker(
    url: str, tmp_path: Path
) -> None:
    options = ("--workers", "2")
    with BlockingClient(url) as client:
        with (
            indexer_process(url, tmp_path, *options, "--worker-niceness", "5") as indexer,
            IndexClient(indexer.url) as asking,
        ):
            asking.create("d", DESIGN)
            until_ready(asking, NAMES)
            for index in range(50):
                client.set(KEYS[index], json.dumps({"a": index}))
            asking.count("d/a", consistency="now")
            pids = workers_of(indexer)
            # They do not interrupt the process that answers scans.
            front = indexer.process.pid
            assert {os.sched_getscheduler(pid) for pid in pids} == {os.SCHED_BATCH}
            assert os.sched_getscheduler(front) == os.SCHED_OTHER
            assert set(map(niceness, pids)) == {min(19, niceness(front) + 5)}
            assert indexer.stop() == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        with (
            indexer_process(url, tmp_path, *options) as indexer,
            IndexClient(indexer.url) as asking,
        ):
            until_ready(asking, NAMES)
            assert asking.count("d/a") == 50
            pids = workers_of(indexer)
            indexer.kill()
            # The socket tells the workers.
            while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
                pause()
        # The next one waits for their locks.
        with (
            indexer_process(url, tmp_path, *options) as indexer,
            IndexClient(indexer.url) as asking,
        ):
            until_ready(asking, NAMES)
            compare(asking, client)
