"""Why a command was not carried out."""

from __future__ import annotations

from upr_protocol.errors import UprError


class NotDoneError(UprError):
    """The command refused, and changed nothing. The message says what to do."""


class PartlyDoneError(UprError):
    """The command did not finish. The message says what was done, and what to do."""


class OvertakenError(PartlyDoneError):
    """A node has a map that another command made."""


class UnreachableError(PartlyDoneError):
    """A node did not answer. It may have applied a map, or may do so later."""


class MapRefusedError(PartlyDoneError):
    """A node refused a map, and did not apply it."""
