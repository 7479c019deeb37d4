"""Work in steps, between which others may have their turn, done at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def result_of(steps: Generator[None, None, T]) -> T:
    """Does all steps; returns what they come to. `upr_protocol.concurrency.run_steps` lets others
    have their turn between them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
