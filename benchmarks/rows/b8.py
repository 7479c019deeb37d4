"""B8: what a mutation in memory takes beside its key and value, and what a key takes.

Each key is set twice. Between the two a consumer reads everything, and then stalls: its cursors
keep the first mutations apart from the second ones, which would otherwise take their places. So the
first pass grows the server by mutations and keys, and the second by as many mutations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.processes import UprServer, Worker
from benchmarks.kit.processor import anonymous_bytes
from benchmarks.kit.streaming import filler
from benchmarks.kit.upkeep import rest, statistics
from benchmarks.kit.work import KEY_BYTES, PARTITIONS, VALUE_BYTES

KEYS: Final = 2_000_000
MUTATION_BAR: Final = 100.0
KEY_BAR: Final = 300.0


def measure(runs: int, say: Callable[[str], None]) -> list[Figure]:
    """B8: a server of its own for each run."""
    say(f"B8: {KEYS:,} keys, each set twice")
    ran = []
    for index in range(runs):
        ran.append(_run())
        say(
            f"  run {index + 1}: {ran[-1]['mutation']:.1f} bytes a mutation beside key and "
            f"value, {ran[-1]['key']:.1f} bytes a key"
        )
    details = {
        "counted_by_the_server": ran[-1]["counted"],
        "anonymous_mib": ran[-1]["anonymous_mib"],
        "snapshots": ran[-1]["snapshots"],
    }
    return [
        Figure.less_is_better(
            row=row,
            text=text,
            unit="bytes",
            ours=Spread.of([run[key] for run in ran]),
            peer=Spread.of([bar] * runs),
            peer_name="the bar",
            first_bar=1.0,
            aim=2.0,
            details=details,
        )
        for row, text, key, bar in (
            (
                "B8",
                "Resident bytes beside key and value of a mutation in closed snapshots.",
                "mutation",
                MUTATION_BAR,
            ),
            (
                "B8 keys",
                f"Resident bytes of a key in the hash table, its {KEY_BYTES} bytes included.",
                "key",
                KEY_BAR,
            ),
        )
    ]


def _run() -> dict[str, Any]:
    with UprServer(partitions=PARTITIONS) as server:
        with filler(server, KEYS) as publisher:
            publisher.answer()
            rest(server)
            sizes, stats = [anonymous_bytes(server.pid)], []
            with Worker("stall", port=server.port, bucket=server.BUCKET) as stalled:
                stalled.answer()
                for _ in range(2):
                    publisher.ask(fill=True)
                    rest(server)
                    if len(sizes) == 1:
                        stalled.ask(mutations=KEYS)
                        rest(server)
                    sizes.append(anonymous_bytes(server.pid))
                    stats.append(statistics(server))
        counted = [sample["memory"] for sample in stats]
        retained = counted[1]["encoded"] + counted[1]["arrays"]
        if retained < 2 * KEYS * (KEY_BYTES + VALUE_BYTES):
            raise CannotMeasureError("the first mutations of the keys were not retained")
    empty, first, second = sizes
    return {
        "mutation": (second - first) / KEYS - KEY_BYTES - VALUE_BYTES,
        "key": (first - empty - (second - first)) / KEYS,
        "anonymous_mib": [size >> 20 for size in sizes],
        "counted": counted,
        "snapshots": stats[1]["snapshots"],
    }
