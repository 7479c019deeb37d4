"""Who may ask the indexer for what over HTTP: the bucket's server says it.

The indexer has no users of its own. It logs in to the server with the name and the password that
came with a request, and tries what the right allows. It keeps the verdict for a second, and no
password. A definition it writes with the user's own credentials, so the server checks that itself.
"""

from __future__ import annotations

import hashlib
import secrets
from base64 import b64decode
from binascii import Error as Base64Error
from collections import OrderedDict
from math import inf
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.client import Address, Credentials, NodeClient, connect
from upr_protocol.concurrency import Notifier, first_failure
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.ids import DESIGN_PREFIX
from upr_protocol.users import Right, UsersError
from upr_server.indexer.log_in_turns import LogInTurns
from upr_server.runtime import FailedLogIns, network_of

log = structlog.get_logger(__name__)

VERDICT_S: Final = 1.0
"""How long a verdict counts: a user who loses a right at the server loses it here within a
second."""

RENEW_S: Final = 0.5
"""How long before it expires the server's answer whether it has users is asked for again, while
requests still use the old answer. Otherwise one request a second would wait for a connection to the
server."""

AWAY_S: Final = 300.0
"""How long a verdict counts after the server's answer while the server is away. A right that is
revoked meanwhile lives on for so long, and no longer."""

VERDICTS_MAX: Final = 1000
"""Verdicts that are kept; of more, the one that was made longest ago is forgotten."""

ASK_TIMEOUT_S: Final = 5.0
"""How long the server may take to answer."""

LOG_INS_MAX: Final = 2
"""Log-ins that go on at once of users who have a verdict, and as many of those who have none, one
of each host. Others wait for their turn."""

HOST_FAILURES_MAX: Final = 3
FAILURES_MAX: Final = 5
"""Attempts of one host, and of all, that may fail at once. With those that go on at that moment
they are fewer than what the server allows the indexer's host: strangers must not lock the indexer
itself out."""

_PROBE: Final = DESIGN_PREFIX
"""A key that is looked up to see whether the user may read the whole bucket: no right on some of
its keys allows that. It need not be there."""

_DESIGN_PROBE: Final = DESIGN_PREFIX + b"?"
"""A key whose deletion is tried to see whether the user may define indexes. No design has this
name."""

_NO_CAS: Final = 1
"""No item has this CAS, so that nothing is deleted."""

_IS_ALLOWED: Final = (Status.NOT_FOUND, Status.CAS_MISMATCH)
"""What a deletion of nothing ends with, if the user may delete."""

_TOO_MANY_S: Final = 1.0

NODE_VERDICT_S: Final = 5.0
"""How long it counts that a node may link. Links are checked again after so long."""

NODE_ASK_S: Final = 2.5
"""How long the server may take to answer for a node that it has allowed within `AWAY_S`: less than
a node waits for a link."""

_EVERYBODY: Final = b""
"""Stands for all nodes where the server has no users."""


class LogInNeededError(UprError):
    """The request has no name and password, or the wrong ones."""


class NotAllowedError(UprError):
    """The user may not do it."""


class TooManyLogInsError(UprError):
    """Too many attempts have failed just before."""

    retry_after_s = _TOO_MANY_S


@attrs.frozen
class _Verdict:
    """What the server said of a name and a password that are right."""

    may_read: bool
    answered_at: float


