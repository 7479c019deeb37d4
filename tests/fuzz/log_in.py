"""What the log-in reads of a stranger: the texts of SCRAM, on both sides, and a certificate."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

from upr_protocol.limits import SCRAM_ITERATIONS_MIN
from upr_protocol.scram import (
    BINDING,
    SCRAM,
    SCRAM_PLUS,
    FirstMessage,
    ScramClient,
    ScramError,
    ScramServer,
    new_verifier,
)
from upr_protocol.transport.channel_binding import channel_binding
from upr_protocol.users import NAME_BYTES_MAX, UsersError
from upr_protocol.wire import LogInChallenge

FIRST, FINAL, CHALLENGE, OUTCOME, CERTIFICATE = range(5)
"""What the rest of an input is, by its first byte."""

_HASH: Final = bytes(range(32))
_VERIFIER: Final = new_verifier("pencil", b"sixteen bytes...", SCRAM_ITERATIONS_MIN)
_MANY_ITERATIONS: Final = re.compile(rb"i=0*([5-9]\d{3}|\d{5,})")
"""More iterations cost up to 200 ms, and that is all that they do."""


def client() -> ScramClient:
    """The client's side of the log-in in which the other messages come."""
    return ScramClient("user", "pencil", "client", _HASH, server_offers_binding=True)


def server() -> ScramServer:
    """The server's side of it."""
    first = FirstMessage.read(SCRAM_PLUS, client().client_first(), offers_binding=True)
    return ScramServer(first, _VERIFIER, "server", _HASH)


RIGHT_CHALLENGE: Final = server().server_first()
RIGHT_FINAL: Final = client().client_final(RIGHT_CHALLENGE)
RIGHT_OUTCOME: Final = server().server_final(RIGHT_FINAL) or b""

_LAST: Final = 2
"""Bytes in base64 whose last bits nobody looks at."""


def log_in(data: bytes) -> None:
    """One message of a log-in: only the right one leads on."""
    kind, message = (data[0] % 5, data[1:]) if data else (FIRST, b"")
    if kind == FIRST:
        _read_first(message)
    elif kind == FINAL:
        outcome = None
        with suppress(ScramError):
            outcome = server().server_final(message)
        assert outcome is None or message[:-_LAST] == RIGHT_FINAL[:-_LAST]
    elif kind == CHALLENGE:
        if not _MANY_ITERATIONS.search(message):
            with suppress(ScramError):
                assert client().client_final(message).startswith(b"c=")
    elif kind == OUTCOME:
        checked = client()
        checked.client_final(RIGHT_CHALLENGE)
        with suppress(ScramError):
            checked.check_server_final(message)
            assert message.startswith(RIGHT_OUTCOME[:-_LAST])
    else:
        assert len(channel_binding(message)) in (0, 32, 48, 64)


def _read_first(message: bytes) -> None:
    for mechanism in (SCRAM, SCRAM_PLUS):
        with suppress(ScramError, UsersError):
            first = FirstMessage.read(mechanism, message, offers_binding=True)
            # NFKC makes a name at most 18 times as long.
            assert 0 < len(first.name.encode()) <= 18 * NAME_BYTES_MAX
            assert first.header == (f"p={BINDING},," if mechanism == SCRAM_PLUS else "n,,")
            challenge = ScramServer(first, _VERIFIER, "server", _HASH).server_first()
            assert len(challenge) <= LogInChallenge.body_bytes_max // 4
