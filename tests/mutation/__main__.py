"""A mutation run: `python -m tests.mutation [--sample N] [--seed N] [MODULE ...]`.

Each mutant is tried in a copy of the tree, with the tests that run the broken line, until one of
them fails. Slow tests are run only for mutants that no quick test notices. If no test fails, the
mutant survives: it is printed, and a person judges it. Other tools
try every change of every line. This one breaks each line once, because the question is which lines
no test holds. It forks for each mutant, so pytest is imported once.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final

import attrs
import click

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trials import Trials

ROOT: Final = Path(__file__).resolve().parents[2]

SIMULATED_SEEDS: Final = "tests/simulation/test_seeds.py"


@attrs.frozen
class Concern:
    """A part of the tree, and the tests that concern it.

    Attributes:
        path: A module or a package.
        tests: The tests that each broken line is tried with, if they run it.
        slow: Tests of these that only a line is tried with that the others do not notice.
        wider: Further such tests.
    """

    path: str
    tests: tuple[str, ...]
    slow: tuple[str, ...] = ()
    wider: tuple[str, ...] = ()


CONCERNS: Final = (
    Concern("upr_protocol/failover.py", ("tests/protocol/test_failover.py",)),
    Concern("upr_protocol/scram.py", ("tests/protocol/test_scram.py",)),
    Concern(
        "upr_protocol/users",
        ("tests/protocol/test_users.py", "tests/protocol/test_rights.py"),
        wider=("tests/server/test_user_store.py", "tests/server/test_key_rights.py"),
    ),
    Concern(
        "upr_server/net/access.py",
        ("tests/server/test_access.py", "tests/server/test_key_rights.py"),
    ),
    Concern("upr_server/user_store.py", ("tests/server/test_user_store.py",)),
    Concern("upr_server/net/log_in.py", ("tests/server/test_log_in.py",)),
    Concern("upr_protocol/session", ("tests/protocol/session",)),
    Concern(
        "upr_server/engine",
        ("tests/engine",),
        slow=(
            "tests/engine/test_evaluation.py::TestSlicedBatches",
            "tests/engine/test_model.py",
            "tests/engine/test_disk.py::TestOnDisk",
            "tests/engine/test_disk.py::test_every_answer_is_that_of_a_model_that_forgets_nothing",
            "tests/engine/test_bundles.py",
            "tests/engine/test_expiry.py::TestIndex",
            "tests/engine/test_replicas.py::TestReplicated",
            "tests/engine/test_long_runs.py",
        ),
        wider=(SIMULATED_SEEDS, "tests/server"),
    ),
    Concern("upr_server/events", ("tests/events",)),
    Concern(
        "upr_server/indexer",
        ("tests/indexer",),
        slow=(
            "tests/indexer/test_announcements.py",
            "tests/indexer/test_cancelled_anywhere.py",
            "tests/indexer/test_crawl.py",
            "tests/indexer/test_failover.py",
            "tests/indexer/test_kill.py",
            "tests/indexer/test_log_in.py",
            "tests/indexer/test_oracle.py",
            "tests/indexer/test_queries.py",
            "tests/indexer/test_tls.py",
            "tests/indexer/test_workers.py",
        ),
    ),
    Concern(
        "upr_server/storage/online/flusher.py",
        (
            "tests/server/test_flusher.py",
            "tests/server/test_durability.py",
            "tests/server/test_bucket_disk.py",
        ),
        wider=(SIMULATED_SEEDS,),
    ),
    # The flusher is above.
    *(
        Concern(
            f"upr_server/storage/online/{module}",
            (
                "tests/server/test_backfill.py",
                "tests/server/test_bucket_disk.py",
                "tests/server/test_damage.py",
                "tests/server/test_flusher.py",
                "tests/server/test_leases.py",
                "tests/server/test_partition_request_queue.py",
                "tests/server/test_unsaved_answers.py",
            ),
            wider=(SIMULATED_SEEDS, "tests/server", "tests/replication"),
        )
        for module in (
            "backfill.py",
            "bucket_disk.py",
            "index_lag.py",
            "leased_reader.py",
            "leases.py",
            "maintenance.py",
            "partition_reader.py",
            "unsaved_answers.py",
        )
    ),
    *(
        Concern(
            f"upr_server/storage/{module}",
            ("tests/storage",),
            slow=(
                "tests/storage/test_bit_flips.py",
                "tests/storage/test_crash_states.py",
                "tests/storage/test_store.py",
                "tests/storage/test_worker.py",
                "tests/storage/offline",
            ),
            wider=(SIMULATED_SEEDS, "tests/server/test_bucket_disk.py"),
        )
        for module in (
            "bucket_maintenance.py",
            "bucket_storage.py",
            "chunk_log.py",
            "chunk_reader.py",
            "compaction.py",
            "index_update.py",
            "item_lookup.py",
            "key_index.py",
            "leased_ranges.py",
            "live_seqs.py",
            "records.py",
        )
    ),
    Concern("upr_server/storage/directory.py", ("tests/storage/test_directory.py",)),
    Concern("upr_server/storage/event_queue_file.py", ("tests/storage/test_event_queue_file.py",)),
    Concern(
        "upr_server/storage/lmdb_ordered_map.py",
        ("tests/storage/test_ordered_map.py",),
        slow=("tests/storage/test_bit_flips.py",),
    ),
    *(
        # The processes of the store do not run the copy's modules.
        Concern(
            f"upr_server/storage/{module}",
            (
                "tests/storage/test_messages.py",
                "tests/storage/test_processes.py",
                "tests/storage/test_shared_slots.py",
            ),
            slow=("tests/storage/test_store.py",),
        )
        for module in ("messages.py", "processes.py", "shared_slots.py")
    ),
    Concern("upr_server/storage/users_file.py", ("tests/server/test_user_store.py",)),
    *(
        Concern(
            path,
            tuple(
                f"tests/server/test_{name}.py"
                for name in (
                    "access",
                    "bucket_disk",
                    "bundles",
                    "connection",
                    "durability",
                    "durability_waits",
                    "key_prefix",
                    "key_rights",
                    "large_replies",
                    "leases",
                    "partition_map",
                    "partition_request_queue",
                    "refused_batches",
                    "replica_reports",
                    "reply_order",
                    "single_sets",
                    "streamer",
                    "unsaved_answers",
                    "user_limits",
                )
            ),
            wider=(
                "tests/server",
                "tests/events/test_feeds.py",
                "tests/client/test_real_server.py",
            ),
        )
        for path in ("upr_server/net/handlers", "upr_server/net/streamer.py")
    ),
    Concern(
        "upr_server/replication",
        ("tests/replication",),
        slow=(
            "tests/replication/test_failovers.py",
            "tests/replication/test_replicated_writes.py",
            "tests/replication/test_replication.py",
            "tests/replication/test_restarts.py",
        ),
        wider=(SIMULATED_SEEDS, "tests/server"),
    ),
    Concern(
        "upr_protocol/client/core",
        ("tests/client/core",),
        wider=("tests/client/trio", "tests/client/blocking"),
    ),
    Concern("upr_protocol/client/rollback", ("tests/client/rollback",)),
)
"""What may be broken."""


@attrs.frozen
class Candidate:
    """A mutant, its module, and what concerns it."""

    module: str
    mutant: Mutant
    concern: Concern

    def __str__(self) -> str:
        mutant = self.mutant
        return f"{self.module}:{mutant.line}: {_short(mutant.before)}  ->  {_short(mutant.after)}"


def _short(code: str) -> str:
    return " ".join(code.split())[:80]


def candidates(modules: Sequence[str], seed: int) -> list[Candidate]:
    """One for each line that can be broken, of the modules under these paths; of all if none."""
    return [
        Candidate(name, mutant, concern)
        for concern in CONCERNS
        for name in _modules_under(concern.path)
        if not modules or any(name.startswith(module) for module in modules)
        for mutant in mutants_of((ROOT / name).read_text(), Random(f"{seed} {name}"))
    ]


def _modules_under(path: str) -> list[str]:
    paths = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
    return [str(module.relative_to(ROOT)) for module in paths]


@click.command()
@click.argument("modules", nargs=-1)
@click.option("--sample", type=int, default=0, help="Try so many lines, drawn at random.")
@click.option("--seed", type=int, default=0, help="Chooses the lines and how each is broken.")
def main(modules: Sequence[str], sample: int, seed: int) -> None:
    """Breaks one line at a time, and lists those that no test fails for."""
    mutants = candidates(modules, seed)
    if sample:
        # Not put in order: a run that is interrupted has tried a smaller sample.
        mutants = Random(seed).sample(mutants, min(sample, len(mutants)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trials = Trials(Path(folder).resolve())
        subprocess.run(
            ["git", "checkout-index", "-a", f"--prefix={trials.tree}/"], cwd=ROOT, check=True
        )
        for library in (ROOT / "upr_kernel").glob("_native*.so"):
            shutil.copy(library, trials.tree / "upr_kernel")
        unnoticed = _unnoticed(trials, mutants)
        survivors = Counter(candidate.module for candidate in _survivors(trials, unnoticed))
        for module, lines in Counter(candidate.module for candidate in mutants).items():
            click.echo(f"{survivors[module]:4} of {lines:4} survived: {module}")


def _unnoticed(trials: Trials, mutants: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no quick test notices. All are tried before any slow test is."""
    costs = {
        concern: trials.costs(
            concern.tests, {c.module for c in mutants if c.concern == concern}, concern.slow
        )
        for concern in dict.fromkeys(candidate.concern for candidate in mutants)
    }
    unnoticed = []
    for index, candidate in enumerate(mutants, 1):
        concern = candidate.concern
        if not trials.is_found(candidate.module, candidate.mutant, costs[concern]):
            unnoticed.append(candidate)
            click.echo(f"no quick test notices {candidate}", err=True)
        if index % 20 == 0 or index == len(mutants):
            click.echo(
                f"{index} of {len(mutants)} lines broken, {len(unnoticed)} unnoticed", err=True
            )
    return unnoticed


def _survivors(trials: Trials, unnoticed: Sequence[Candidate]) -> Iterator[Candidate]:
    """Prints and yields the candidates that the slow and the wider tests do not notice either."""
    for candidate in unnoticed:
        tests = (
            *candidate.concern.wider[:1],
            *candidate.concern.slow,
            *candidate.concern.wider[1:],
        )
        if tests and trials.is_found_by_all(candidate.module, candidate.mutant, tests):
            continue
        click.echo(str(candidate))
        yield candidate


if __name__ == "__main__":
    main()
