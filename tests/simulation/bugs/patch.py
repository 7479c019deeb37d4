"""Replacing a part of a class or a module for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, part: Any) -> Iterator[None]:
    """Has `owner.name` be `part` for as long as the context."""
    before = vars(owner)[name]
    setattr(owner, name, part)
    try:
        yield
    finally:
        setattr(owner, name, before)
