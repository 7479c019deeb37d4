"""Why an operator's command was not carried out."""

from __future__ import annotations

from upr_protocol.errors import UprError


class NotDoneError(UprError):
    """It was refused here, and everything is as it was; the sentence says what to do."""


class PartlyDoneError(UprError):
    """It was not finished; the sentence says how things stand, and what to do."""


class OvertakenError(PartlyDoneError):
    """A node has a map that this command did not give."""


class UnreachableError(PartlyDoneError):
    """A node did not answer: it may have carried a map out, or not, or do so yet."""


class MapRefusedError(PartlyDoneError):
    """A node refused a map: it has not carried it out."""
