"""docs/guarantees.md: every promise names a test, and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
TEXT: Final = (ROOT / "docs" / "guarantees.md").read_text()

BAD_PEERS: Final = "tests/system/test_bad_peers.py"
"""The file of the tests in the table, which are named without it."""

NAMED: Final = sorted(
    {
        *re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", TEXT),
        *(f"{BAD_PEERS}::{name}" for name in re.findall(r"`::(\w+)`", TEXT)),
    }
)


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_is_named_is_there(named: str) -> None:
    file, _, name = named.partition("::")
    path = ROOT / file
    assert path.is_file()
    if name:
        assert re.search(rf"^(?:async )?(?:def|class) {name}\b", path.read_text(), re.MULTILINE)


def test_every_promise_names_a_test() -> None:
    promises = TEXT.partition("## I2")[2].partition("## Not promised yet")[0]
    paragraphs = re.findall(r"^\*\*.*?(?=\n\n\*\*|\n##)", promises, re.MULTILINE | re.DOTALL)
    without = [paragraph for paragraph in paragraphs if "`tests/" not in paragraph]
    assert len(paragraphs) > 20
    assert without == []
