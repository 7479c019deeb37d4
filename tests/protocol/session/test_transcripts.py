"""The conversations in `transcripts/` go as they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.session.transcript import DIRECTORY, replay

FILES = sorted(DIRECTORY.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    assert replay(text) == text


def test_the_transcripts_exist_and_expect_something() -> None:
    assert len(FILES) >= 8
    for path in FILES:
        assert path.read_text().count("----") >= 2
