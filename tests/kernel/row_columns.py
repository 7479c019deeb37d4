"""The columns of rows, as the kernel takes them."""

from __future__ import annotations

from array import array
from itertools import accumulate

from upr_protocol.chunk import Mutation


def offsets(strings: list[bytes], begin: int) -> bytes:
    return array("q", accumulate(map(len, strings), initial=begin)).tobytes()


def columns(rows: list[Mutation], before: bytes = b"") -> tuple[bytes, ...]:
    """The columns of some rows; their strings stand behind others."""
    keys, values = [row.key for row in rows], [row.value for row in rows]
    return (
        offsets(keys, len(before)),
        before + b"".join(keys) + before,
        offsets(values, len(before)),
        before + b"".join(values),
        bytes(row.op for row in rows),
        array("Q", [row.cas for row in rows]).tobytes(),
        array("I", [row.flags for row in rows]).tobytes(),
        array("I", [row.expiry for row in rows]).tobytes(),
    )
