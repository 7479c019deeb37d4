"""Changes of single keys: any number of them in one bundle, and what each of them came to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

import attrs

from upr_protocol.chunk import Bundle, BundleRun, Chunk, ChunkBuilder
from upr_protocol.client.core.batcher import (
    BUNDLE_BYTES,
    BUNDLE_MUTATIONS,
    check_numbers,
    check_sizes,
)
from upr_protocol.client.core.calls import Call
from upr_protocol.client.core.key_lookup import Text, to_bytes
from upr_protocol.client.core.results import Failure, NotDurableError, WriteResult, split_reply
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, Operation, PartitionId
from upr_protocol.wire import Mutate, MutateReply

_PARTITION: Final = attrgetter("partition")


@attrs.frozen(eq=False)
class Change:
    """One operation on one key, without a token: it is sent once."""

    partition: PartitionId
    operation: Operation
    key: bytes
    value: bytes
    cas: int = 0
    flags: int = 0
    expiry: int = 0
    durability: Durability = Durability.MEMORY
    copies: int = 0

    @classmethod
    def of_key(
        cls,
        partition_count: int,
        operation: Operation,
        key: Text,
        value: Text = b"",
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
        durability: Durability = Durability.MEMORY,
        copies: int = 0,
    ) -> Change:
        """The change of a key in a bucket of so many partitions.

        Raises:
            ServerError: The key or the value is longer than any server takes, or a number does not
                fit.
        """
        key, value = to_bytes(key), to_bytes(value)
        # Here, and not when the bundle is made: that is another task, which sends for all.
        check_sizes(key, value)
        check_numbers(cas, flags, expiry)
        partition = partition_of(key, partition_count)
        return cls(partition, operation, key, value, cas, flags, expiry, durability, copies)

    @property
    def durability_level(self) -> tuple[Durability, int]:
        """How durable it must be: the changes of one bundle have one level."""
        return self.durability, self.copies


def count_for_one_bundle(changes: Iterable[Change]) -> int:
    """How many of the first of `changes`, at least one, fit one bundle. O(the answer)."""
    count = nbytes = 0
    for change in changes:
        nbytes += len(change.key) + len(change.value)
        if count and (nbytes > BUNDLE_BYTES or count >= BUNDLE_MUTATIONS):
            break
        count += 1
    return count


class ChangeBundle:
    """Changes that are sent together: all of one level, in the order of their partitions."""

    __slots__ = ("_bounds", "_partitions", "changes")

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = changes
        self._partitions: list[PartitionId] = []
        self._bounds = [0]
        for partition, group in groupby(changes, _PARTITION):
            self._partitions.append(partition)
            self._bounds.append(self._bounds[-1] + len(list(group)))

    def message(self, opaque: int) -> Mutate:
        """The bundle as a request."""
        durability, copies = self.changes[0].durability_level
        return Mutate(self._bundle(), bytes(16), durability, copies, opaque=opaque)

    def _bundle(self) -> Bundle:
        builder = ChunkBuilder()
        for change in self.changes:
            builder.append(
                change.operation,
                change.key,
                change.value,
                0,
                change.cas,
                change.flags,
                change.expiry,
            )
        chunk: Chunk = builder.build()
        bounds = self._bounds
        return Bundle(
            chunk,
            [
                BundleRun(partition, bounds[index + 1] - bounds[index])
                for index, partition in enumerate(self._partitions)
            ],
        )

    def outcomes(self, reply: MutateReply) -> list[WriteResult | ServerError]:
        """What each change came to, in their order.

        Raises:
            RemoteProtocolError: The answer does not fit the request.
        """
        outcomes: list[WriteResult | ServerError] = []
        answers = split_reply(reply, self._partitions, self._bounds)
        for index, (status, result) in enumerate(answers):
            run = self.changes[self._bounds[index] : self._bounds[index + 1]]
            if status not in (Status.OK, Status.NOT_DURABLE_YET):
                outcomes += [ServerError(status, map_revision=reply.map_revision) for _ in run]
                continue
            is_durable = status is Status.OK
            # It was applied, but the server did not tell under which numbers.
            if not (is_durable or result.last_seq or result.failures):
                outcomes += [NotDurableError() for _ in run]
                continue
            results = result.results(self._partitions[index], len(run))
            for change, outcome in zip(run, results, strict=True):
                if isinstance(outcome, Status):
                    failure = Failure(change.partition, change.key, change.operation, outcome)
                    outcomes.append(failure.error())
                else:
                    outcomes.append(outcome if is_durable else NotDurableError(outcome))
        return outcomes


def change_call(change: Change) -> Call[WriteResult]:
    """The change as a request of its own."""
    bundle = ChangeBundle([change])

    def result(reply: MutateReply) -> WriteResult:
        (outcome,) = bundle.outcomes(reply)
        if isinstance(outcome, ServerError):
            raise outcome
        return outcome

    return Call(bundle.message, result, change.partition)
