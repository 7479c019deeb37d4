"""The hook that reads a commit's first line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.process import ROOT


def check(tmp_path: Path, subject: str) -> subprocess.CompletedProcess[str]:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nThe body says why.\n")
    return subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_subject.py", message],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "subject",
    [
        "Reject index keys with trailing bytes",
        "Fence every holder before resuming a takeover",
        "Seed the scheduler in the cancellation tests",
        'Revert "Types"',
    ],
)
def test_an_imperative_that_says_what_changes_passes(tmp_path: Path, subject: str) -> None:
    run = check(tmp_path, subject)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [
        ("Types", "too short"),
        ("A key whose rest is none is refused", "imperative"),
        ("Added a check of the key's trailing bytes", "imperative"),
        ("reject index keys with trailing bytes", "capital"),
        ("Reject index keys with trailing bytes.", "full stop"),
        ("Reject index keys that have trailing bytes because no number leaves them there", "78"),
    ],
)
def test_a_first_line_that_tells_a_stranger_nothing_is_refused(
    tmp_path: Path, subject: str, complaint: str
) -> None:
    run = check(tmp_path, subject)
    assert run.returncode == 1
    assert complaint in run.stderr
