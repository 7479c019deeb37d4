"""Focused mixes: a small cluster, few kinds of fault, and each of them often.

The general mix has everything, each now and then. It finds what nobody thought of, but a planted
bug that needs one situation may need hundreds of its seeds. A profile makes that situation in
most seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, Final

import attrs

from tests.kit.history import ALL_LEVELS, Level
from tests.simulation.mix import Mix

_SMALL: Final[Mapping[str, tuple[Any, ...]]] = {
    "partitions": (1, 2),
    "has_replicas": (True,),
    "quota_bytes": (64 * 1024 * 1024,),
    "value_bytes": (20,),
    "undo_mutations": (20, 200),
    "purge_age_s": (3.0, 30.0),
    "delay_s": (0.0005, 0.005),
    "jitter_s": (0.0, 0.001),
    "disk_s": (0.001, 0.01),
    "pause_s": (0.1, 0.2),
    "pauses_s": ((0.0, 0.01),),
    "faults": (3,),
    "gap_s": (0.3, 0.6),
}
"""What a profile draws from where it says nothing else."""


@attrs.frozen
class Profile:
    """What the seeds of a profile have in common.

    Attributes:
        name: Its name.
        weights: How often each kind of fault comes, beside the others. Other kinds do not come.
        levels: The levels of durability that a publisher may ask for.
        settings: The values that a field of `Mix` may have.
        has_readers: Whether there are consumers that ask again and again for everything up to now.
        has_wrong_states: Whether there are consumers that ask for dead and pending partitions.
        has_followers: Whether there are consumers of events.
        has_one_replica: Whether each partition has one replica, and one node that does not have it.
        has_hostile_node: Whether the cluster has users, and somebody without the right plays a
            node.
        has_tasks: Whether there are tasks that run again.
    """

    name: str
    weights: Mapping[str, float]
    levels: tuple[Level, ...] = ALL_LEVELS
    settings: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    has_readers: bool = False
    has_wrong_states: bool = False
    has_followers: bool = False
    has_one_replica: bool = False
    has_hostile_node: bool = False
    has_tasks: bool = False

    def draw(self, chance: Random) -> Mix:
        """The mix of one seed."""
        options = {**_SMALL, **self.settings}
        return Mix(
            weights=dict(self.weights),
            **{
                "levels": (chance.choice(self.levels), chance.choice(self.levels)),
                **{field: chance.choice(values) for field, values in options.items()},
            },
        )


CRASHES: Final = Profile(
    "crashes",
    {"crash": 1.0},
    levels=("persisted", "replicated_persisted"),
    settings={"has_replicas": (False,), "partitions": (3,), "disk_s": (0.1,), "faults": (5,)},
)
"""Each partition has one copy, and machines lose what is in memory only."""

FAILOVERS: Final = Profile(
    "failovers", {"fail_over": 1.0}, settings={"faults": (5,), "gap_s": (0.1,), "partitions": (2,)}
)
"""The active node is killed, and another takes its place."""

REPEATED_FAILOVERS: Final = attrs.evolve(
    FAILOVERS,
    name="repeated_failovers",
    settings={**FAILOVERS.settings, "partitions": (1,), "faults": (8,)},
)
"""One partition has many histories."""

HANDOVERS: Final = Profile(
    "handovers",
    {"take_over": 1.0},
    settings={
        "partitions": (1,),
        "delay_s": (0.05,),
        "pause_s": (0.3, 0.5),
        "faults": (6,),
        "gap_s": (0.2,),
    },
)
"""Nodes take over from each other while publishers write."""

RESETS: Final = Profile("resets", {"resets": 2.0, "fail_over": 1.0}, settings={"faults": (5,)})
"""Connections break, so that publishers send batches again; then another node becomes active."""

FAILING_DISKS: Final = Profile(
    "failing_disks",
    {"disk_fails": 1.0},
    levels=("persisted", "replicated_persisted"),
    settings={
        "partitions": (3,),
        "faults": (2,),
        "disk_s": (0.2,),
        "pause_s": (0.05,),
        "value_bytes": (200,),
    },
)
"""Commits fail, with more changes queued behind them."""

FAILING_DISKS_WITH_LEASES: Final = attrs.evolve(
    FAILING_DISKS,
    name="failing_disks_with_leases",
    weights={"disk_fails": 1.0, "consumer_crashes": 1.0},
    settings={**FAILING_DISKS.settings, "faults": (10,)},
)
"""Commits fail, and leases are queued after them: consumers come back and need backfills."""

SLOW_CONSUMERS: Final = Profile(
    "slow_consumers",
    {"consumer_crashes": 2.0, "fail_over": 1.0},
    settings={
        "quota_bytes": (1024 * 1024,),
        "value_bytes": (60_000, 200_000),
        "pauses_s": ((0.3, 3.0),),
        "faults": (5,),
    },
)
"""Memory is short, so that consumers are dropped and read from disk."""

LEASED_BACKFILLS: Final = Profile(
    "leased_backfills",
    {"consumer_crashes": 1.0},
    settings={
        "partitions": (1,),
        "quota_bytes": (1024 * 1024,),
        "value_bytes": (60_000,),
        "undo_mutations": (0,),
        "purge_age_s": (3.0,),
        "pauses_s": ((0.3,),),
        "faults": (20,),
    },
)
"""Consumers come back, and read slowly from disk, while the log is compacted."""

MOVING_COPIES: Final = Profile(
    "moving_copies",
    {"copy_comes_back": 1.0},
    settings={"partitions": (2,), "value_bytes": (20_000,), "faults": (3,)},
    has_readers=True,
)
"""Copies are removed, added again and made active, while consumers read up to now."""

ARRIVING_PARTITIONS: Final = Profile(
    "arriving_partitions",
    {"take_over_after_greeting": 1.0},
    settings={"partitions": (3,), "value_bytes": (60_000,), "faults": (1,)},
    has_readers=True,
    has_one_replica=True,
)
"""A node becomes active for a partition that it did not have when it greeted the readers."""

MOVING_PARTITIONS: Final = Profile(
    "moving_partitions",
    {"copy_comes_back": 2.0, "take_over": 1.0},
    settings={"partitions": (2,), "delay_s": (0.02, 0.05), "faults": (6,)},
    has_wrong_states=True,
)
"""Partitions become dead and pending, while consumers ask for them in these states."""

EVENTS: Final = Profile(
    "events",
    {"fail_over": 1.0, "wrong": 2.0, "take_over": 1.0, "cut": 1.0, "follower_crashes": 1.0},
    settings={"partitions": (3,), "pause_s": (0.5,), "faults": (6,)},
    has_followers=True,
    has_one_replica=True,
)
"""Nodes are killed and partitions move while consumers of events follow all nodes."""

LOST_EVENT_QUEUES: Final = Profile(
    "lost_event_queues",
    {"lose_event_queues": 1.0},
    levels=("persisted",),
    settings={"has_replicas": (False,), "partitions": (3,), "pause_s": (0.5,), "faults": (2,)},
    has_followers=True,
    has_one_replica=True,
)
"""A node that alone has a partition is killed before consumers of events were told all."""

HOSTILE_NODE: Final = Profile(
    "hostile_node",
    {"fail_over": 1.0, "take_over": 1.0, "crash": 1.0},
    settings={"faults": (4,), "gap_s": (1.0, 2.0)},
    has_hostile_node=True,
)
"""Somebody who may not replicate plays a node, while nodes are killed and partitions move."""

_ONCE: Final = {"disk_s": (0.001, 0.01), "faults": (1,), "pause_s": (0.1,), "partitions": (1,)}

_LEAD_AND_FOLLOW: Final = {"levels": (("replicated_persisted", "memory"),)}
ROTTEN_DISKS: Final = Profile(
    "rotten_disks",
    {"disk_rots": 1.0},
    settings={"faults": (2,), "gap_s": (1.0, 2.0), "value_bytes": (200,)},
)
"""Bits of stored chunks flip, and a consumer reads them."""

DIVERGED: Final = Profile(
    "diverged",
    {"diverge": 1.0},
    settings={
        **_ONCE,
        **_LEAD_AND_FOLLOW,
        "pause_s": (0.05,),
        "value_bytes": (200,),
        "pauses_s": ((0.0, 0.01),),
    },
)
"""Two nodes have different changes in one range of numbers, and a consumer has one of them."""

LAGGING_REPLICAS: Final = Profile(
    "lagging_replicas",
    {"fail_over_while_lagging": 1.0},
    levels=("replicated", "replicated_persisted"),
    settings=_ONCE,
)
"""The active node is killed while a replica lags."""

COMPETING_FAILOVERS: Final = Profile(
    "competing_failovers",
    {"fail_over_twice": 1.0},
    settings={"faults": (1,)},
)
"""Two operators replace a node at the same time, each by another one."""

LOST_ANSWERS: Final = Profile(
    "lost_answers",
    {"lose_answers": 1.0},
    settings={**_ONCE, "partitions": (3,)},
)
"""A batch is applied, its answer is lost, and another node gets it again."""

REPEATED_TASKS: Final = Profile(
    "repeated_tasks",
    {"fail_over_while_trickling": 1.0},
    levels=("memory",),
    settings={"partitions": (1,), "value_bytes": (10_000,), "pause_s": (0.05,), "faults": (3,)},
    has_tasks=True,
)
"""Tasks run again after failovers to replicas that lag far behind."""

RESTARTED_LEADERS: Final = Profile(
    "restarted_leaders", {"restart_leader": 1.0}, levels=("replicated",), settings=_ONCE
)
"""The active node is killed with changes that its disk does not have, and starts again."""

RESTARTED_SOURCES: Final = Profile(
    "restarted_sources",
    {"take_over_from_restarted": 1.0},
    settings={**_ONCE, "delay_s": (0.02,)},
)
"""The source of a takeover is killed and starts again while the target lags."""

REFUSED_FAILOVERS: Final = Profile(
    "refused_failovers", {"refuse_failover": 1.0}, levels=("replicated",), settings=_ONCE
)
"""A failover to a lagging replica is refused, and the killed active node is back."""

OLD_HISTORIES: Final = Profile(
    "old_histories",
    {"return_from_old_history": 1.0},
    settings={**_ONCE, "levels": (("replicated", "memory"), ("replicated_persisted", "persisted"))},
)
"""A node comes back with a longer but older history than the others."""

REFILLING: Final = Profile(
    "refilling",
    {"fail_over_while_refilling": 1.0},
    settings={**_ONCE, **_LEAD_AND_FOLLOW, "undo_mutations": (0,)},
)
"""A new active node is killed while the others have rolled back and not caught up."""

ROLLBACKS: Final = Profile(
    "rollbacks",
    {"interrupt_rollback": 1.0},
    levels=("memory",),
    settings={**_ONCE, "partitions": (3,), "pause_s": (0.8,), "faults": (2,)},
)
"""A consumer is killed in the middle of a rollback, and meets the old active node again."""


PROFILES: Final = {
    profile.name: profile
    for profile in (
        CRASHES,
        FAILOVERS,
        REPEATED_FAILOVERS,
        HANDOVERS,
        RESETS,
        FAILING_DISKS,
        FAILING_DISKS_WITH_LEASES,
        SLOW_CONSUMERS,
        LEASED_BACKFILLS,
        MOVING_COPIES,
        ARRIVING_PARTITIONS,
        MOVING_PARTITIONS,
        EVENTS,
        LOST_EVENT_QUEUES,
        HOSTILE_NODE,
        ROTTEN_DISKS,
        DIVERGED,
        LAGGING_REPLICAS,
        COMPETING_FAILOVERS,
        LOST_ANSWERS,
        REPEATED_TASKS,
        RESTARTED_LEADERS,
        RESTARTED_SOURCES,
        REFUSED_FAILOVERS,
        OLD_HISTORIES,
        REFILLING,
        ROLLBACKS,
    )
}
"""By name."""
