"""An audit log in memory."""

from __future__ import annotations

from upr_server.runtime import AuditLog


class AuditNotes(AuditLog):
    """What is noted, as it is.

    Attributes:
        notes: Each event, and its fields.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, object]]] = []

    def note(self, event: str, **fields: object) -> None:
        """Keeps it."""
        self.notes.append((event, fields))
