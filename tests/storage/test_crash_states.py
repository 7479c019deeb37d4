"""What LMDB leaves of a log when the machine goes down at any moment, with any unsynced write lost.

The writes are those that LMDB really makes; see `crash_states` for the rest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.kit.effort import effort
from tests.kit.process import ROOT, environment
from tests.storage.crash_states import COMMITS, Tally
from tests.storage.write_recorder import is_possible

STATES_MIN: Final = effort(1_000, 5_000)

pytestmark = pytest.mark.skipif(
    not is_possible(), reason="the writes of a library are only recorded on Linux, 64 bits"
)


def run(program: str, folder: Path) -> str:
    """What the program complained of; empty when it ended as it should."""
    command = [sys.executable, "-m", "tests.storage.crash_states", program, str(folder)]
    process_result = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    return (
        process_result.stderr
        if process_result.returncode == 0
        else f"{process_result.returncode}: {process_result.stderr}"
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crashes")
    assert run("record", folder) == ""
    return folder


def tally_of(work: Path) -> Tally:
    return msgspec.msgpack.decode((work / "tally").read_bytes(), type=Tally)


def test_every_crash_leaves_the_last_commit_that_was_reported_or_the_one_under_way(
    recorded: Path,
) -> None:
    complaint = run("replay", recorded)
    work = recorded / "replay"
    assert complaint == "", (work / "state").read_text()
    tally = tally_of(work)
    assert not tally.wrong, f"{len(tally.wrong)} of {tally.states}, such as {tally.wrong[0]}"
    assert tally.different >= STATES_MIN
    assert tally.commits >= COMMITS * 0.9
    assert tally.lost > STATES_MIN / 4
    assert tally.torn > STATES_MIN / 4
    # Some crashes came so late that their commit was there, and what is left can be written on.
    assert tally.newer > STATES_MIN / 50
    assert tally.written_on > effort(50, 100)


def test_a_disk_that_confirms_writes_too_early_is_detected(recorded: Path) -> None:
    complaint = run("replay-lies", recorded)
    if complaint:
        # LMDB follows what its pages say, and theirs may lead anywhere.
        assert complaint.startswith("-"), complaint
        return
    tally = tally_of(recorded / "replay-lies")
    assert tally.wrong
