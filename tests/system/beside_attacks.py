"""What a good publisher and a good consumer keep of their rate beside attacks: a table.

    python -m tests.system.beside_attacks [--seconds 3] [NAME ...]

Not a test, but for a quiet machine: rates mean nothing while others use it. All attacks take less
than five minutes. Each attack has a server of its own. The good clients
(`tests/kit/good_clients.py`) keep a pace of 20 rounds a second: 50 changes, their acknowledgement,
a barrier, and a comparison of what came with what was published. First they are alone, then beside
the attack. The table says

- their rounds a second alone and beside the attack, and the share that they kept;
- how long a round took, the median and the worst, alone and beside it;
- the share of one core that the server took, in processor time;
- the server's memory, in MiB: before the attack, at its peak, and some seconds after it;
- the server's longest step and its longest turn, in processor time, and whose step it was.

The last line says for each bound how many attacks kept it. Good clients and attackers have a
process each, and the attackers leave the processor to the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import median
from typing import Final, Self

import attrs
import trio

from tests.kit.good_clients import PACE_S, good_clients
from tests.kit.json_lines import JsonLines
from tests.kit.process import ROOT, ServerProcess, environment, many_descriptors, server_process
from tests.system.attacks import ATTACKS, MIB, NARROW, WIDE, Attack, Target
from upr_protocol.client import connect
from upr_protocol.limits import PARTITIONS_MAX

BEGIN_S: Final = 2.5
"""By then the attackers are at work."""

AFTER_S: Final = 4.0
LATE_S: Final = 60.0
GOOD: Final = "good"

RATE_SHARE_MIN: Final = 0.95
WORST_MAX_S: Final = 0.1
STEP_MAX_S: Final = 0.01


@attrs.frozen
class Rate:
    """What the good clients did in some seconds.

    Attributes:
        rounds_a_second: Rounds that ended.
        median_s: How long a round took; infinite if none ended.
        worst_s: The longest, also of one that has not ended.
    """

    rounds_a_second: float
    median_s: float
    worst_s: float


@attrs.frozen
class Row:
    """What was measured beside one attack.

    Attributes:
        case: The case of the attack, for example A1.
        name: The attack.
        alone: The good clients before it.
        beside: The good clients beside it.
        processor_share: What the server took of one core.
        memory: The server's resident bytes before, at their peak, and after.
        step_s: The server's longest step.
        step_task: The task that took it.
        turn_s: The server's longest turn.
    """

    case: str
    name: str
    alone: Rate
    beside: Rate
    processor_share: float
    memory: tuple[int, int, int]
    step_s: float
    step_task: str
    turn_s: float

    @property
    def rate_share(self) -> float:
        """The share of their rate that the good clients kept."""
        return self.beside.rounds_a_second / self.alone.rounds_a_second

    def __str__(self) -> str:
        rates, alone, beside = (self.alone, self.beside), self.alone, self.beside
        cells = (
            self.case,
            self.name,
            " → ".join(f"{rate.rounds_a_second:.1f}" for rate in rates),
            f"{self.rate_share:.0%}",
            f"{1000 * alone.median_s:.0f} → {1000 * beside.median_s:.0f}",
            f"{1000 * alone.worst_s:.0f} → {1000 * beside.worst_s:.0f}",
            f"{self.processor_share:.0%}",
            " / ".join(f"{size / MIB:.0f}" for size in self.memory),
            f"{1000 * self.step_s:.1f}",
            f"{1000 * self.turn_s:.1f}",
            self.step_task.removeprefix("upr_server."),
        )
        return row_of(cells)


COLUMNS: Final = (
    "case",
    "attack",
    "rounds/s",
    "kept",
    "median round, ms",
    "worst round, ms",
    "processor",
    "MiB",
    "step, ms",
    "turn, ms",
    "longest step of",
)


def row_of(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


class GoodClients:
    """The good clients' process.

    Args:
        lines: What it says: a list of how long rounds took, as soon as they are over.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._took_s: list[float] = []
        self._round_over_at = 0.0

    @classmethod
    @asynccontextmanager
    async def of(cls, server: ServerProcess) -> AsyncIterator[Self]:
        """They are at work at the server for as long as the context."""
        process = await trio.lowlevel.open_process(
            command(server, GOOD), stdout=subprocess.PIPE, cwd=ROOT, env=environment()
        )
        try:
            good = cls(JsonLines(process, "the good clients", LATE_S))
            async with trio.open_nursery() as nursery:
                await good._hear()
                nursery.start_soon(good._listen)
                yield good
                nursery.cancel_scope.cancel()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                assert process.stdout is not None
                await process.stdout.aclose()

    async def _hear(self) -> None:
        line = await self._lines.next()
        self._took_s += line["took_s"]
        self._round_over_at = trio.current_time()

    async def _listen(self) -> None:
        while True:
            await self._hear()

    async def rate(self, seconds: float) -> Rate:
        """What they do in the next `seconds`."""
        self._took_s = []
        await trio.sleep(seconds)
        took_s = self._took_s
        unfinished_s = trio.current_time() - self._round_over_at
        return Rate(
            len(took_s) / seconds,
            median(took_s) if took_s else math.inf,
            max([*took_s, unfinished_s - PACE_S]),
        )


