"""How clients prove who they are, before anything else is answered.

What a stranger hears does not tell whether a user exists: the steps, the salt's length and
constancy, the number of iterations and the sentence are the same. A failed attempt is answered
late. Each host has a number of attempts that may fail, which comes back with time. While it has
none left, nothing that it sends is tried at all; so more connections do not help it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import (
    EXTERNAL,
    NONCE_BYTES,
    SCRAM,
    SCRAM_PLUS,
    FirstMessage,
    ScramError,
    ScramServer,
    made_up_verifier,
)
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.transport import TlsStream
from upr_protocol.users import UsersError, Verifier
from upr_protocol.wire import ContinueLogIn, LoggedIn, LogInChallenge, StartLogIn
from upr_server.net.access import Access
from upr_server.net.user_usage import UserUsage, UserUsages
from upr_server.runtime import FAILURE_DELAY_S, FailedLogIns, network_of
from upr_server.user_store import UserStore

_WRONG: Final = "the user's name or the password is wrong"

log = structlog.get_logger(__name__)


@attrs.define(eq=False)
class LogInResources:
    """What the log-ins of all connections share.

    Attributes:
        users: The users of the cluster.
        own_secret: What the salts of users who do not exist are made of, as long as the users have
            no secret of their own.
        failures: The attempts that failed.
        usages: What each user has of this node.
        failure_delay_s: How late a failed attempt is answered.
    """

    users: UserStore
    own_secret: bytes = attrs.field(factory=lambda: secrets.token_bytes(32), repr=False)
    failures: FailedLogIns = attrs.field(factory=FailedLogIns)
    failure_delay_s: float = FAILURE_DELAY_S
    usages: UserUsages = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.usages = UserUsages(self.users)


def offered_mechanisms(log_ins: LogInResources, stream: trio.abc.Stream) -> tuple[str, ...]:
    """The ways to log in that the client of a connection is offered; none if there is no need to
    log in."""
    if log_ins.users.users.is_open:
        return ()
    external = (EXTERNAL,) if _certificate_name(stream) else ()
    return (*external, SCRAM_PLUS, SCRAM) if _binding(stream) else (*external, SCRAM)


def _certificate_name(stream: trio.abc.Stream) -> str:
    return stream.link.peer_name if isinstance(stream, TlsStream) else ""


def _binding(stream: trio.abc.Stream) -> bytes:
    return stream.link.channel_binding if isinstance(stream, TlsStream) else b""


class LogInExchange:
    """The log-in of one connection.

    Args:
        log_ins: What all share.
        session: The connection's session.
        stream: The connection.
        peer: The other end's address, for logs.
        access: What the client may do; its user is set by the log-in.
        wake: Has what is in the session sent.

    Attributes:
        usage: What the user has of this node; None before the log-in.
    """

    def __init__(
        self,
        log_ins: LogInResources,
        session: ServerSession,
        stream: trio.abc.Stream,
        peer: str,
        access: Access,
        wake: Callable[[], None],
    ) -> None:
        self._log_ins = log_ins
        self._session = session
        self._stream = stream
        self._peer = peer
        self._host = network_of(peer)
        self._access = access
        self._wake = wake
        self.usage: UserUsage | None = None
        self._exchange: tuple[str, Verifier, ScramServer] | None = None
        self._refusal = ""
        """Why the attempt has failed, as the client is told; empty if it has not."""

    @property
    def has_failed(self) -> bool:
        """Whether the attempt has failed. Nothing else that the client has sent may be handled
        before `tell_failure`: its answer would tell of the failure at once."""
        return bool(self._refusal)

    def begin(self, request: StartLogIn) -> None:
        """The client names its mechanism, and says the first message."""
        if self._is_limited():
            return
        if request.mechanism == EXTERNAL:
            self._use_certificate(request)
        else:
            self._challenge(request)

    def _is_limited(self) -> bool:
        """Whether nothing that comes from this host is tried now; the client is told so."""
        if not self._log_ins.failures.is_limited(self._host, trio.current_time()):
            return False
        self._access.note_limited(self._host)
        self._session.fail(
            Status.TOO_MANY,
            f"too many attempts to log in from {self._host} have failed; wait a few seconds",
        )
        return True

    def _use_certificate(self, request: StartLogIn) -> None:
        name = _certificate_name(self._stream)
        if request.data:
            self._session.fail(Status.MALFORMED, "StartLogIn: EXTERNAL has no data")
        elif self._log_ins.users.users.get(name) is None:
            sentence = f"no user has the name in the client's certificate, {name!r}"
            self._refuse(name, EXTERNAL, sentence)
        else:
            self._accept(name, EXTERNAL, b"")

    def _challenge(self, request: StartLogIn) -> None:
        binding = _binding(self._stream)
        try:
            first_message = FirstMessage.read(
                request.mechanism, request.data, offers_binding=bool(binding)
            )
        except (ScramError, UsersError) as error:
            self._session.fail(Status.MALFORMED, f"StartLogIn: {error}")
            return
        users = self._log_ins.users.users
        user = users.get(first_message.name)
        # The same on every node: a salt that differs would tell that nobody has it.
        secret = users.secret or self._log_ins.own_secret
        made_up = made_up_verifier(secret, first_message.name, SCRAM_ITERATIONS_DEFAULT)
        verifier = made_up if user is None or user.verifier is None else user.verifier
        exchange = ScramServer(first_message, verifier, secrets.token_urlsafe(NONCE_BYTES), binding)
        self._exchange = first_message.name, verifier, exchange
        self._session.send(LogInChallenge(exchange.server_first()))

    def check_response(self, response: ContinueLogIn) -> None:
        """The client answers the challenge."""
        assert self._exchange is not None, "the table lets it come only after a challenge"
        name, verifier, exchange = self._exchange
        # Many connections may have got their challenges before the first of them failed.
        if self._is_limited():
            return
        try:
            outcome = exchange.server_final(response.data)
        except ScramError as error:
            self._session.fail(Status.MALFORMED, f"ContinueLogIn: {error}")
            return
        # Since the challenge, the user may have been removed, or have got another password.
        user = self._log_ins.users.users.get(name)
        if outcome is None or user is None or user.verifier != verifier:
            self._refuse(name, SCRAM, _WRONG)
        else:
            self._accept(name, SCRAM, outcome)

    def close(self) -> None:
        """The connection is over."""
        if self.usage is not None:
            self.usage.disconnect(self._session)

    def _accept(self, name: str, mechanism: str, outcome: bytes) -> None:
        usage = self._log_ins.usages.usage_of(name)
        try:
            usage.connect(self._session)
        except ServerError as error:
            self._access.note_log_in(name, mechanism, is_allowed=False)
            self._session.fail(error.status, error.sentence)
            return
        self.usage = usage
        self._access.user_name = name
        self._access.note_log_in(name, mechanism, is_allowed=True)
        self._session.send(LoggedIn(outcome))

    def _refuse(self, name: str, mechanism: str, sentence: str) -> None:
        self._access.note_log_in(name, mechanism, is_allowed=False)
        self._log_ins.failures.count_failure(self._host, trio.current_time())
        log.warning("log-in failed", peer=self._peer, user=name, reason=sentence)
        # Not a function that answers: it would refer to this object, and this object to it. What
        # the connection had would stay in memory for ever.
        self._refusal = sentence

    def tell_failure(self) -> None:
        """Tells the client that its attempt has failed, and ends the session. To be called late:
        see `LogInResources.failure_delay_s`."""
        if self._session.state is not SessionState.CLOSED:
            self._session.fail(Status.LOG_IN_FAILED, self._refusal)
            self._wake()
