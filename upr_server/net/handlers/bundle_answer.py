"""The answer to a bundle: what became of each of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final, cast

from upr_protocol.concurrency import without_traceback
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Mutate, MutateReply, RunResult, decode_results
from upr_server.engine import MutateResult
from upr_server.net.request_context import RequestContext

_FIRST_ROW: Final = itemgetter(0)


class BundleAnswer:
    """What became of the runs of one bundle, which are applied together or one by one.

    Args:
        partitions: The partitions of the runs, in their order.

    Attributes:
        unfinished_count: How many runs are not finished: whether they are as durable as was asked
            is not known yet.
    """

    __slots__ = (
        "_error",
        "_is_wrong_node",
        "_lines",
        "_partitions",
        "_results",
        "_row_results",
        "_undurable_results",
        "unfinished_count",
    )

    def __init__(self, partitions: Sequence[PartitionId]) -> None:
        self.unfinished_count = len(partitions)
        self._partitions = partitions
        self._lines = b""
        """What became of the runs, as the kernel said, if all were applied together."""
        self._undurable_results: dict[int, RunResult] = {}
        """Of those of such runs that will not be as durable as was asked, by index."""
        self._results: list[RunResult | None] = [None] * len(partitions)
        self._row_results: list[tuple[int, MutateResult]] = []
        """What became of the runs of which rows failed or have counters, each with its first
        row."""
        self._is_wrong_node = False
        self._error: ServerError | None = None
        """Why a run was refused: the one run, if the bundle has no other."""

    def set_lines(self, lines: bytes, *, is_finished: bool) -> None:
        """All runs were applied together.

        Args:
            lines: What became of them, as the kernel said.
            is_finished: Whether they are as durable as was asked; if not, `finish_line` is called
                for each.
        """
        self._lines = lines
        if is_finished:
            self.unfinished_count = 0

    def finish_line(self, index: int, undurable_result: RunResult | None = None) -> None:
        """One of the runs that were applied together is finished.

        Args:
            index: Which.
            undurable_result: What became of it, if it will not be as durable as was asked.
        """
        if undurable_result is not None:
            self._undurable_results[index] = undurable_result
        self.unfinished_count -= 1

    def finish_line_without_disk(self, index: int, error: ServerError) -> None:
        """The same for one that will not be on disk; `error` says why."""
        self._error = without_traceback(error)
        self.finish_line(index, RunResult(self._partitions[index], error.status))

    def finish(self, index: int, result: RunResult) -> None:
        """A run that was applied by itself is finished."""
        self._results[index] = result
        self.unfinished_count -= 1

    def add_rows(self, first_row: int, result: MutateResult) -> None:
        """Rows of a run have failed, or have counters. `first_row` is the run's, in the bundle."""
        self._row_results.append((first_row, result))

    def refuse(self, index: int, error: ServerError) -> None:
        """A run was refused as a whole, and so is finished."""
        self._is_wrong_node |= error.status is Status.NOT_MY_PARTITION
        self._error = without_traceback(error)
        self.finish(index, RunResult(self._partitions[index], error.status))

    def send(self, context: RequestContext, request: Mutate) -> int:
        """Answers the request, of which every run is finished.

        Returns:
            How many runs, failures and counters that took time for.
        """
        row_count = 0
        if self._lines and not self._undurable_results:
            context.answer_bundle(request, self._lines)
        elif self._error is not None and len(self._results) == 1:
            context.refuse_for(request, self._error)  # in words
        else:
            row_count = self._send_results(context, request)
        context.wake()
        return row_count

    def _send_results(self, context: RequestContext, request: Mutate) -> int:
        results = self._results
        if self._lines:
            results = [*decode_results(self._lines)]
            for index, undurable_result in self._undurable_results.items():
                results[index] = undurable_result
        failures, counters = list[tuple[int, int]](), list[tuple[int, int]]()
        # Runs may finish in another order than theirs.
        for low, result in sorted(self._row_results, key=_FIRST_ROW):
            failures += [(low + row, reason) for row, reason in result.failures]
            counters += (
                [(low + row, value) for row, value in result.counters] if low else result.counters
            )
        context.send(
            MutateReply(
                context.map_revision if self._is_wrong_node else 0,
                tuple(cast("list[RunResult]", results)),
                tuple(failures),
                tuple(counters),
                opaque=request.opaque,
            )
        )
        return len(results) + len(failures) + len(counters)
