"""The client's side of a log-in, against a server that does not keep to the rules."""

from __future__ import annotations

import pytest

from upr_protocol import scram
from upr_protocol.client.core.log_in import ClientLogIn
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.limits import SCRAM_ITERATIONS_MIN
from upr_protocol.scram import SCRAM
from upr_protocol.security import Credentials
from upr_protocol.wire import LogInChallenge


def test_a_client_answers_one_challenge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever plays the server could have it compute for as long as the log-in may take."""
    log_in = ClientLogIn(Credentials("bob", "pencil"), "nonce")
    log_in.begin((SCRAM,))
    log_in.respond(LogInChallenge(b"r=nonceX,s=AAAA,i=%d" % SCRAM_ITERATIONS_MIN))
    monkeypatch.setattr(scram, "_keys", None)  # nothing is computed any more
    with pytest.raises(RemoteProtocolError, match="one challenge"):
        log_in.respond(LogInChallenge(b"r=nonceY,s=AAAB,i=%d" % SCRAM_ITERATIONS_MIN))
