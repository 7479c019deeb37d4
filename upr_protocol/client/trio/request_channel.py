"""Requests over one connection, any number at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Final, Generic, TypeVar

import trio

from upr_protocol.address import Address
from upr_protocol.client.core.bundle_window import BundleWindow
from upr_protocol.client.core.calls import Call, check_reply, over_quota_error
from upr_protocol.client.core.changes import Change, ChangeBundle, count_for_one_bundle
from upr_protocol.client.core.results import WriteResult
from upr_protocol.client.trio.connection import ConnectionHandler, TrioConnection
from upr_protocol.concurrency import Notifier, without_traceback
from upr_protocol.errors import UprError
from upr_protocol.ids import Durability
from upr_protocol.limits import REQUESTS_OPEN_MAX
from upr_protocol.wire import Message, MutateReply

T = TypeVar("T")

_Level = tuple[Durability, int]
"""A level of durability: how durable, and on how many replicas."""

_PARTITION: Final = attrgetter("change.partition")


class PendingReply(Generic[T]):
    """The result of a request. Once `is_resolved`, the answer has arrived, or never will."""

    __slots__ = ("_event", "_outcome", "is_resolved")

    _outcome: T | UprError

    def __init__(self) -> None:
        self._event = trio.Event()
        self.is_resolved = False

    def resolve(self, outcome: T | UprError) -> None:
        """Sets the result: what the answer means, or why it is a refusal, or never comes."""
        self._outcome = outcome
        self.is_resolved = True
        self._event.set()

    async def wait(self) -> T:
        """Waits for the answer, and gives what it means. Cancelled, the request may still be
        carried out; its answer is dropped."""
        await self._event.wait()
        return self.result()

    def result(self) -> T:
        """What the answer means, once it has arrived; raises the error that it is."""
        if isinstance(self._outcome, UprError):
            raise self._outcome
        return self._outcome


class PendingChange(PendingReply[WriteResult]):
    """A change that waits to be sent, or for its answer. It `lacks_credit` if there was no credit
    when its turn came to be sent."""

    __slots__ = ("change", "is_sent", "lacks_credit")

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.is_sent = False
        self.lacks_credit = False

    def note_lack_of_credit(self) -> None:
        """There is no credit to send it. `wait_for_credit` returns."""
        self.lacks_credit = True
        self._event.set()

    async def wait_for_credit(self) -> bool:
        """Waits for the answer; whether there is one. If there is none, credit was lacking, and
        `wait` waits for the answer."""
        await self._event.wait()
        if not self.lacks_credit or self.is_resolved:
            return True
        self._event = trio.Event()
        return False


def _resolve_call(
    call: Call[T], pending_reply: PendingReply[T], answer: Message | UprError
) -> None:
    try:
        pending_reply.resolve(call.result(check_reply(answer)))
    except UprError as error:
        pending_reply.resolve(error)


def _resolve_bundle(
    bundle: ChangeBundle,
    changes: Sequence[PendingChange],
    window: BundleWindow,
    opaque: int,
    answer: Message | UprError,
) -> None:
    """Resolves changes that were sent together, in the order of the bundle."""
    window.note_answered(opaque)
    outcomes: Sequence[WriteResult | UprError]
    try:
        reply = check_reply(answer)
        assert isinstance(reply, MutateReply)
        outcomes = bundle.outcomes(reply)
    except UprError as error:
        outcomes = [without_traceback(error) for _ in changes]
    for pending_change, outcome in zip(changes, outcomes, strict=True):
        pending_change.resolve(outcome)


class RequestChannel(ConnectionHandler):
    """Sends requests, and brings each answer to its caller; the handler of a connection.

    Calls that wait for an answer raise `ServerError` if the server refuses, or grants no credit for
    a change in time; `BrokenError` if the connection is lost, and then the request may have been
    carried out or not; and `ClosedError` if the connection is closed here.
    """

    def __init__(self, address: Address, credit_timeout_s: float) -> None:
        self.requests = 0
        self._address = address
        self._credit_timeout_s = credit_timeout_s
        self._connection: TrioConnection | None = None
        self._resolvers: dict[int, Callable[[Message | UprError], None]] = {}
        """By opaque of a request without an answer what to call with it."""
        self._unsent: dict[_Level, dict[PendingChange, None]] = {}
        """The changes to send, in their order, by their level: a bundle has one. The level whose
        turn is next comes first."""
        self._windows: defaultdict[_Level, BundleWindow] = defaultdict(BundleWindow)
        self._parked_senders = trio.lowlevel.ParkingLot()
        """The tasks that wait for room, the one that has waited longest first. As many are woken as
        there is room for: to wake all of them for each answer would be quadratic work."""
        self._woken_senders = 0
        """Those that were woken, and have yet to run."""
        self._changed = Notifier()

    def __len__(self) -> int:
        """How many requests have no answer yet."""
        return len(self._resolvers)

    @property
    def connection(self) -> TrioConnection:
        """The connection; the last one when it is lost."""
        assert self._connection is not None
        return self._connection

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and self._connection.failure is None

    # For the connection.

    def connection_made(self, connection: TrioConnection) -> None:
        self._connection = connection

    def message_received(self, message: Message) -> None:
        resolve = self._resolvers.pop(message.opaque, None)
        if resolve is not None:
            resolve(message)
            self._wake_senders()
            self._changed.notify()
        if self._unsent:
            self.connection.request_write()

    def ready_to_write(self) -> float | None:
        """Sends the changes that have gathered while the writer was busy, or too much was on its
        way."""
        self._wake_senders()
        self._changed.notify()
        if not self._unsent:
            return None
        credit = self.connection.session.credit
        while self._unsent and credit.is_open and self._has_room:
            now = trio.current_time()
            opens_at = {level: self._windows[level].opens_at(now) for level in self._unsent}
            # Of those that are open now, the first.
            level = min(opens_at, key=opens_at.__getitem__)
            if opens_at[level] > now:
                return opens_at[level]
            self._send_changes(level, now)
        if self._unsent and not credit.is_open:
            self._note_lack_of_credit()
        return None

    def _note_lack_of_credit(self) -> None:
        """Tells the tasks whose changes are unsent that there is no credit: from now on each waits
        `credit_timeout_s` at most. Each change is told once, so that it costs O(1) in all."""
        for unsent in self._unsent.values():
            # New changes are added at the end: those before one that was told were told, too.
            for change in reversed(unsent):
                if change.lacks_credit:
                    break
                change.note_lack_of_credit()

    def _send_changes(self, level: _Level, now: float) -> None:
        unsent = self._unsent[level]
        count = count_for_one_bundle(change.change for change in unsent)
        pending_changes = list(islice(unsent, count))
        for change in pending_changes:
            del unsent[change]
        del self._unsent[level]
        if unsent:
            self._unsent[level] = unsent  # after the other levels
        # Changes of one partition keep their order.
        pending_changes.sort(key=_PARTITION)
        bundle = ChangeBundle([change.change for change in pending_changes])
        opaque = self.connection.session.new_opaque()
        window = self._windows[level]
        resolve = partial(_resolve_bundle, bundle, pending_changes, window, opaque)
        try:
            self.connection.send(bundle.message(opaque))
        except UprError as error:
            resolve(error)
            return
        for change in pending_changes:
            change.is_sent = True
        window.note_sent(opaque, now)
        self._resolvers[opaque] = resolve
        self.requests += 1

    def connection_lost(self, error: UprError) -> None:
        resolvers, self._resolvers = self._resolvers, {}
        unsent, self._unsent = self._unsent, {}
        for resolve in resolvers.values():
            resolve(without_traceback(error))
        for pending_change in chain.from_iterable(unsent.values()):
            pending_change.resolve(without_traceback(error))
        self._woken_senders += len(self._parked_senders.unpark_all())
        self._changed.notify()

    def _wake_senders(self) -> None:
        if self._parked_senders and self._has_room:
            room = REQUESTS_OPEN_MAX - 1 - len(self._resolvers) - self._woken_senders
            if room > 0:
                self._woken_senders += len(self._parked_senders.unpark(count=room))

    # For callers.

    async def ask(self, call: Call[T]) -> T:
        """Sends a request that is no change, and waits for its answer."""
        reply = await self.send(call)
        return await reply.wait()

    async def change(self, change: Change) -> WriteResult:
        """Makes a change: sent at once, with those that other tasks make now; with more of them if
        much is on its way already, see `BundleWindow`. Waits for the answer.
        Cancelled before the change was sent, it was not made."""
        connection = self.connection
        if connection.failure is not None:
            raise connection.failure
        pending_change = PendingChange(change)
        self._unsent.setdefault(change.durability_level, {})[pending_change] = None
        connection.request_write()
        try:
            # A timeout costs as much as the rest of this function, and mostly there is credit.
            if await pending_change.wait_for_credit():
                return pending_change.result()
            with trio.move_on_after(self._credit_timeout_s):
                return await pending_change.wait()
            if not pending_change.is_sent and not connection.session.credit.is_open:
                raise over_quota_error(self._address, self._credit_timeout_s)
            return await pending_change.wait()
        finally:
            if not pending_change.is_sent:
                self._discard(pending_change)

    def _discard(self, pending_change: PendingChange) -> None:
        """Makes sure that a change is not sent any more."""
        level = pending_change.change.durability_level
        unsent = self._unsent.get(level, {})
        if pending_change in unsent:
            del unsent[pending_change]
            if not unsent:
                del self._unsent[level]
            self._changed.notify()

    async def send(self, call: Call[T]) -> PendingReply[T]:
        """Sends a request that is no change. Waits for room; cancelled meanwhile, nothing was
        sent."""
        connection = self.connection
        # `PendingReply[T]()` would take 2 µs more.
        reply: PendingReply[T] = PendingReply()
        try:
            while connection.failure is None and not self._has_room:
                await self._parked_senders.park()
                self._woken_senders -= 1
            opaque = connection.session.new_opaque()
            connection.send(call.request(opaque=opaque))
            self._resolvers[opaque] = partial(_resolve_call, call, reply)
        finally:
            self._wake_senders()
            self._changed.notify()
        self.requests += 1
        return reply

    async def drain(self) -> None:
        """Waits until every request that was sent here has its answer or its error. Tasks that
        still wait for room or credit count, too: their requests will be refused here, and are then
        sent to the next node."""
        await self._changed.wait_until(
            lambda: (
                not (self._parked_senders or self._woken_senders or self._unsent or self._resolvers)
            )
        )

    @property
    def _has_room(self) -> bool:
        return len(self._resolvers) < REQUESTS_OPEN_MAX - 1 and not self.connection.is_congested
