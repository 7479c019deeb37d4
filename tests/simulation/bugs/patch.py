"""Replacing a part of a class or a module for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, part: Any) -> Iterator[None]:
    """Has `owner.name` be `part` for as long as the context.

    Raises:
        TypeError: `part` is another kind of thing, or a function that takes other arguments. Calls
            of it would fail, and a bug would be found that is not the one that was meant.
    """
    before = vars(owner)[name]
    _check_alike(f"{owner.__name__}.{name}", before, part)
    setattr(owner, name, part)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _check_alike(name: str, before: Any, part: Any) -> None:
    is_property = isinstance(before, property)
    if is_property != isinstance(part, property):
        raise TypeError(f"{name} is {'a' if is_property else 'no'} property")
    if not inspect.isfunction(before) or not inspect.isfunction(part):
        return
    parameters = inspect.signature(before).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    for given in (required, parameters):
        _check_call(name, part, given)


def _check_call(name: str, part: Callable[..., Any], given: Any) -> None:
    """Checks that `part` can be called with these parameters of what it replaces."""
    positional = [
        parameter.name
        for parameter in given
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    by_name = {
        parameter.name: None for parameter in given if parameter.kind is parameter.KEYWORD_ONLY
    }
    try:
        inspect.signature(part).bind(*positional, **by_name)
    except TypeError as error:
        raise TypeError(f"what replaces {name} takes other arguments: {error}") from error
