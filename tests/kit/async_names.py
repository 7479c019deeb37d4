"""The names of public functions that are asynchronous, or return asynchronous context managers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_OPERATORS = {"__anext__", "__call__"}


def name_of(function: Callable[..., object]) -> str:
    """`module.Class.function`, as `cancelled_at_each_step` names the functions that it
    cancelled."""
    function = inspect.unwrap(function)
    return f"{function.__module__}.{function.__qualname__}"


def exported(module: ModuleType) -> set[str]:
    """The names among what a package exports."""
    things = (getattr(module, name) for name in module.__all__)
    return {name for thing in things for name in _names(thing)}


def below(*packages: str) -> set[str]:
    """The names in all modules of packages."""
    return {name for package in packages for name in _below(importlib.import_module(package))}


def _below(module: ModuleType) -> Iterator[str]:
    for name, thing in vars(module).items():
        if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__:
            yield from _names(thing)
    for submodule in pkgutil.iter_modules(getattr(module, "__path__", ())):
        yield from _below(importlib.import_module(f"{module.__name__}.{submodule.name}"))


def _names(thing: Any) -> Iterator[str]:
    if not inspect.isclass(thing):
        if _is_async(thing):
            yield name_of(thing)
    elif not getattr(thing, "_is_protocol", False):
        for name, member in inspect.getmembers(thing):
            if (not name.startswith("_") or name in _OPERATORS) and _is_async(member):
                yield name_of(member)


def _is_async(thing: Any) -> bool:
    if not inspect.isfunction(thing) or getattr(thing, "__isabstractmethod__", False):
        return False
    inner = inspect.unwrap(thing)
    return inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)
