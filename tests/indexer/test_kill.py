"""Indexer processes that are killed while a client writes.

`UPR_INDEXER_KILLS` is the number of kills; `UPR_INDEXER_WRITES` is the number of writes that are
each followed by a scan for the written document.
"""

from __future__ import annotations

import json
import os
import random
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.indexer.kit import by_brute_force
from tests.indexer.processes import DEADLINE_S, IndexerProcess, indexer_process
from tests.kit.process import POLL_S
from upr_protocol.client import BlockingClient, IndexClient, IndexerError, WriteResult
from upr_server.indexer.pure.definition import IndexDefinition

KILLS = int(os.environ.get("UPR_INDEXER_KILLS", "2"))
WRITES = int(os.environ.get("UPR_INDEXER_WRITES", "300"))
KEYS: Final = [f"k{index}" for index in range(400)]
BY_A: Final = IndexDefinition(("a",))
BY_BOTH: Final = IndexDefinition(("b", "a"), "a > `10`")
DESIGN: Final = {
    "indexes": {
        "a": {"key": BY_A.key},
        "both": {"key": BY_BOTH.key, "filter": BY_BOTH.filter},
    }
}


class Load(threading.Thread):
    """Writes until it is ended; it pauses between two writes while `paused` is locked."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.paused = threading.Lock()
        self.writes = 0
        self._url = url
        self._ends = False
        self._rng = random.Random(1)

    def run(self) -> None:
        rng = self._rng
        with BlockingClient(self._url) as client:
            stored_keys: set[str] = set()
            while not self._ends:
                with self.paused:
                    key = rng.choice(KEYS)
                    if key in stored_keys and rng.random() < 0.3:
                        client.delete(key)
                        stored_keys.remove(key)
                    else:
                        value = {"a": rng.randrange(50), "b": rng.choice("xyz")}
                        client.set(key, json.dumps(value))
                        stored_keys.add(key)
                    self.writes += 1

    def end(self) -> None:
        self._ends = True
        self.join(DEADLINE_S)


def pause() -> None:
    """Waits a moment before a process is asked again: it does not report changes by itself."""
    threading.Event().wait(POLL_S)


def until_ready(client: IndexClient, names: set[str]) -> None:
    """Waits until these indexes are built."""
    while {status["name"] for status in client.indexes() if status["state"] == "ready"} != names:
        pause()


def compare(asking: IndexClient, client: BlockingClient) -> None:
    """Checks that each index equals a scan by brute force of what the server has."""
    items = client.get_many(KEYS)
    contents = {item.key: bytes(item.value) for item in items if item is not None}
    for name, definition in (("d/a", BY_A), ("d/both", BY_BOTH)):
        page = asking.scan(name, limit=10_000, consistency="now", timeout_s=DEADLINE_S)
        assert [(e.key, e.id) for e in page.entries] == by_brute_force(definition, contents)


def test_killed_under_load_nothing_is_missing_or_left_over(url: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    load = Load(url)
    with BlockingClient(url) as client, ExitStack() as stack:
        load.start()
        stack.callback(load.end)
        for index in range(KILLS + 1):
            with indexer_process(url, tmp_path) as indexer, IndexClient(indexer.url) as asking:
                if index == 0:
                    asking.create("d", DESIGN)
                if index % 5 != 1:
                    # In the other rounds the indexer may be killed early, or while it builds.
                    until_ready(asking, {"d/a", "d/both"})
                    with load.paused:
                        compare(asking, client)
                if index == KILLS:
                    assert indexer.stop() == 0
                    return
                through = asking.status()["mutations"] + rng.randrange(500)
                while asking.status()["mutations"] < through:
                    pause()
                indexer.kill()


def written_through(indexer: IndexerProcess, client: BlockingClient, count: int) -> int:
    """Scans for each document after writing it; returns how many scans did not find it."""
    missing = 0
    rng = random.Random(2)
    with IndexClient(indexer.url) as asking:
        asking.create("d", DESIGN)
        until_ready(asking, {"d/a", "d/both"})
        for index in range(count):
            key = rng.choice(KEYS)
            answer: WriteResult = client.set(key, json.dumps({"a": index}))
            page = asking.scan("d/a", prefix=[index], consistency="at_least", written=[answer])
            missing += [(entry.key, entry.id) for entry in page.entries] != [([index], key)]
    return missing


def test_every_write_is_seen_by_the_scan_after_it(url: str, tmp_path: Path) -> None:
    with BlockingClient(url) as client, indexer_process(url, tmp_path) as indexer:
        assert written_through(indexer, client, WRITES) == 0


def test_a_data_directory_has_one_indexer(url: str, tmp_path: Path) -> None:
    with indexer_process(url, tmp_path) as first:
        with pytest.raises(AssertionError), indexer_process(url, tmp_path):
            raise IndexerError("", "a second one has started")
        assert first.process.poll() is None
