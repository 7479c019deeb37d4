"""Publishing: a bundle is applied run by run, and answered once every run has its result.

Of two bundles that share a partition the first is answered first, so that a publisher hears of each
partition's batches in their order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from upr_protocol.chunk import RUN_BYTES
from upr_protocol.concurrency import without_traceback
from upr_protocol.errors import ChunkError, ServerError, Status
from upr_protocol.ids import Cas, Durability, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import RESULT_BYTES, Mutate, RunResult, decode_results
from upr_server.engine import (
    LONG_RUN_ROWS,
    Bucket,
    BundleBatches,
    Evaluation,
    FetchedItems,
    MutateResult,
    MutationBatch,
    Partition,
    apply_set_runs,
)
from upr_server.engine.evaluation_steps import BYTES_PER_COST
from upr_server.net.handlers.bundle_answer import BundleAnswer
from upr_server.net.handlers.durability import (
    WITHOUT_REPLICAS,
    durability_target,
    replica_count,
    replicated_target,
)
from upr_server.net.partition_request_queue import FETCHED_BYTES_MAX, UNFINISHED, StillNeeded
from upr_server.net.refusals import misplaced_error, not_active_error
from upr_server.net.replies import IN_MEMORY, DurabilityTarget, OrderedReply, call_when_durable
from upr_server.net.request_context import RequestContext, remaining_steps

SLICE_COST: Final = 4096
"""What is done before others have their turn, in plain rows: at about 0.5 µs each, 2 ms."""

RUN_COST: Final = 48
"""What a run costs beside its rows, in plain rows."""

PLAIN_RUN_COST: Final = 12
"""What a run costs beside its rows if it is applied together with others, in plain rows."""

AWAITED_RUNS: Final = 256
"""Runs whose durability one step begins to wait for: at 3 to 5 µs each, a millisecond."""

EXPIRING_RUN_COST: Final = 512
"""What a plain run costs if items of its partition may have expired, in plain rows: up to
`EXPIRE_BEFORE_RUN_MAX` are deleted before it."""

EVALUATION_COST: Final = 128
"""What an evaluation costs beside its operations, and the request to its partition, in plain rows:
30 µs each."""

EVALUATED_BYTES_MAX: Final = FETCHED_BYTES_MAX
"""What the operations of one run may copy of values that are there. A longer run is refused, whole,
as if it needed so much from disk."""

OWED_REPLY_BYTES: Final = 2000
OWED_RUN_BYTES: Final = 800
OWED_ROW_BYTES: Final = 120
"""What a reply takes while it waits, and what is known of each run and of each row that failed or
has a counter, about."""

_MEMORY: Final = Durability.MEMORY  # an enum's attributes are slow to look up
_OK: Final = Status.OK

_SENTENCES: Final = {
    Status.SUPERSEDED: "a later attempt of this writer has reached the partition",
    Status.TOKEN_TOO_OLD: "the partition has forgotten the result of this run",
    Status.REPLAY_DIFFERS: "the chain of this run differs from what the writer sent before",
}
"""Why a partition refuses a run for good."""

_COUNTER_0: Final = "a writer's counters begin at 1: send the run with another one"

_SEND_EARLIER: Final = "send the earlier run of this writer again first"


def mutate(context: RequestContext, request: Mutate) -> Iterator[None] | None:
    """Applies a bundle: a slice of it now, and the rest as the returned iterator goes on."""
    context.credit.note_spent()
    writer = context.access.own_writer(request.writer)
    try:
        batches = BundleBatches(request.bundle, writer, request.attempt)
    except ChunkError as error:
        raise ServerError(Status.BAD_ARGUMENT, str(error)) from error
    try:
        context.access.check_changed_keys(request)
    except ServerError:
        for run, batch in zip(request.bundle.runs, batches, strict=True):
            context.refused_task_runs.note(batch, run.partition)
        raise
    return remaining_steps(_BundleRequest(context, request, batches).apply())


class OnRunDurable(Protocol):
    """Called when a run is as durable as was asked, or will not be; see `OnDurable`."""

    def __call__(
        self, index: int, result: RunResult, is_on_disk: bool, is_replicated: bool = True
    ) -> None:
        """Tells which run of the bundle it is, and what became of it."""


class _BundleRequest(OrderedReply):
    """One `Mutate` that is being applied.

    Each run is a request to its partition. Runs of partitions that have something waiting wait
    behind it; the others go on.
    """

    __slots__ = (
        "_answer",
        "_batches",
        "_context",
        "_flusher",
        "_generation",
        "_request",
        "_rights_error",
        "_row_cost",
        "_unapplied_indexes",
    )

    def __init__(self, context: RequestContext, request: Mutate, batches: BundleBatches) -> None:
        super().__init__(request.bundle.partitions)
        self._context = context
        self._request = request
        self._batches = batches
        self._flusher = context.disk.flusher
        self._generation = context.users.generation
        self._rights_error: ServerError | None = None
        """Why the client may not change the keys any more; None if it may."""
        self._answer = BundleAnswer(self.partitions)
        self._unapplied_indexes: set[int] = set()
        """Of the runs that need their rows still."""
        chunk = request.bundle.chunk
        self._row_cost = 1 + chunk.nbytes / chunk.count / BYTES_PER_COST

    def apply(self) -> Iterator[None]:
        """Starts every run; yields where others should have their turn."""
        order, bundle = self._context.reply_order, self._request.bundle
        is_unconditional = self._batches.columns.is_unconditional
        # Of rows of plain `SET`s nothing is kept.
        kept_row_count = 0 if is_unconditional else len(bundle)
        is_owed = bool(order.newest)
        if is_owed:
            order.add(self, self._owed_bytes(kept_row_count))
        run_count = len(self.partitions)
        run_indexes: Sequence[int] = range(run_count)
        if is_unconditional and min(bundle.row_counts) < LONG_RUN_ROWS:
            lines, run_indexes = yield from self._set_runs()
            self._keep_rows_of(run_indexes)
            if run_indexes:
                yield from self._await_runs(lines, self._finish_plain)
            elif self._request.durability is _MEMORY:
                self._answer.set_lines(lines, is_finished=True)
                order.complete(self)
                return
            else:
                self._answer.set_lines(lines, is_finished=False)
                yield from self._await_runs(lines, self._note_durable)
        else:
            self._keep_rows_of(run_indexes)
        cost = 0
        for index in run_indexes:
            if cost >= SLICE_COST:
                yield
                cost = 0
            cost += RUN_COST + self._start(index)
        # Most are answered by now, and need no place in the order.
        if self._answer.unfinished_count and not is_owed:
            order.add(self, self._owed_bytes(kept_row_count))

    def _owed_bytes(self, kept_row_count: int) -> int:
        """What the reply takes while it waits, about."""
        return (
            OWED_REPLY_BYTES
            + OWED_RUN_BYTES * len(self.partitions)
            + OWED_ROW_BYTES * kept_row_count
        )

    def _keep_rows_of(self, run_indexes: Sequence[int]) -> None:
        """These runs have yet to be applied."""
        self._unapplied_indexes.update(run_indexes)
        if not run_indexes:
            self._release_rows()

    def _note_applied(self, index: int) -> None:
        """A run was applied, or refused."""
        if index in self._unapplied_indexes:
            self._unapplied_indexes.remove(index)
            if not self._unapplied_indexes:
                self._release_rows()

    def _release_rows(self) -> None:
        """No run needs its rows any more. The reply may wait for long: for the disk or replicas, or
        behind another one. Thousands may, and the bucket's quota does not count what they hold."""
        bundle = self._request.bundle.without_rows()
        self._request = msgspec.structs.replace(self._request, bundle=bundle)
        del self._batches

    def _set_runs(self) -> Generator[None, None, tuple[bytes, Sequence[int]]]:
        """Applies the runs of a plain bundle that can be applied together; yields where others
        should have their turn. Returns what became of each, zeros for those that are left, and
        which are left."""
        bundle, lines, run_indexes = self._request.bundle, b"", list[int]()
        low, cost, run_count = 0, 0.0, bundle.run_count
        # Mostly one slice has all of them.
        if PLAIN_RUN_COST * run_count + len(bundle) * self._row_cost > SLICE_COST:
            for index, row_count in enumerate(bundle.row_counts):
                if cost >= SLICE_COST:
                    lines += self._set_some(low, index, run_indexes)
                    yield
                    low, cost = index, 0.0
                cost += PLAIN_RUN_COST + row_count * self._row_cost
        lines += self._set_some(low, run_count, run_indexes)
        return lines, run_indexes

    def _set_some(self, low: int, high: int, run_indexes: list[int]) -> bytes:
        """Applies those of the runs [`low`, `high`) that can be applied together, and adds the
        others to `run_indexes`."""
        context, batches, bundle = self._context, self._batches, self._request.bundle
        bucket = context.bucket
        if bucket is None or self._flusher.disk_full_reason or context.refused_task_runs:
            run_indexes += range(low, high)
            return bytes(RESULT_BYTES * (high - low))
        skipped_runs = None
        needs_replicas = self._request.durability not in WITHOUT_REPLICAS
        if needs_replicas or context.may_have_earlier:
            skipped_runs = bytes(
                [
                    not self._may_apply_at_once(bucket, partition_id, needs_replicas)
                    for partition_id in self.partitions[low:high]
                ]
            )
        applied = apply_set_runs(
            bucket,
            batches.columns,
            bundle.directory[RUN_BYTES * low : RUN_BYTES * high],
            batches.writer,
            batches.attempt,
            context.time(),
            first_row=bundle.bounds[low],
            skip=skipped_runs,
        )
        run_indexes += [low + index for index in applied.remaining_indexes]
        return applied.answer_rows

    def _may_apply_at_once(
        self, bucket: Bucket, partition_id: PartitionId, needs_replicas: bool
    ) -> bool:
        """Whether a run for a partition neither waits behind others nor is to be refused, as far as
        its partition and its level say that."""
        context, copies = self._context, self._request.copies
        return (
            partition_id < len(bucket.partitions)
            and not context.has_earlier(bucket.partitions[partition_id])
            and (not needs_replicas or 0 < copies <= replica_count(context, partition_id))
        )

    def _await_runs(self, lines: bytes, call: OnRunDurable) -> Iterator[None]:
        """Some runs were applied together: calls `call` for each once it is as durable as was
        asked, or will not be. Yields where others should have their turn."""
        target = self._target()
        for index, result in enumerate(decode_results(lines)):
            if index % AWAITED_RUNS == AWAITED_RUNS - 1:
                yield
                target = self._target()
            bucket = self._context.bucket
            if not result.history_id:
                continue
            if bucket is None:
                call(index, result, False)
                continue
            partition, seq = bucket.partitions[result.partition], result.last_seq
            if target.copies and partition.failover_log.current != result.history_id:
                # Others have had their turn since the run was applied, and the partition is in a
                # history that may lack it: what replicas have of that does not count.
                call(index, result, True, is_replicated=False)
                continue
            call_when_durable(partial(call, index, result), partition, self._flusher, seq, target)

    def _target(self) -> DurabilityTarget:
        """How durable a run must be that is waited for from now on."""
        durability, copies = self._request.durability, self._request.copies
        return WITHOUT_REPLICAS.get(durability) or replicated_target(
            self._context, durability, copies
        )

    def _note_durable(
        self, index: int, result: RunResult, is_on_disk: bool, is_replicated: bool = True
    ) -> None:
        """One of the runs that are answered together is as durable as was asked, or will not be."""
        if not is_on_disk or self._context.bucket is None:
            self._answer.finish_line_without_disk(index, self._not_on_disk_error())
        elif not is_replicated:
            self._answer.finish_line(index, result._replace(status=Status.NOT_DURABLE_YET))
        else:
            self._answer.finish_line(index)
        self._complete_if_finished()

    def _start(self, index: int) -> int:
        """Starts a run; returns what that has cost, in plain rows."""
        context, request, batch = self._context, self._request, self._batches[index]
        try:
            if context.refused_task_runs.is_behind(batch, self.partitions[index]):
                raise ServerError(Status.TEMPORARY_FAILURE, _SEND_EARLIER)
            partition = context.partition(self.partitions[index])
            self._check_keys(batch, partition)
            if batch.token is not None and not batch.token.counter:
                raise ServerError(Status.BAD_ARGUMENT, _COUNTER_0)
            target = IN_MEMORY
            # A partition that is not active refuses the run, and notes for its writer that it did.
            if request.durability is not _MEMORY and partition.state is PartitionState.ACTIVE:
                target = durability_target(context, partition, request.durability, request.copies)
            if batch.is_plain and not context.has_earlier(partition):
                # It needs nothing from disk and no second turn, so no request that could wait.
                cost = int(len(batch) * self._row_cost)
                if partition.may_have_expired(context.time()):
                    cost += EXPIRING_RUN_COST
                self._mutate(index, batch, partition, target, None)
                return cost
            run = _RunRequest(self, index, batch, partition, target)
            context.submit(partition, run)
        except ServerError as error:
            context.refused_task_runs.note(batch, self.partitions[index])
            self.refuse(index, error)
            return 0
        if run.evaluation is not None:
            return EVALUATION_COST + run.evaluation.cost
        return int(len(batch) * self._row_cost)

    def _check_keys(self, batch: MutationBatch, partition: Partition) -> None:
        """Raises `ServerError` when a key does not belong to the run's partition: nobody who asks
        for the key would find it there."""
        assert self._context.bucket is not None
        count = len(self._context.bucket.partitions)
        chunk = self._request.bundle.chunk
        row = chunk.misplaced_row(batch.low, batch.high, partition.id, count)
        if row is not None:
            raise misplaced_error(batch.keys[row - batch.low], partition, count)

    def apply_run(self, run: _RunRequest, fetched_items: FetchedItems) -> StillNeeded:
        """Applies one run; or says what it needs first."""
        batch, partition = run.batch, run.partition
        self._check_rights(batch, partition)
        # A partition that is no longer active needs none: `mutate` refuses the run.
        if run.evaluation is None or partition.state is not PartitionState.ACTIVE:
            run.evaluation = partition.evaluate(batch, now=self._context.time())
        if run.evaluation is not None:
            self._check_disk(batch, partition)
            fetch_requests = run.evaluation.step(fetched_items, SLICE_COST)
            if run.evaluation.result.copied_bytes > EVALUATED_BYTES_MAX:
                partition.repeated_batches.note_refused(batch.token)
                raise ServerError(
                    Status.LIMIT_REACHED,
                    f"the run needs more than {EVALUATED_BYTES_MAX} bytes of values that are "
                    "there; change less at a time",
                )
            if not run.evaluation.is_done:
                # If the disk cannot be read, the run is never applied. Then what its publisher has
                # sent behind it must not be applied either.
                partition.repeated_batches.note_refused(batch.token)
                return fetch_requests or UNFINISHED
        self._mutate(run.index, batch, partition, run.target, run.evaluation)
        return ()

    def _check_rights(self, batch: MutationBatch, partition: Partition) -> None:
        """Raises `ServerError` when the client may not change the keys any more: the right was
        revoked while the run waited. The keys are looked at once for all runs after each change of
        users: O(bytes of the bundle's keys) then; otherwise O(1)."""
        context = self._context
        if context.users.generation != self._generation:
            self._generation, self._rights_error = context.users.generation, None
            try:
                context.access.check_message(self._request)
                context.access.check_changed_keys(self._request)
            except ServerError as error:
                self._rights_error = without_traceback(error)
        if self._rights_error is not None:
            context.refused_task_runs.note(batch, partition.id)
            raise without_traceback(self._rights_error)

    def _check_disk(self, batch: MutationBatch, partition: Partition) -> None:
        """Raises `ServerError` while the disk is full, and once the bucket was deleted: nothing is
        put on disk then, and nobody waits for that."""
        if self._context.disk.flusher.disk_full_reason:
            partition.repeated_batches.note_refused(batch.token)
            raise ServerError(Status.TEMPORARY_FAILURE, self._flusher.disk_full_reason)

    def _mutate(
        self,
        index: int,
        batch: MutationBatch,
        partition: Partition,
        target: DurabilityTarget,
        evaluation: Evaluation | None,
    ) -> None:
        """Applies one run that needs nothing more."""
        self._check_disk(batch, partition)
        result = partition.mutate(batch, now=self._context.time(), evaluation=evaluation)
        self._note_applied(index)
        status = result.status
        if status is _OK:
            self._await_durability(index, partition, result, target)
        elif status is Status.WRONG_STATE:
            self.refuse(index, not_active_error(partition))
        elif status is Status.TEMPORARY_FAILURE:
            self.refuse(index, ServerError(status, _SEND_EARLIER))
        else:
            self.refuse(index, ServerError(status, _SENTENCES[status]))

    def _await_durability(
        self, index: int, partition: Partition, result: MutateResult, target: DurabilityTarget
    ) -> None:
        if target is IN_MEMORY:
            self._finish(index, result, True)
            return
        # An operation that failed did so because of another change: that must be as durable as what
        # succeeded.
        succeeded = result.last_seq >= result.first_seq
        seq = partition.high_seq if not succeeded or result.is_repeated else result.last_seq
        call = partial(self._finish, index, result)
        call_when_durable(call, partition, self._flusher, seq, target)

    def _finish(
        self, index: int, result: MutateResult, is_on_disk: bool, is_replicated: bool = True
    ) -> None:
        """A run was applied, and is as durable as was asked, or will not be."""
        if not is_on_disk or self._context.bucket is None:
            self.refuse(index, self._not_on_disk_error())
            return
        if result.failures or result.counters:
            self._answer.add_rows(self._request.bundle.bounds[index], result)
        has_succeeded = result.last_seq >= result.first_seq
        self._set_result(
            index,
            RunResult(
                self.partitions[index],
                _OK if is_replicated else Status.NOT_DURABLE_YET,
                result.history_id,
                result.first_seq if has_succeeded else SeqNo(0),
                result.last_seq if has_succeeded else SeqNo(0),
                result.first_cas if has_succeeded else Cas(0),
            ),
        )

    def _finish_plain(
        self, index: int, result: RunResult, is_on_disk: bool, is_replicated: bool = True
    ) -> None:
        """A run that was applied together with others is as durable as was asked, or will not
        be."""
        if is_on_disk and self._context.bucket is not None:
            status = _OK if is_replicated else Status.NOT_DURABLE_YET
            self._set_result(index, result._replace(status=status))
        else:
            self.refuse(index, self._not_on_disk_error())

    def _not_on_disk_error(self) -> ServerError:
        """Why a run that was applied is not as durable as was asked, and will not be."""
        if self._context.bucket is None:
            return ServerError(Status.NO_BUCKET, "the bucket was deleted")
        sentence = "the run was taken in, but cannot be put on disk now"
        return ServerError(Status.TEMPORARY_FAILURE, sentence)

    def refuse(self, index: int, error: ServerError) -> None:
        """A run was refused as a whole."""
        self._note_applied(index)
        self._answer.refuse(index, error)
        self._complete_if_finished()

    def fail(self) -> None:
        """The server failed to apply a run."""
        self._context.fail(self._request)

    def _set_result(self, index: int, result: RunResult) -> None:
        self._answer.finish(index, result)
        self._complete_if_finished()

    def _complete_if_finished(self) -> None:
        if not self._answer.unfinished_count:
            self._context.reply_order.complete(self)

    def send(self) -> int:
        """Answers the bundle. Returns how many runs, failures and counters that took time for."""
        return self._answer.send(self._context, self._request)

    def run_bytes(self, index: int) -> int:
        """About what a run takes of the bundle."""
        bundle = self._request.bundle
        return bundle.chunk.nbytes * bundle.row_counts[index] // bundle.chunk.count


class _RunRequest:
    """One run, as a request to its partition.

    Attributes:
        index: Which run of the bundle it is.
        batch: Its batch.
        partition: Its partition.
        target: How durable it must be.
        nbytes: About what it takes of the bundle.
        evaluation: What it comes to; None while it has none, or needs none.
    """

    __slots__ = ("_bundle", "batch", "evaluation", "index", "nbytes", "partition", "target")

    def __init__(
        self,
        bundle: _BundleRequest,
        index: int,
        batch: MutationBatch,
        partition: Partition,
        target: DurabilityTarget,
    ) -> None:
        self._bundle = bundle
        self.index = index
        self.batch = batch
        self.partition = partition
        self.target = target
        self.nbytes = bundle.run_bytes(index)
        self.evaluation: Evaluation | None = None

    def apply(self, fetched_items: FetchedItems) -> StillNeeded:
        return self._bundle.apply_run(self, fetched_items)

    def refuse(self, error: ServerError) -> None:
        self._bundle.refuse(self.index, error)

    def fail(self) -> None:
        self._bundle.fail()
