"""What became of the rows of a file, counted, with the first of each kind of trouble kept."""

from __future__ import annotations

from collections import Counter
from typing import Final

import attrs

from upr_protocol.client import Failure
from upr_protocol.errors import ADVICE, Status

EXAMPLES_MAX: Final = 5
"""Enough to find what is wrong, few enough to read."""


@attrs.define
class Lines:
    """Lines that have something in common: their count, and the first few.

    Attributes:
        count: How many.
        first: The first of them, as texts.
    """

    count: int = 0
    first: list[str] = attrs.field(factory=list)

    def add(self, text: str) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < EXAMPLES_MAX:
            self.first.append(text)

    def __str__(self) -> str:
        more = ", …" if self.count > len(self.first) else ""
        return ", ".join(self.first) + more


@attrs.define
class Tally:
    """What became of the rows so far.

    Attributes:
        rows: Rows read, good and bad.
        sent: Rows handed to the publisher.
        nbytes: Bytes of their keys and values.
        keyless: Rows without a key.
        bad: Rows that could not be read.
        failures: Rows that the server refused, by reason.
        failed: The keys of the first of them, by reason.
    """

    rows: int = 0
    sent: int = 0
    nbytes: int = 0
    keyless: Lines = attrs.field(factory=Lines)
    bad: Lines = attrs.field(factory=Lines)
    failures: Counter[Status] = attrs.field(factory=Counter)
    failed: dict[Status, Lines] = attrs.field(factory=dict)

    def refused(self, failure: Failure) -> None:
        """The server refused a row."""
        self.failures[failure.status] += 1
        lines = self.failed.setdefault(failure.status, Lines())
        lines.add(failure.key.decode(errors="backslashreplace"))

    @property
    def loaded(self) -> int:
        """Rows that the server has taken, once the publisher is done."""
        return self.sent - self.failures.total()

    def troubles(self, unit: str) -> list[str]:
        """A sentence for each kind of trouble.

        Args:
            unit: What `keyless` and `bad` count: `line` or `row`.
        """
        sentences = []
        if self.keyless.count:
            sentences.append(
                f"{_count(self.keyless.count)} rows left out, as they have no key: "
                f"{unit}s {self.keyless}"
            )
        if self.bad.count:
            sentences.append(f"{_count(self.bad.count)} bad rows left out: {unit}s {self.bad}")
        for status, count in self.failures.most_common():
            reason = status.name.replace("_", " ").lower()
            sentences.append(
                f"{_count(count)} rows refused by the server, {reason} ({ADVICE[status]}): "
                f"{self.failed[status]}"
            )
        return sentences


def _count(number: int) -> str:
    return f"{number:,}"