def command(server: ServerProcess, who: str) -> list[str]:
    """This command, as the good clients or as an attack."""
    module = [sys.executable, "-m", "tests.system.beside_attacks"]
    return [*module, "--server", server.host, str(server.port), who]


def processor_s(pid: int) -> float:
    """What a process has computed."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(case: str, attack: Attack, seconds: float) -> Row:
    """Measures the good clients alone and beside one attack."""
    async with server_process("--node", "a", "--log-level", "error") as server:
        pid = server.process.pid
        async with connect(server.url()) as client:
            await client.create_bucket(NARROW, 1)
            await client.create_bucket(WIDE, PARTITIONS_MAX)
        async with GoodClients.of(server) as good:
            alone = await good.rate(seconds)
            before = server.resident_bytes
            server.forget_peak()
            with tempfile.TemporaryFile() as errors:
                attack_command = ["nice", *command(server, attack.__name__)]
                run_attack = partial(trio.run_process, attack_command, stderr=errors)
                async with trio.open_nursery() as attackers:
                    attackers.start_soon(run_attack)
                    await trio.sleep(BEGIN_S)
                    processor_before_s, began_at = processor_s(pid), trio.current_time()
                    beside = await good.rate(seconds)
                    share = processor_s(pid) - processor_before_s
                    share /= trio.current_time() - began_at
                    attackers.cancel_scope.cancel()
        peak = server.peak_bytes
        await trio.sleep(AFTER_S)
        async with connect(server.url()) as client:
            figures = (await client.stats())["server"]
        return Row(
            case,
            attack.__name__,
            alone,
            beside,
            share,
            (before, peak, server.resident_bytes),
            figures["longest_step_s"],
            figures["longest_step_task"],
            figures["longest_turn_s"],
        )


def say(text: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def summary(rows: Sequence[Row]) -> str:
    """For each bound how many attacks kept it."""
    at_rate = sum(row.rate_share >= RATE_SHARE_MIN for row in rows)
    quick = sum(row.beside.worst_s <= WORST_MAX_S for row in rows)
    short = sum(row.step_s <= STEP_MAX_S for row in rows)
    return (
        f"of {len(rows)} attacks: {at_rate} left the good clients {RATE_SHARE_MIN:.0%} of their "
        f"rate, {quick} no round above {1000 * WORST_MAX_S:.0f} ms, "
        f"{short} the server no step above {1000 * STEP_MAX_S:.0f} ms"
    )


async def measure_all(attacks: Sequence[tuple[str, Attack]], seconds: float) -> None:
    """Prints the table."""
    say(row_of(COLUMNS))
    say(row_of(["---"] * len(COLUMNS)))
    rows = []
    for case, attack in attacks:
        rows.append(await measure(case, attack, seconds))
        say(str(rows[-1]))
    say(summary(rows))


async def be_good(server: Target) -> None:
    """The good clients: they say how long their rounds took."""
    async with good_clients(server) as good:
        rounds_said = 0
        while True:
            await good.more_rounds(1)
            say(json.dumps({"took_s": good.took_s[rounds_said:]}))
            rounds_said = good.rounds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measure good clients beside attacks.")
    all_attacks = [(case, attack) for case, attacks in ATTACKS.items() for attack in attacks]
    by_name = {attack.__name__: attack for _, attack in all_attacks}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name)}")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--server", nargs=2, metavar=("HOST", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = set(options.names or by_name)
    if unknown := names - by_name.keys() - ({GOOD} if options.server else set()):
        parser.error(f"no attack is called {min(unknown)}")
    with many_descriptors():
        if options.server is None:
            attacks = [(case, attack) for case, attack in all_attacks if attack.__name__ in names]
            trio.run(measure_all, attacks, options.seconds)
        else:
            server = Target(options.server[0], int(options.server[1]))
            trio.run(by_name.get(options.names[0], be_good), server)


if __name__ == "__main__":
    main()
