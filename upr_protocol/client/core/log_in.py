"""The client's side of a log-in."""

from __future__ import annotations

from upr_protocol.errors import RemoteProtocolError, ServerError, Status
from upr_protocol.scram import EXTERNAL, SCRAM, SCRAM_PLUS, ScramClient, ScramError
from upr_protocol.security import Credentials
from upr_protocol.wire import ContinueLogIn, LoggedIn, LogInChallenge, StartLogIn


class ClientLogIn:
    """One log-in, with the way that fits the server and the credentials.

    Args:
        credentials: The user and the password; None to log in with the certificate that was shown.
        nonce: A text that was never used, of printable ASCII without a comma.
        binding: The hash of the server's certificate; empty for an encrypted connection without
            one; None for one in the clear.
    """

    __slots__ = ("_binding", "_credentials", "_has_responded", "_nonce", "_scram")

    def __init__(
        self,
        credentials: Credentials | None = None,
        nonce: str = "",
        binding: bytes | None = None,
    ) -> None:
        self._credentials = credentials
        self._nonce = nonce
        self._binding = binding
        self._scram: ScramClient | None = None
        self._has_responded = False

    @property
    def is_channel_bound(self) -> bool:
        """Whether the proofs of the log-in are bound to the server's certificate. Once it is
        `check`ed, nobody in between can have passed them on."""
        return self._scram is not None and self._scram.mechanism == SCRAM_PLUS

    def begin(self, mechanisms: tuple[str, ...]) -> StartLogIn | None:
        """The first message; None if neither side asks for a log-in. A server that wants none
        offers no mechanisms.

        Raises:
            ServerError: There is nothing to log in with, or the server offers no way that fits.
            UsersError: The user's name or the password is empty, or has a control character.
        """
        if not mechanisms:
            if self._credentials is None:
                return None
            # By a log-in the server proves who it is, too. Anybody can leave that out.
            raise ServerError(
                Status.LOG_IN_FAILED,
                "the server does not ask for a log-in, so it proves nothing; if the cluster has no "
                "users, name none",
            )
        if self._credentials is None:
            if EXTERNAL in mechanisms:
                return StartLogIn(EXTERNAL)
            raise ServerError(Status.LOG_IN_NEEDED, "the server wants its clients to log in")
        self._scram = ScramClient(
            self._credentials.user,
            self._credentials.password,
            self._nonce,
            self._binding,
            server_offers_binding=SCRAM_PLUS in mechanisms,
        )
        if self._scram.mechanism not in mechanisms:
            raise ServerError(
                Status.LOG_IN_NEEDED,
                f"the server takes no passwords by {SCRAM}; it takes {', '.join(mechanisms)}",
            )
        return StartLogIn(self._scram.mechanism, self._scram.client_first())

    def respond(self, challenge: LogInChallenge) -> ContinueLogIn:
        """The answer to the server's challenge. It takes some 20 ms the first time for
        a password and a salt.

        Raises:
            RemoteProtocolError: It is not a challenge for this log-in, or not the first.
        """
        if self._scram is None:
            raise RemoteProtocolError("LogInChallenge: a certificate has nothing to answer")
        if self._has_responded:
            # Each challenge would cost this side its iterations again.
            raise RemoteProtocolError("LogInChallenge: a log-in has one challenge")
        self._has_responded = True
        try:
            return ContinueLogIn(self._scram.client_final(challenge.data))
        except ScramError as error:
            raise RemoteProtocolError(f"LogInChallenge: {error}") from error

    def check(self, outcome: LoggedIn) -> None:
        """Checks that the server knows the user, if it was asked to prove it.

        Raises:
            RemoteProtocolError: It does not.
        """
        if self._scram is not None:
            try:
                self._scram.check_server_final(outcome.data)
            except ScramError as error:
                raise RemoteProtocolError(f"LoggedIn: {error}") from error
