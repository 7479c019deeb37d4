"""SCRAM-SHA-256 (RFC 5802, RFC 7677): both sides prove that they know a password, and neither says
it.

The client learns the salt and the number of iterations, and proves that it has the key that follows
from the password. The server then proves that it has the verifier. Somebody who reads the messages
can do neither. With channel binding (`SCRAM-SHA-256-PLUS`) the proofs hold for one encrypted
connection only: somebody in between, with another certificate, cannot pass them on.

    client -> server   n,,n=user,r=CLIENT_NONCE
    server -> client   r=CLIENT_NONCE+SERVER_NONCE,s=SALT,i=ITERATIONS
    client -> server   c=biws,r=…,p=PROOF
    server -> client   v=SIGNATURE

All texts are ASCII but for the name. Nonces are given, so nothing here is random.
"""

from __future__ import annotations

import hashlib
import hmac
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from functools import lru_cache
from typing import Final

import attrs

from upr_protocol.errors import UprError
from upr_protocol.limits import SCRAM_ITERATIONS_MAX, SCRAM_ITERATIONS_MIN
from upr_protocol.users import (
    NAME_BYTES_MAX,
    UsersError,
    Verifier,
    normalised,
    normalised_name,
)

SCRAM: Final = "SCRAM-SHA-256"
SCRAM_PLUS: Final = "SCRAM-SHA-256-PLUS"
"""The same with channel binding."""

EXTERNAL: Final = "EXTERNAL"
"""The user is the name in the client's certificate (RFC 4422): nothing is left to prove."""

BINDING: Final = "tls-server-end-point"
"""The kind of channel binding: a hash of the server's certificate (RFC 5929)."""

NONCE_BYTES: Final = 18
"""Random bytes of a nonce, which make 24 characters."""

SALT_BYTES: Final = 16
"""Random bytes of a salt."""

_NONCE_MAX: Final = 128
_SALTED_KEYS_MAX: Final = 16


class ScramError(UprError):
    """A message of the other side is not what it must be, or proves nothing."""


def new_verifier(password: str, salt: bytes, iterations: int) -> Verifier:
    """What a server keeps of a password. `SCRAM_ITERATIONS_DEFAULT` iterations take some 20 ms.

    Args:
        password: The password.
        salt: `SALT_BYTES` random bytes; no other password has the same.
        iterations: How often the password is hashed.

    Raises:
        UsersError: The password is empty, or has a control character.
    """
    client_key, server_key = _keys(normalised(password, "the password"), salt, iterations)
    return Verifier(salt, iterations, hashlib.sha256(client_key).digest(), server_key)


def made_up_verifier(secret: bytes, name: str, iterations: int) -> Verifier:
    """The verifier of a user who does not exist: no password fits it, and it is always the same for
    the same name.

    Args:
        secret: What strangers do not know, the same on all nodes of a cluster.
        name: The name.
        iterations: What users who exist have, too.
    """
    salt = _hmac(secret, b"salt " + name.encode())[:SALT_BYTES]
    return Verifier(salt, iterations, _hmac(secret, b"key " + name.encode()), bytes(32))


