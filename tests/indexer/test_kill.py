"""Indexer processes that are killed while a client writes.

`UPR_INDEXER_KILLS` is the number of kills; `UPR_INDEXER_WRITES` is the number of writes that are
each followed by a scan for the written document.
"""

from __future__ import annotations

import json
import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.indexer.load import DESIGN, KEYS, Load, compare, pause, until_ready
from tests.indexer.processes import IndexerProcess, indexer_process
from upr_protocol.client import BlockingClient, IndexClient, IndexerError, WriteResult

KILLS = int(os.environ.get("UPR_INDEXER_KILLS", "2"))
WRITES = int(os.environ.get("UPR_INDEXER_WRITES", "300"))


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
