"""Every scan at `now` equals a scan by brute force of what the server has.

Documents, definitions, updates and deletions are random; indexers and servers crash; indexes are
created and dropped. `UPR_INDEXER_ROUNDS` is the number of runs; the name of each contains its seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.indexer.world import World

ROUNDS = int(os.environ.get("UPR_INDEXER_ROUNDS", "6"))


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_scan_at_now_equals_what_the_server_has(seed: int, tmp_path: Path) -> None:
    world = World(seed, tmp_path)
    world.in_workers = seed % 6 >= 3
    async with world.running():
        await world.redefine()
        for _ in range(6):
            await world.write(world.rng.randrange(60))
            step = world.rng.choice(["indexer", "server", "both", "redefine", "drop", "check"])
            if step in ("indexer", "both"):
                await world.crash("indexer")
                await world.write(world.rng.randrange(20))
            if step in ("server", "both"):
                if world.rng.random() < 0.5:
                    world.hold_commits()
                    await world.write(world.rng.randrange(20))
                await world.crash("server")
                await world.start_server()
                await world.read_designs()
                await world.write(world.rng.randrange(20))
            if step in ("indexer", "both"):
                await world.start_indexer()
            if step == "redefine":
                await world.redefine()
            if step == "drop" and world.defined:
                name = world.rng.choice(sorted(world.defined))
                await world.client.delete(f"_design/{name}")
                del world.defined[name]
            if step != "redefine":
                await world.check()
        await world.check()
