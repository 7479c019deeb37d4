"""docs/guarantees.md: every promise names a test, and every named test exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TEXT: Final = (ROOT / "docs" / "guarantees.md").read_text()

BAD_PEERS: Final = "tests/system/test_bad_peers.py"
"""The file of the tests in the table, which are named without it."""


def test_every_named_test_exists() -> None:
    test_names = {
        *re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", TEXT),
        *(f"{BAD_PEERS}::{name}" for name in re.findall(r"`::(\w+)`", TEXT)),
    }
    assert len(test_names) > 200
    assert sorted(test for test in test_names if not _exists(test)) == []


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    definition = re.compile(rf"^(?:async )?(?:def|class) {name}\b", re.MULTILINE)
    return path.is_file() and (not name or definition.search(path.read_text()) is not None)


def test_every_promise_names_a_test() -> None:
    promises = TEXT.partition("## I1")[2].partition("## Not promised")[0]
    paragraphs = re.findall(r"^\*\*.*?(?=\n\n\*\*|\n##)", promises, re.MULTILINE | re.DOTALL)
    without = [paragraph for paragraph in paragraphs if "`tests/" not in paragraph]
    assert len(paragraphs) > 20
    assert without == []
