"""What a seed draws before anything happens."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Final

import attrs

from tests.kit.history import ALL_LEVELS, Level

WITHOUT_REPLICAS: Final = (
    "crash",
    "restart",
    "cut",
    "isolate",
    "trickle",
    "resets",
    "disk_fails",
    "disk_fills",
    "disk_slows",
    "clock_steps",
    "consumer_crashes",
)
"""The faults of a cluster in which each partition has one copy."""


@attrs.frozen
class Mix:
    """What a seed draws: how large things are, and which faults there are, each more or less
    often.

    Attributes:
        pauses_s: How long a consumer may take over each event.
        weights: How often each kind of fault comes, beside the others.
    """

    partitions: int
    has_replicas: bool
    quota_bytes: int
    value_bytes: int
    undo_mutations: int
    purge_age_s: float
    levels: tuple[Level, ...]
    delay_s: float
    jitter_s: float
    disk_s: float
    pause_s: float
    pauses_s: tuple[float, ...]
    faults: int
    gap_s: float
    weights: dict[str, float]

    @classmethod
    def drawn(cls, chance: Random, kinds: Iterable[str]) -> Mix:
        """That of a seed; `kinds` of faults there are."""
        weights = {name: chance.choice((0.0, 0.5, 1.0, 2.0)) for name in kinds}
        # Each seed is to have what its cluster is for.
        for name in ("fail_over", "take_over"):
            weights[name] = chance.choice((6.0, 10.0, 14.0))
        has_replicas = chance.random() < 0.85
        if not has_replicas:
            # Nobody could take over, and what a disk loses is lost.
            weights = {name: weights[name] for name in WITHOUT_REPLICAS}
            weights["crash"] = 3.0
        large = chance.random() < 0.25
        return cls(
            partitions=chance.choice((1, 2, 3)),
            has_replicas=has_replicas,
            quota_bytes=1024 * 1024 if large else 64 * 1024 * 1024,
            value_bytes=chance.choice((60_000, 200_000) if large else (1, 20, 200)),
            undo_mutations=chance.choice((0, 20, 200, 64 * 1024)),
            purge_age_s=chance.choice((3.0, 30.0, 3 * 24 * 3600.0)),
            levels=tuple(chance.choice(ALL_LEVELS) for _ in range(2)),
            delay_s=chance.choice((0.0, 0.0005, 0.005, 0.05)),
            jitter_s=chance.choice((0.0, 0.001, 0.05)),
            disk_s=chance.choice((0.0, 0.001, 0.01, 0.1)),
            pause_s=chance.choice((0.2, 0.8)),
            # What is large fills the memory, so that who takes long is dropped.
            pauses_s=(0.0, 0.05, 0.3, 3.0) if large else (0.0, 0.001, 0.05, 0.3),
            faults=chance.randint(7, 12),
            gap_s=chance.choice((0.2, 0.5, 1.0)),
            weights=weights,
        )

    def for_followers(self, fault: str) -> Mix:
        """The same for a seed with consumers of events, which has this fault, too."""
        return attrs.evolve(self, weights={**self.weights, fault: 2.0})

    def for_readers(self, fault: str) -> Mix:
        """The same for a seed with readers, which has this fault, too: several partitions, of which
        each is so large that its reading takes a while."""
        return attrs.evolve(
            self,
            partitions=max(2, self.partitions),
            quota_bytes=64 * 1024 * 1024,
            value_bytes=20_000,
            weights={**self.weights, fault: 20.0},
        )
