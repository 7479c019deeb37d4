"""The builds of the kernel that there are here: each test of `tests/kernel` tries all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from upr_kernel import pure
from upr_kernel.defects import ChunkDefectError


def _builds() -> dict[str, ModuleType]:
    builds: dict[str, ModuleType] = {"pure": pure}
    with suppress(ImportError):
        builds["native"] = import_module("upr_kernel._native")
    return builds


BUILDS: Final = _builds()

Outcome = tuple[str, Any]


def outcome(call: Callable[..., Any], *args: Any) -> Outcome:
    """What a call returns, or the kind of error that it raises."""
    try:
        return "returned", call(*args)
    except ChunkDefectError as error:
        return "damaged", error.defect
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        return "raised", type(error)


def agreed(name: str, *args: Any) -> Outcome:
    """The outcome of one of the kernel's functions, in which all builds agree."""
    outcomes = [outcome(getattr(build, name), *args) for build in BUILDS.values()]
    assert all(result == outcomes[0] for result in outcomes), (name, args, outcomes)
    return outcomes[0]
