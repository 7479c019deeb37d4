"""Why a row has no figure."""

from __future__ import annotations


class CannotMeasureError(Exception):
    """The row could not be measured; the message is one sentence that says what to do."""
