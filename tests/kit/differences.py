"""The differences between two large mappings, in a few lines.

If `==` failed, pytest would print all contents of both, which takes longer than the test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

TOLD: Final = 5
"""How many of each kind are named."""


def differences(
    actual: Mapping[Key, Value], expected: Mapping[Key, Value]
) -> dict[str, tuple[int, list[Key]]]:
    """For each kind of difference, how many keys have it and the first few; empty if the mappings
    are equal."""
    kinds = {
        "missing": [key for key in expected if key not in actual],
        "too many": [key for key in actual if key not in expected],
        "other value": [k for k, value in expected.items() if k in actual and actual[k] != value],
    }
    return {kind: (len(keys), keys[:TOLD]) for kind, keys in kinds.items() if keys}
