"""Every change that was written, and what the documents were at any timestamp."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from upr_protocol.client import WriteResult


@attrs.define
class WriteLog:
    """The changes of one history, by partition.

    Attributes:
        changes: By partition: the number, the key and the value of each change; None for a
            deletion.
    """

    changes: dict[int, list[tuple[int, bytes, bytes | None]]] = attrs.field(factory=dict)

    def add(self, result: WriteResult, key: str, value: str | None) -> None:
        """Notes a change that was acknowledged."""
        data = None if value is None else value.encode()
        self.changes.setdefault(result.partition, []).append((result.seq, key.encode(), data))

    def newest(self) -> dict[int, int]:
        """By partition, the highest number."""
        return {partition: changes[-1][0] for partition, changes in self.changes.items()}

    def contents_at(self, timestamps: Mapping[int, tuple[str, int]]) -> dict[bytes, bytes]:
        """The documents at a timestamp that a scan has told. O(changes)."""
        contents: dict[bytes, bytes] = {}
        for partition, changes in self.changes.items():
            _, through = timestamps.get(partition, ("", 0))
            for seq, key, value in changes:
                if seq > through:
                    continue
                if value is None:
                    contents.pop(key, None)
                else:
                    contents[key] = value
        return contents
