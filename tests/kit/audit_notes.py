"""An audit log in memory."""

from __future__ import annotations

from upr_server.runtime import AuditLog


class AuditNotes(AuditLog):
    """Keeps audit notes unchanged.

    Attributes:
        notes: Each event, and its fields.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, object]]] = []

    def note(self, event: str, **fields: object) -> None:
        """Keeps an event."""
        self.notes.append((event, fields))
