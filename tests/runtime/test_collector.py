"""When Python's collector looks at which objects."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.reference_cycles import no_collections
from upr_server.runtime.collector import YOUNG_OBJECTS, YoungObjects, keeps_ended_frames

AN_OLD_CYCLE_IS_FOUND: Final = """
import gc
import weakref

from upr_server.runtime import {name}

class Member:
    pass

{name}()
member = Member()
member.itself = member
reference = weakref.ref(member)
gc.collect(0)
del member
gc.collect()
print(reference() is None)
"""


class SwallowedError(Exception):
    pass


@contextmanager
def swallowing() -> Iterator[None]:
    with suppress(SwallowedError):
        yield


def test_a_python_that_keeps_ended_frames_is_known() -> None:
    """On it, an exception that a context manager has swallowed is garbage in a cycle."""
    references: list[weakref.ref[SwallowedError]] = []

    def fail() -> None:
        error = SwallowedError()
        references.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    with no_collections():
        with swallowing():
            fail()
        assert (references[0]() is not None) is keeps_ended_frames()


@pytest.mark.parametrize(
    ("name", "is_found"), [("collect_rarely", True), ("collect_only_young", False)]
)
def test_an_old_cycle_is_found_where_all_objects_are_looked_at(
    *, name: str, is_found: bool
) -> None:
    code = AN_OLD_CYCLE_IS_FOUND.format(name=name)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == f"{is_found}\n"


@given(st.lists(st.one_of(st.none(), st.integers(1, YOUNG_OBJECTS // 2)), max_size=60))
def test_young_objects_are_looked_at_in_time(made: list[int | None]) -> None:
    """None stands for a collection that Python begins itself."""
    collections = 0

    def collect() -> None:
        nonlocal collections
        collections += 1

    young = YoungObjects(collect)
    young.note_made(YOUNG_OBJECTS)
    collections_before_start = collections
    young.start()
    try:
        assert (collections_before_start, collections) == (0, 1)
        gc.collect(0)
        count = 0
        for objects in made:
            before = collections
            if objects is None:
                gc.collect(0)
                count = 0
                continue
            young.note_made(objects)
            count += objects
            assert collections == before + (count >= YOUNG_OBJECTS)
            if count >= YOUNG_OBJECTS:
                count = 0
    finally:
        young.stop()
