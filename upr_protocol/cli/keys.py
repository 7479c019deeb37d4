"""Keys made of a row's columns."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from upr_protocol.limits import KEY_BYTES_MAX


class KeyMaker:
    """Makes the key of a row.

    Args:
        columns: The columns whose values it is made of, in this order.
        separator: What stands between two of them.
    """

    __slots__ = ("_columns", "_separator")

    def __init__(self, columns: Sequence[str], separator: str = ":") -> None:
        self._columns = tuple(columns)
        self._separator = separator.encode()

    def key(self, fields: Mapping[str, Any]) -> bytes | None:
        """The key of the row with these `fields`; None when a part of it is missing or empty.

        Raises:
            ValueError: It cannot be a key; the message says why.
        """
        parts = []
        for column in self._columns:
            part = _part(column, fields.get(column))
            if not part:
                return None
            parts.append(part)
        key = self._separator.join(parts)
        if len(key) > KEY_BYTES_MAX:
            raise ValueError(f"its key has {len(key)} bytes; at most {KEY_BYTES_MAX}")
        return key


def _part(column: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if value is None:
        return b""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int | float):
        return str(value).encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, dt.date | dt.time):
        return value.isoformat().encode()
    raise ValueError(f"{column} holds a {type(value).__name__}, of which no key can be made")
