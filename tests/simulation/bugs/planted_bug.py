"""A planted bug: a part of the code replaced on purpose, and the seeds that must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import attrs

from tests.simulation.profiles import Profile

SEEDS: Final = 10
"""How many seeds of its profile a bug is looked for in, unless it says otherwise."""


@attrs.frozen
class PlantedBug:
    """A planted bug.

    Attributes:
        name: What the broken code does.
        plant: Puts the bug into the code, for as long as the context.
        profile: Makes the situation that the bug needs.
        seeds: In how many seeds of the profile it must be found.
    """

    name: str
    plant: Callable[[], AbstractContextManager[None]]
    profile: Profile
    seeds: int


def planted(
    profile: Profile, seeds: int = SEEDS
) -> Callable[[Callable[[], Iterator[None]]], PlantedBug]:
    """Makes a planted bug of a generator that puts it into the code and takes it out again."""

    def decorate(function: Callable[[], Iterator[None]]) -> PlantedBug:
        return PlantedBug(function.__name__, contextmanager(function), profile, seeds)

    return decorate
