"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Final

import click

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def size(text: str) -> int:
    """The bytes that `text` means: `4096`, `512M`, `1.5GiB`; the units are powers of 1,024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; write bytes, or as in 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def size_text(count: float) -> str:
    """`count` bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