class HttpAccess:
    """Asks the bucket's server who may do what.

    Users whose password was right before go on with that verdict while the server is away, for
    `AWAY_S` at most. What the server refuses counts at once.

    Args:
        address: The bucket, with the credentials of the indexer.
        asks_users: Whether to ask at all; otherwise everybody may do what the indexer may.
    """

    def __init__(self, address: Address, *, asks_users: bool = True) -> None:
        self._address = address
        self._asks_users = asks_users
        self._has_users: bool | None = None
        """Whether the server has users, as far as is known."""
        self._has_users_until = -inf
        self._is_renewal_due = False
        self._renewal_due = Notifier()
        self._key = secrets.token_bytes(32)
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        """By the hash of a name and a password, with a key that only this process knows."""
        self._failures_of_hosts = FailedLogIns(HOST_FAILURES_MAX)
        self._failures = FailedLogIns(FAILURES_MAX)
        self._has_users_lock = trio.Lock()
        self._new_turns = LogInTurns(LOG_INS_MAX)
        self._renewal_slots = trio.CapacityLimiter(LOG_INS_MAX)
        """Of their own, so that made-up names do not keep known users from a new verdict."""
        self._questions: dict[bytes, trio.Event] = {}
        """What is being asked, by the same hash; the event is set when that is over."""
        self._nodes: dict[bytes, float] = {}
        """When the server last said that a node may link to slices, by a hash of its header."""
        self._node_turns = LogInTurns(LOG_INS_MAX)
        """A node opens many links at once: the server is asked once."""
        self._away_until = 0.0
        """Until when known users are not asked about, as the server did not answer; 0 if it did."""

    async def run(self) -> None:
        """Asks whether the server has users before requests would wait for that, for ever. Without
        it they wait."""
        while True:
            await self._renewal_due.wait_until(lambda: self._is_renewal_due)
            try:
                async with self._has_users_lock:
                    await self._renew_has_users()
            except* UprError as errors:
                # A request that asks hears it.
                log.debug("no answer whether there are users", reason=str(first_failure(errors)))
            self._is_renewal_due = False

    async def check(self, needed_right: Right, authorization: str, peer: str) -> Address:
        """Checks whether a request may be carried out.

        Args:
            needed_right: The right that it needs. The server decides whether the user has `INDEX`.
            authorization: The header of this name; empty for none.
            peer: Where the request came from, HOST:PORT.

        Returns:
            The bucket, with the credentials with which to write.

        Raises:
            LogInNeededError: The name and password are missing or wrong.
            NotAllowedError: The user may not do it.
            TooManyLogInsError: Too many attempts from that host have failed just before.
            UprError: The server cannot be asked.
        """
        if not self._asks_users or not await self._wants_log_in():
            return self._address
        credentials = _credentials(authorization)
        verdict = await self._verdict(credentials, network_of(peer))
        if needed_right is Right.READ and not verdict.may_read:
            raise NotAllowedError(
                f"user {credentials.user} may not do this: it needs the right "
                f"{needed_right.value} on the whole bucket {self._address.bucket}"
            )
        return self._address_of(credentials)

    async def check_node(self, authorization: str, peer: str) -> None:
        """Checks whether another node of the indexer may link to a slice: its user needs the rights
        `READ` and `INDEX`. Unlike `check`, this asks the server whether it has `INDEX`.
        While the server is away, or hangs, a node that had it goes on for `AWAY_S` at most.

        Args:
            authorization: The header of this name; empty for none.
            peer: Where the request came from, HOST:PORT.

        Raises:
            LogInNeededError: The name and password are missing or wrong.
            NotAllowedError: The user may not do it.
            TooManyLogInsError: Too many attempts from that host have failed just before.
            UprError: The server cannot be asked.
        """
        node = self._hash(authorization)
        answered_at = max(self._nodes.get(node, -inf), self._nodes.get(_EVERYBODY, -inf))
        age_s = trio.current_time() - answered_at
        if age_s < NODE_VERDICT_S:
            return
        if age_s >= AWAY_S:
            await self._ask_about_node(node, authorization, peer)
            return
        # A node that opens a link does not wait for a server that hangs.
        with trio.move_on_after(NODE_ASK_S):
            await self._ask_about_known_node(node, authorization, peer)

    async def _ask_about_known_node(self, node: bytes, authorization: str, peer: str) -> None:
        """Asks whether a node may link that might before: only a refusal counts."""
        try:
            await self._ask_about_node(node, authorization, peer)
        except (LogInNeededError, NotAllowedError):
            raise
        except UprError as error:
            log.info("a node goes on without the server's answer", reason=str(error))

    async def _ask_about_node(self, node: bytes, authorization: str, peer: str) -> None:
        """Asks whether a node may link, and keeps the answer."""
        try:
            is_everybody = await self._check_node_now(node, authorization, peer)
        except (LogInNeededError, NotAllowedError):
            self._nodes.pop(node, None)
            self._nodes.pop(_EVERYBODY, None)
            raise
        except BaseExceptionGroup as group:
            # A connection to the server ended for several reasons at once.
            _, unexpected = group.split(UprError)
            if unexpected is not None:
                raise
            reasons = "; ".join(str(error) for error in group.exceptions)
            raise BrokenError(f"{self._address} cannot be asked: {reasons}") from group
        if not is_everybody:
            self._nodes.pop(_EVERYBODY, None)
        self._nodes[_EVERYBODY if is_everybody else node] = trio.current_time()

    async def _check_node_now(self, node: bytes, authorization: str, peer: str) -> bool:
        """Whether nobody is asked who they are."""
        address = await self.check(Right.READ, authorization, peer)
        if address is self._address:
            return True
        async with self._node_turns.turn(node.hex()):
            # Another link may have asked meanwhile.
            if trio.current_time() - self._nodes.get(node, -inf) < NODE_VERDICT_S:
                return False
            if not await self._may_index(address):
                raise NotAllowedError(
                    f"user {_credentials(authorization).user} may not link to slices: it needs the "
                    f"right {Right.INDEX.value} on bucket {self._address.bucket}"
                )
        return False

    async def _may_index(self, address: Address) -> bool:
        try:
            with trio.move_on_after(ASK_TIMEOUT_S):
                return await _may_index(address)
        except ServerError as error:
            if error.status is Status.LOG_IN_FAILED:
                raise LogInNeededError(error.sentence) from error
            raise
        raise BrokenError(f"{self._address} did not answer in time")

    def _address_of(self, credentials: Credentials) -> Address:
        security = attrs.evolve(self._address.security, credentials=credentials)
        return attrs.evolve(self._address, security=security)

    async def _wants_log_in(self) -> bool:
        if self._address.security.credentials is not None:
            # The indexer itself would refuse a server without users.
            return True
        if trio.current_time() >= self._has_users_until:
            async with self._has_users_lock:
                # Another request may have asked while this one waited.
                if trio.current_time() >= self._has_users_until:
                    await self._renew_has_users()
        elif trio.current_time() >= self._has_users_until - RENEW_S:
            self._is_renewal_due = True
            self._renewal_due.notify()
        if self._has_users is None:
            raise BrokenError(f"{self._address} did not answer just before")
        return self._has_users

    async def _renew_has_users(self) -> None:
        try:
            self._has_users = await self._ask_wants_log_in()
        except UprError:
            if self._has_users is None:
                # Those who wait behind this question do not each wait for one of their own.
                self._has_users_until = trio.current_time() + VERDICT_S
                raise
        self._has_users_until = trio.current_time() + VERDICT_S

    async def _ask_wants_log_in(self) -> bool:
        failure: UprError = BrokenError(f"{self._address} did not answer")
        for node in self._address.each_node():
            try:
                return await NodeClient(node, "upr-indexer", ASK_TIMEOUT_S).requires_log_in()
            except UprError as error:
                failure = error
        raise failure

    async def _verdict(self, credentials: Credentials, host: str) -> _Verdict:
        digest = self._digest(credentials)
        while (verdict := self._younger_than(VERDICT_S, digest)) is None:
            last_verdict = self._younger_than(AWAY_S, digest)
            open_question = self._questions.get(digest)
            if last_verdict is not None and (open_question is not None or self._is_away()):
                return last_verdict
            if open_question is None:
                return await self._ask_once(digest, credentials, host)
            await open_question.wait()
        return verdict

    async def _ask_once(self, digest: bytes, credentials: Credentials, host: str) -> _Verdict:
        """Asks the server; meanwhile nobody else asks the same."""
        is_over = self._questions[digest] = trio.Event()
        try:
            is_known = self._younger_than(AWAY_S, digest) is not None
            async with self._renewal_slots if is_known else self._new_turns.turn(host):
                # Much time may have passed before this one's turn.
                last_verdict = self._younger_than(AWAY_S, digest)
                if last_verdict is not None and self._is_away():
                    return last_verdict
                if last_verdict is None:
                    self._check_limits(host)
                return await self._answer(digest, credentials, host, last_verdict)
        finally:
            del self._questions[digest]
            is_over.set()

    async def _answer(
        self, digest: bytes, credentials: Credentials, host: str, last_verdict: _Verdict | None
    ) -> _Verdict:
        if last_verdict is not None and self._away_until:
            # This question finds out whether the server is back; others go on meanwhile.
            self._away_until = trio.current_time() + ASK_TIMEOUT_S
        try:
            may_read = await self._may_read(credentials)
        except UsersError as error:
            raise LogInNeededError(str(error)) from error
        except BrokenError:
            if last_verdict is None:
                self._failures_of_hosts.count_failure(host, trio.current_time())
                raise
            self._away_until = trio.current_time() + VERDICT_S
            return last_verdict
        except ServerError as error:
            self._away_until = 0.0
            if error.status is Status.LOG_IN_FAILED:
                self._note_failure(digest, host)
                raise LogInNeededError(error.sentence) from error
            if last_verdict is None:
                self._failures_of_hosts.count_failure(host, trio.current_time())
            raise
        self._away_until = 0.0
        verdict = _Verdict(may_read, trio.current_time())
        self._verdicts[digest] = verdict
        self._verdicts.move_to_end(digest)
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)
        return verdict

    def _is_away(self) -> bool:
        return trio.current_time() < self._away_until

    def _digest(self, credentials: Credentials) -> bytes:
        return self._hash(f"{credentials.user}\0{credentials.password}")

    def _hash(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=32).digest()

    def _younger_than(self, age_s: float, digest: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(digest)
        if verdict is None or trio.current_time() >= verdict.answered_at + age_s:
            return None
        return verdict

    def _note_failure(self, digest: bytes, host: str) -> None:
        self._verdicts.pop(digest, None)
        now = trio.current_time()
        self._failures_of_hosts.count_failure(host, now)
        self._failures.count_failure("", now)

    def _check_limits(self, host: str) -> None:
        now = trio.current_time()
        # The last place is for a host that has not failed.
        reserved_attempts = int(self._failures_of_hosts.has_failed(host, now))
        if self._failures_of_hosts.is_limited(host, now) or self._failures.is_limited(
            "", now, reserved_attempts
        ):
            raise TooManyLogInsError(
                f"too many attempts to log in have failed, from {host} or from all together; wait "
                "a few seconds"
            )

    async def _may_read(self, credentials: Credentials) -> bool:
        with trio.move_on_after(ASK_TIMEOUT_S):
            return await _may_read(self._address_of(credentials))
        raise BrokenError(f"{self._address} did not answer in time")


async def _may_index(address: Address) -> bool:
    try:
        async with connect(address, identity="upr-indexer") as client:
            await client.delete(_DESIGN_PROBE, cas=_NO_CAS)
    except ServerError as error:
        if error.status not in (Status.NOT_ALLOWED, *_IS_ALLOWED):
            raise
        return error.status in _IS_ALLOWED
    return True


async def _may_read(address: Address) -> bool:
    try:
        async with connect(address, identity="upr-indexer") as client:
            await client.get(_PROBE)
    except ServerError as error:
        if error.status is not Status.NOT_ALLOWED:
            raise
        return False
    return True


def _credentials(authorization: str) -> Credentials:
    """The name and the password in the header of HTTP's basic authentication.

    Raises:
        LogInNeededError: There are none.
    """
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        raise LogInNeededError(
            "the server has users: say who you are with HTTP's basic authentication, a user's name "
            "and password"
        )
    try:
        name, colon, password = b64decode(encoded, validate=True).decode().partition(":")
    except (Base64Error, ValueError) as error:
        raise LogInNeededError("the header Authorization has no name and password") from error
    if not (name and colon and password):
        raise LogInNeededError("the header Authorization has no name, or no password")
    return Credentials(name, password)
