"""Mutants: what is changed, and what is left alone."""

from __future__ import annotations

from random import Random
from typing import Final

import pytest

from tests.mutation.mutants import mutants_of

MODULE: Final = '''"""A module."""

import os

LIMIT = 3


def grow(low: int, text: str = "ü") -> int:
    """It grows."""
    assert low
    if low < LIMIT and os:
        return low + 1
    low -= 1
    return low


class Box:
    """A box."""

    def __repr__(self) -> str:
        return str(1 + 1)

    def put(self, item: int) -> None:
        """Puts."""
        self.item = item
'''


def test_each_line_that_decides_something_is_broken_once() -> None:
    mutants = mutants_of(MODULE, Random(0))
    assert [mutant.line for mutant in mutants] == [5, 11, 12, 13, 14, 25]
    for mutant in mutants:
        compile(mutant.source, "module", "exec")
        changed = [
            line
            for line, (before, after) in enumerate(
                zip(MODULE.splitlines(), mutant.source.splitlines(), strict=True), 1
            )
            if before != after
        ]
        assert changed == [mutant.line]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = 3", {"x = (4)"}),
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a is not b", {"x = (a is b)"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = not a", {"x = (a)"}),
        ("x = min(a)", {"x = (max)(a)"}),
        ("x = a - b", {"x = (a + b)"}),
        ("x = True", {"x = (False)"}),
        ("a.b = c", {"pass"}),
        ("call(a)", {"pass"}),
        ("assert a < b", set()),
        ('"""Text."""', set()),
    ],
)
def test_a_line_is_broken_in_one_way(before: str, after: set[str]) -> None:
    assert {mutant.source for mutant in mutants_of(before, Random(0))} == after
