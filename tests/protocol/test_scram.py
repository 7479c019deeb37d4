"""SCRAM-SHA-256: the example of RFC 7677, and what each side refuses."""

from __future__ import annotations

from binascii import a2b_base64
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.limits import SCRAM_ITERATIONS_MAX, SCRAM_ITERATIONS_MIN
from upr_protocol.scram import (
    SCRAM,
    SCRAM_PLUS,
    FirstMessage,
    ScramClient,
    ScramError,
    ScramServer,
    made_up_verifier,
    new_verifier,
)
from upr_protocol.users import NAME_BYTES_MAX, UsersError, Verifier

SALT: Final = b"sixteen bytes..."
ITERATIONS: Final = SCRAM_ITERATIONS_MIN
VERIFIER: Final = new_verifier("pencil", SALT, ITERATIONS)
BINDING: Final = bytes(range(32))


def test_the_example_of_rfc_7677() -> None:

    client = ScramClient("user", "pencil", "rOprNGfwEbeRWgbNEkqO")
    assert client.mechanism == SCRAM
    assert client.client_first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    verifier = new_verifier("pencil", a2b_base64("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096)
    first = FirstMessage.read(SCRAM, client.client_first(), offers_binding=False)
    server = ScramServer(first, verifier, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    challenge = server.server_first()
    assert challenge == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    final = client.client_final(challenge)
    assert final == (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    outcome = server.server_final(final)
    assert outcome == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    client.check_server_final(outcome)


def log_in(
    client: ScramClient,
    verifier: Verifier = VERIFIER,
    *,
    server_binding: bytes = b"",
    offers_binding: bool | None = None,
) -> bool:
    """Whether the server lets the client in; then the client has checked the server, too."""
    offers = bool(server_binding) if offers_binding is None else offers_binding
    first = FirstMessage.read(client.mechanism, client.client_first(), offers_binding=offers)
    server = ScramServer(first, verifier, "server", server_binding)
    outcome = server.server_final(client.client_final(server.server_first()))
    if outcome is None:
        return False
    client.check_server_final(outcome)
    return True


def test_a_client_logs_in_only_with_the_password() -> None:
    assert log_in(ScramClient("user", "pencil", "nonce"))
    assert not log_in(ScramClient("user", "Pencil", "nonce"))
    # The caller has found the verifier by the name. SCRAM itself does not compare names.
    assert log_in(ScramClient("other", "pencil", "nonce"))


def test_no_password_fits_a_verifier_that_was_made_up() -> None:
    made_up = made_up_verifier(b"secret", "user", ITERATIONS)
    assert made_up == made_up_verifier(b"secret", "user", ITERATIONS)
    assert made_up.salt != made_up_verifier(b"secret", "other", ITERATIONS).salt
    assert made_up.salt != made_up_verifier(b"another", "user", ITERATIONS).salt
    assert len(made_up.salt) == len(SALT)
    assert not log_in(ScramClient("user", "pencil", "nonce"), made_up)


def test_a_log_in_fails_if_the_two_sides_see_different_certificates() -> None:
    def bound(seen_by_server: bytes) -> bool:
        client = ScramClient("user", "pencil", "nonce", BINDING, server_offers_binding=True)
        assert client.mechanism == SCRAM_PLUS
        return log_in(client, server_binding=seen_by_server)

    assert bound(BINDING)
    assert not bound(bytes(32))


def test_a_removed_offer_of_binding_is_detected() -> None:
    client = ScramClient("user", "pencil", "nonce", BINDING, server_offers_binding=False)
    assert client.mechanism == SCRAM
    assert log_in(client)
    with pytest.raises(ScramError, match="somebody in between may have removed it"):
        log_in(client, server_binding=BINDING)
    # The client sees a certificate that gives no binding, so it is not the server's.

    with pytest.raises(ScramError, match="somebody in between may have removed it"):
        log_in(ScramClient("user", "pencil", "nonce", b""), server_binding=BINDING)
    assert log_in(ScramClient("user", "pencil", "nonce", b"", server_offers_binding=True))
    # A client that cannot use bindings may log in without.
    assert log_in(ScramClient("user", "pencil", "nonce"), server_binding=BINDING)


def test_a_log_in_fails_if_the_header_was_changed_on_the_way() -> None:
    client = ScramClient("user", "pencil", "nonce", BINDING, server_offers_binding=False)
    changed = client.client_first().replace(b"y,,", b"n,,")
    first = FirstMessage.read(SCRAM, changed, offers_binding=True)
    server = ScramServer(first, VERIFIER, "server", BINDING)
    assert server.server_final(client.client_final(server.server_first())) is None


def test_a_client_refuses_a_server_without_the_verifier() -> None:
    client = ScramClient("user", "pencil", "nonce")
    # Before the client has a challenge, it expects no signature. An empty one is not that.
    for outcome in (b"v=", b"v=AAAA"):
        with pytest.raises(ScramError, match="does not prove"):
            client.check_server_final(outcome)
    client.client_final(b"r=nonceserver,s=AAAA,i=4096")
    with pytest.raises(ScramError, match="does not prove"):
        client.check_server_final(b"v=AAAA")


@pytest.mark.parametrize(
    ("challenge", "sentence"),
    [
        (b"", "must have the attributes r, s, i"),
        (b"\xff", "not UTF-8"),
        (b"r=nonce,s=AAAA,i=4096", "does not continue this client's nonce"),
        (b"r=other,s=AAAA,i=4096", "does not continue this client's nonce"),
        (b"r=nonceX,s=A,i=4096", "not in base64"),
        (b"r=nonceX,s=AAAA,i=4095", "4095 iterations; 4,096 to 200,000 are accepted"),
        (b"r=nonceX,s=AAAA,i=%d" % (SCRAM_ITERATIONS_MAX + 1), "are accepted"),
        (b"r=nonceX,s=AAAA,i=-1", "1 to 9 digits"),
        (b"r=nonceX,s=AAAA,i=9999999999", "1 to 9 digits"),
        (b"m=x,r=nonceX,s=AAAA,i=4096", "must have the attributes"),
    ],
)
def test_a_client_refuses_a_wrong_challenge(challenge: bytes, sentence: str) -> None:
    with pytest.raises(ScramError, match=sentence):
        ScramClient("user", "pencil", "nonce").client_final(challenge)


@pytest.mark.parametrize(
    ("mechanism", "message", "sentence"),
    [
        (SCRAM, b"", "begins with"),
        (SCRAM, b"x,,n=u,r=n", "begins with"),
        (SCRAM, b"n,a=other,n=u,r=n", "begins with"),
        (SCRAM, b"p=tls-server-end-point,,n=u,r=n", "does not fit SCRAM-SHA-256"),
        (SCRAM_PLUS, b"n,,n=u,r=n", "does not fit SCRAM-SHA-256-PLUS"),
        (SCRAM_PLUS, b"p=tls-unique,,n=u,r=n", "of the kind tls-server-end-point"),
        (SCRAM, b"n,,n=u", "must have the attributes n, r"),
        (SCRAM, b"n,,m=x,n=u,r=n", "must have the attributes n, r"),
        (SCRAM, b"n,,n=u,r=", "1 to 128 characters"),
        (SCRAM, b"n,,n=u,r=" + b"n" * 129, "1 to 128 characters"),
        (SCRAM, b"n,,n=u=2,r=n", "=2C for a comma"),
        (SCRAM, b"n,,n=" + b"u" * 129 + b",r=n", "at most 128 bytes"),
    ],
)
def test_a_server_refuses_a_wrong_first_message(
    mechanism: str, message: bytes, sentence: str
) -> None:
    with pytest.raises(ScramError, match=sentence):
        FirstMessage.read(mechanism, message, offers_binding=True)


@pytest.mark.parametrize(
    ("final", "sentence"),
    [
        (b"c=biws,r=nonceserver", "ends with a proof"),
        (b"c=biws,r=nonce,p=AAAA", "repeats the nonce"),
        (b"c=biws,r=nonceserver,p=A", "not in base64"),
        (b"c=b,r=nonceserver,p=AAAA", "not in base64"),
        (b"c=biws,r=nonceserver,p=AA*AA", "not in base64"),
        (b"r=nonceserver,p=AAAA", "must have the attributes c, r"),
    ],
)
def test_a_server_refuses_a_wrong_final_message(final: bytes, sentence: str) -> None:
    first = FirstMessage.read(SCRAM, b"n,,n=user,r=nonce", offers_binding=False)
    with pytest.raises(ScramError, match=sentence):
        ScramServer(first, VERIFIER, "server").server_final(final)


@pytest.mark.parametrize("proof", [b"AAAA", b"A" * 43 + b"=", b"A" * 64])
def test_a_wrong_proof_of_any_length_is_refused(proof: bytes) -> None:
    first = FirstMessage.read(SCRAM, b"n,,n=user,r=nonce", offers_binding=False)
    server = ScramServer(first, VERIFIER, "server")
    assert server.server_final(b"c=biws,r=nonceserver,p=" + proof) is None


@given(st.text(min_size=1, max_size=30))
def test_a_server_decodes_the_name_that_the_client_encoded(name: str) -> None:
    try:
        client = ScramClient(name, "pencil", "nonce")
    except UsersError:
        return
    first = FirstMessage.read(SCRAM, client.client_first(), offers_binding=False)
    assert first.name == client._name


def test_a_name_has_at_most_the_length_of_a_users_name() -> None:
    longest = "u" * NAME_BYTES_MAX
    assert log_in(ScramClient(longest, "pencil", "nonce"))
    with pytest.raises(UsersError, match="at most 128 bytes"):
        ScramClient(longest + "u", "pencil", "nonce")


def test_names_and_passwords_are_compared_in_normal_form() -> None:
    # "ä" is one character here, and two below: "a" and a combining mark. \uff21 is a wide "A".

    verifier = new_verifier("gr\u00e4n", SALT, ITERATIONS)
    assert log_in(ScramClient("\uff21nna", "gra\u0308n", "nonce"), verifier)
    first = FirstMessage.read(
        SCRAM, ScramClient("\uff21", "x", "n").client_first(), offers_binding=False
    )
    assert first.name == "A"


def test_empty_passwords_and_control_characters_are_refused() -> None:
    for password in ("", "a\nb", "\ud800"):
        with pytest.raises(UsersError, match="the password") as caught:
            new_verifier(password, SALT, ITERATIONS)
        assert not password or password not in str(caught.value)
