"""What a failure of TLS means, in a sentence that says which file or option to look at."""

from __future__ import annotations

import ssl
from typing import Final

from upr_protocol.errors import BrokenError, TlsError, UprError

_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_OTHER_NAME: Final = (62, 64)
_UNTRUSTED: Final = (18, 19, 20, 21)
"""OpenSSL's numbers of why a certificate is refused, `X509_V_ERR_…`."""

_OF_SERVER: Final = {
    _EXPIRED: "the server's certificate has expired: renew the file that the server's setting "
    "tls_certificate names",
    _NOT_YET_VALID: "the server's certificate is not valid yet: look at the clocks of both "
    "machines, and at the file that the server's setting tls_certificate names",
    **dict.fromkeys(
        _OTHER_NAME,
        "the server's certificate is for another name: connect by a name that it has, or give it "
        "this one, in the file that the server's setting tls_certificate names",
    ),
    **dict.fromkeys(
        _UNTRUSTED,
        "no authority that is trusted here has signed the server's certificate: name the "
        "authority's file with the option ca",
    ),
}
"""Why a client refuses a server's certificate."""

_OF_CLIENT: Final = {
    _EXPIRED: "the client's certificate has expired: renew the file that its option cert names",
    _NOT_YET_VALID: "the client's certificate is not valid yet: look at the clocks of both "
    "machines, and at the file that the client's option cert names",
    **dict.fromkeys(
        _UNTRUSTED,
        "no authority that is trusted here has signed the client's certificate: add it to the "
        "file that the setting tls_client_ca names",
    ),
}
"""Why a server refuses a client's certificate."""

_REASONS_TO_CLIENT: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server wants a certificate: name one with the "
    "options cert and cert-key",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the server says that this side's certificate has expired: "
    "renew the file that the option cert names",
    "TLSV1_ALERT_UNKNOWN_CA": "the server does not trust the authority of this side's "
    "certificate: see the option cert, and the server's setting tls_client_ca",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the server speaks no version of TLS that is accepted here: "
    "see the server's setting tls_version_min",
    "UNSUPPORTED_PROTOCOL": "the server speaks no version of TLS that is accepted here: see the "
    "server's setting tls_version_min",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS: write upr:// in place of uprs://, or "
    "http:// in place of https://; or give the server a certificate with its setting "
    "tls_certificate",
}

_REASONS_TO_SERVER: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client showed no certificate, and the setting "
    "tls_client_certificates requires one: see the client's options cert and cert-key",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust the authority of this server's "
    "certificate: see the setting tls_certificate, and the client's option ca",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not accept this server's certificate, perhaps "
    "because of its name: see the setting tls_certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client says that this server's certificate has "
    "expired: see the setting tls_certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not accept this server's certificate: "
    "see the setting tls_certificate",
    "UNSUPPORTED_PROTOCOL": "the client speaks no version of TLS that is accepted here: see the "
    "setting tls_version_min",
}

_REFUSALS: Final = ("ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE", "ALERT_ACCESS_DENIED")
"""How other alerts begin that are about a certificate, behind their version of TLS."""


def explained_tls_error(error: ssl.SSLError, *, is_server: bool) -> UprError:
    """What is raised for an error of OpenSSL.

    Args:
        error: The error.
        is_server: Whether this side is the server.

    Returns:
        `TlsError` if to try again does not help; `BrokenError` for bytes that were not what the
        other side sent.
    """
    if isinstance(error, ssl.SSLEOFError):
        return BrokenError("the connection was cut: the other side has not said that it ends")
    if isinstance(error, ssl.SSLCertVerificationError):
        sentences = _OF_CLIENT if is_server else _OF_SERVER
        side, setting = ("client", "tls_client_ca") if is_server else ("server", "ca")
        return TlsError(
            sentences.get(
                error.verify_code,
                f"the {side}'s certificate is not accepted: {error.verify_message}; see its file, "
                f"and {setting}",
            )
        )
    reason = error.reason or ""
    sentence = (_REASONS_TO_SERVER if is_server else _REASONS_TO_CLIENT).get(reason)
    if sentence is not None:
        return TlsError(sentence)
    words = reason.lower().replace("_", " ") or str(error)
    if any(refusal in reason for refusal in _REFUSALS):
        return TlsError(f"the other side does not accept this side's certificate ({words})")
    return BrokenError(f"TLS failed: {words}")