class ScramClient:
    """The client's side of one log-in.

    Args:
        name: The user.
        password: The password.
        nonce: A text that was never used, of printable ASCII without a comma.
        binding: The hash of the server's certificate; empty for an encrypted connection without
            one; None for one in the clear.
        server_offers_binding: Whether the server names `SCRAM_PLUS`.

    Attributes:
        mechanism: Which of the two mechanisms it is.

    Raises:
        UsersError: The name or the password is empty, too long, or has a control character.
    """

    def __init__(
        self,
        name: str,
        password: str,
        nonce: str,
        binding: bytes | None = None,
        *,
        server_offers_binding: bool = False,
    ) -> None:
        self._name = normalised_name(name, "the user's name")
        if len(self._name.encode()) > NAME_BYTES_MAX:
            raise UsersError(f"a user's name has at most {NAME_BYTES_MAX} bytes in UTF-8")
        self._password = normalised(password, "the password")
        self._nonce = nonce
        is_bound = bool(binding) and server_offers_binding
        self.mechanism = SCRAM_PLUS if is_bound else SCRAM
        if is_bound:
            self._header = f"p={BINDING},,"
        else:
            # "y" says that this side could bind: a server that offered to, and sees it, knows that
            # somebody in between has removed the offer. Or has shown a certificate that nothing can
            # be bound to: this side would see the server's own, and could bind to it.
            self._header = "n,," if binding is None else "y,,"
        self._binding = (binding or b"") if is_bound else b""
        self._bare = f"n={_escaped(self._name)},r={nonce}"
        self._signature = b""

    def client_first(self) -> bytes:
        """The client-first-message of RFC 5802."""
        return (self._header + self._bare).encode()

    def client_final(self, challenge: bytes) -> bytes:
        """The client-final-message, which answers the server-first-message.

        Raises:
            ScramError: The server's message is not what it must be.
        """
        text = _decoded(challenge)
        nonce, salt_text, iterations_text = _attributes(text, "r", "s", "i")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise ScramError("the server's challenge does not continue this client's nonce")
        salt = _from_base64(salt_text)
        iterations = _integer(iterations_text)
        if not SCRAM_ITERATIONS_MIN <= iterations <= SCRAM_ITERATIONS_MAX:
            raise ScramError(
                f"the server asks for {iterations} iterations; {SCRAM_ITERATIONS_MIN:,} to "
                f"{SCRAM_ITERATIONS_MAX:,} are accepted"
            )
        client_key, server_key = _keys(self._password, salt, iterations)
        without_proof = f"c={_base64(self._header.encode() + self._binding)},r={nonce}"
        signed = f"{self._bare},{text},{without_proof}".encode()
        proof = _xor(client_key, _hmac(hashlib.sha256(client_key).digest(), signed))
        self._signature = _hmac(server_key, signed)
        return f"{without_proof},p={_base64(proof)}".encode()

    def check_server_final(self, outcome: bytes) -> None:
        """Checks the server-final-message.

        Raises:
            ScramError: The server does not prove that it knows the verifier of the password.
        """
        (signature,) = _attributes(_decoded(outcome), "v")
        if not self._signature or not hmac.compare_digest(_from_base64(signature), self._signature):
            raise ScramError("the server does not prove that it knows this user")


@attrs.frozen
class FirstMessage:
    """A client's first message, which the server has read.

    Attributes:
        name: The user, normalised.
        header: What the client says about channel binding.
        bare: The rest of the message.
        nonce: The client's nonce.
    """

    name: str
    header: str
    bare: str
    nonce: str

    @classmethod
    def read(cls, mechanism: str, message: bytes, *, offers_binding: bool) -> FirstMessage:
        """Reads the message.

        Args:
            mechanism: `SCRAM` or `SCRAM_PLUS`.
            message: What the client sent.
            offers_binding: Whether the server named `SCRAM_PLUS`.

        Raises:
            ScramError: It is not a first message, does not fit the mechanism, or somebody in
                between has removed the offer of channel binding.
            UsersError: The name is empty, or has a control character.
        """
        text = _decoded(message)
        flag, comma, bare_message = text.partition(",")
        identity, other_comma, bare = bare_message.partition(",")
        if not (comma and other_comma) or identity:
            raise ScramError("a first message begins with n,, or y,, or p=KIND,,")
        if (mechanism == SCRAM_PLUS) != flag.startswith("p="):
            raise ScramError(f"a first message with {flag!r} does not fit {mechanism}")
        if flag.startswith("p=") and flag != f"p={BINDING}":
            raise ScramError(f"channel binding must be of the kind {BINDING}")
        if flag == "y" and offers_binding:
            raise ScramError(
                "the client saw no offer of channel binding, or a certificate without one, and the "
                "server made an offer: somebody in between may have removed it"
            )
        if flag not in ("n", "y") and not flag.startswith("p="):
            raise ScramError("a first message begins with n,, or y,, or p=KIND,,")
        name, nonce = _attributes(bare, "n", "r")
        if not 1 <= len(nonce) <= _NONCE_MAX:
            raise ScramError(f"a nonce has 1 to {_NONCE_MAX} characters")
        return cls(normalised_name(_unescaped(name), "the user's name"), f"{flag},,", bare, nonce)


