"""How many rounds a test makes that could run for ever."""

from __future__ import annotations

import os
from typing import Final, TypeVar

import pytest

T = TypeVar("T")

VARIABLE: Final = "UPR_THOROUGH"
THOROUGH: Final = bool(os.environ.get(VARIABLE))
"""Whether all of it is done; if not, a sample, so that the suite ends in its time."""

thorough = pytest.mark.skipif(
    not THOROUGH, reason=f"takes long, and a quicker test stands for it; {VARIABLE}=1 runs it"
)
"""Marks a test that runs only where all is done."""


def effort(sample: T, whole: T) -> T:
    """How many rounds: restarts, bits, or mutations, for example."""
    return whole if THOROUGH else sample
