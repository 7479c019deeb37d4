"""Writes beside an indexer that is killed, and what its indexes must have then."""

from __future__ import annotations

import json
import random
import threading
from typing import Final

from tests.indexer.kit import by_brute_force
from tests.indexer.processes import DEADLINE_S
from tests.kit.process import POLL_S
from upr_protocol.client import BlockingClient, IndexClient
from upr_server.indexer.pure.definition import IndexDefinition

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