class ScramServer:
    """The server's side of one log-in.

    Args:
        first_message: The client's first message.
        verifier: That of the user, or one that was made up.
        nonce: A text that was never used, of printable ASCII without a comma.
        binding: The hash of the server's certificate; empty for a connection without one.
    """

    def __init__(
        self, first_message: FirstMessage, verifier: Verifier, nonce: str, binding: bytes = b""
    ) -> None:
        self._first_message = first_message
        self._verifier = verifier
        self._nonce = first_message.nonce + nonce
        self._binding = binding if first_message.header.startswith("p=") else b""
        self._challenge = f"r={self._nonce},s={_base64(verifier.salt)},i={verifier.iterations}"

    def server_first(self) -> bytes:
        """The server-first-message, which challenges the client."""
        return self._challenge.encode()

    def server_final(self, final: bytes) -> bytes | None:
        """The server-final-message, which proves that it knows the verifier; None if the client
        does not prove that it knows the password.

        Raises:
            ScramError: The client's message is not what it must be.
        """
        text = _decoded(final)
        without_proof, comma, proof_text = text.rpartition(",p=")
        if not comma:
            raise ScramError("a final message ends with a proof")
        binding, nonce = _attributes(without_proof, "c", "r")
        proof = _from_base64(proof_text)
        if nonce != self._nonce:
            raise ScramError("a final message repeats the nonce of the challenge")
        signed = f"{self._first_message.bare},{self._challenge},{without_proof}".encode()
        client_signature = _hmac(self._verifier.stored_key, signed)
        client_key = _xor(proof, client_signature) if len(proof) == 32 else b""
        # Both are looked at in any case, so that the time says nothing.
        is_bound = hmac.compare_digest(
            _from_base64(binding), self._first_message.header.encode() + self._binding
        )
        is_proven = hmac.compare_digest(
            hashlib.sha256(client_key).digest(), self._verifier.stored_key
        )
        if not (is_bound and is_proven):
            return None
        return f"v={_base64(_hmac(self._verifier.server_key, signed))}".encode()


@lru_cache(_SALTED_KEYS_MAX)
def _keys(password: str, salt: bytes, iterations: int) -> tuple[bytes, bytes]:
    """The client's and the server's key. They are kept, as RFC 5802 says: a client connects again
    and again with the same."""
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    return _hmac(salted, b"Client Key"), _hmac(salted, b"Server Key")


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _xor(left_bytes: bytes, right_bytes: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left_bytes, right_bytes, strict=True))


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _from_base64(text: str) -> bytes:
    try:
        return a2b_base64(text, strict_mode=True)
    except (Base64Error, ValueError) as error:
        raise ScramError("a value is not in base64") from error


def _decoded(message: bytes) -> str:
    try:
        return message.decode()
    except UnicodeError as error:
        raise ScramError("a message is not UTF-8") from error


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ScramError("a number of iterations has 1 to 9 digits")
    return int(text)


def _attributes(text: str, *names: str) -> list[str]:
    """The values in `name=value,name=value`. Attributes behind them are extensions, which this side
    may pass over."""
    parts = text.split(",", len(names))
    values = []
    for name, part in zip(names, parts, strict=False):
        if not part.startswith(f"{name}="):
            break
        values.append(part[2:])
    if len(values) < len(names):
        raise ScramError(f"a message must have the attributes {', '.join(names)}")
    return values


def _escaped(name: str) -> str:
    return name.replace("=", "=3D").replace(",", "=2C")


def _unescaped(name: str) -> str:
    unescaped = name.replace("=2C", ",").replace("=3D", "=")
    if _escaped(unescaped) != name or len(unescaped.encode()) > NAME_BYTES_MAX:
        raise ScramError(
            f"a name has at most {NAME_BYTES_MAX} bytes, with =2C for a comma and =3D for ="
        )
    return unescaped
