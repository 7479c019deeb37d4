"""What happened to the rows of a file: counts, and the first rows of each kind of problem."""

from __future__ import annotations

from collections import Counter
from typing import Final

import attrs

from upr_protocol.client import Failure
from upr_protocol.errors import ADVICE, Status

EXAMPLES_MAX: Final = 5
"""Enough to find the cause, few enough to read."""


@attrs.define
class ExampleRows:
    """Rows with the same problem: how many there are, and the first few.

    Attributes:
        count: How many.
        examples: The first of them, as texts.
    """

    count: int = 0
    examples: list[str] = attrs.field(factory=list)

    def add(self, text: str) -> None:
        """Counts one more row."""
        self.count += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(text)

    def __str__(self) -> str:
        ellipsis = ", …" if self.count > len(self.examples) else ""
        return ", ".join(self.examples) + ellipsis


@attrs.define
class LoadReport:
    """What happened to the rows so far.

    Attributes:
        rows: Rows read, good and bad.
        rows_sent: Rows passed to the publisher.
        nbytes: Bytes of their keys and values.
        keyless: Rows without a key.
        bad: Rows that could not be read.
        refused_counts: Rows that the server refused, counted by status.
        refused_keys: The keys of the first of them, by status.
    """

    rows: int = 0
    rows_sent: int = 0
    nbytes: int = 0
    keyless: ExampleRows = attrs.field(factory=ExampleRows)
    bad: ExampleRows = attrs.field(factory=ExampleRows)
    refused_counts: Counter[Status] = attrs.field(factory=Counter)
    refused_keys: dict[Status, ExampleRows] = attrs.field(factory=dict)

    def add_refused(self, failure: Failure) -> None:
        """Counts a row that the server refused."""
        self.refused_counts[failure.status] += 1
        keys = self.refused_keys.setdefault(failure.status, ExampleRows())
        keys.add(failure.key.decode(errors="backslashreplace"))

    @property
    def loaded(self) -> int:
        """Rows that the server has accepted, once the publisher has been flushed."""
        return self.rows_sent - self.refused_counts.total()

    def problems(self, unit: str) -> list[str]:
        """A sentence for each kind of problem.

        Args:
            unit: What the numbers of keyless and bad rows count: `line` or `row`.
        """
        sentences = []
        if self.keyless.count:
            sentences.append(
                f"{self.keyless.count:,} rows skipped because they have no key: "
                f"{unit}s {self.keyless}"
            )
        if self.bad.count:
            sentences.append(f"{self.bad.count:,} bad rows skipped: {unit}s {self.bad}")
        for status, count in self.refused_counts.most_common():
            reason = status.name.replace("_", " ").lower()
            sentences.append(
                f"{count:,} rows refused by the server, {reason} ({ADVICE[status]}): "
                f"{self.refused_keys[status]}"
            )
        return sentences
