"""Nodes as processes: a short sample of the rounds in `rounds.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.indexer.rounds import running
from tests.kit.effort import effort

ROUNDS = effort(1, 200)


@pytest.mark.timeout(effort(240, 3600))
def test_rounds_of_kills_and_hangs(tmp_path: Path) -> None:
    with running(tmp_path, replicas=1, seed=0) as rounds:
        for _ in range(ROUNDS):
            rounds.disturb()
            for _ in range(3):
                rounds.scan()
        rounds.restore()
        assert rounds.outcome.answers
