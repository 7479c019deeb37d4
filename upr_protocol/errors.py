"""Errors: status codes on the wire, and exceptions of client and server.

Each code stands for one cause; `ADVICE` says what to do about it.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Final


@unique
class Status(IntEnum):
    """A code in a frame's status field. 0 is success."""

    OK = 0

    # An answer to one request; the connection goes on.
    NOT_MY_PARTITION = 1
    WRONG_STATE = 2
    ROLLBACK = 3
    SEQ_TOO_HIGH = 4
    NO_BUCKET = 5
    BUCKET_EXISTS = 6
    BAD_ARGUMENT = 7
    UNSUPPORTED = 8
    TEMPORARY_FAILURE = 9
    TOKEN_TOO_OLD = 10
    HISTORY_CHANGED = 11
    TIMED_OUT = 12
    LIMIT_REACHED = 13
    DAMAGED = 14
    RANGE_GONE = 15
    SUPERSEDED = 16
    REPLAY_DIFFERS = 17
    REVISION_CONFLICT = 18
    NOT_DURABLE_YET = 19
    TOO_FEW_REPLICAS = 20
    NOT_ALLOWED = 21

    # An answer about one mutation of a run.
    EXISTS = 32
    NOT_FOUND = 33
    CAS_MISMATCH = 34
    NOT_A_NUMBER = 35
    TOO_LARGE = 36
    BAD_KEY = 37

    # Why a stream ended.
    END_REACHED = 64
    STREAM_CLOSED = 65
    STATE_CHANGED = 66
    ROLLBACK_NEEDED = 67
    BACKFILL_FAILED = 68
    TOO_SLOW = 69
    BUCKET_DELETED = 70
    SHUTTING_DOWN = 71
    RIGHT_REVOKED = 72

    # In an `Error` frame, after which the connection is closed.
    BAD_MAGIC = 128
    BAD_VERSION = 129
    BAD_CHECKSUM = 130
    FRAME_TOO_LONG = 131
    UNKNOWN_MESSAGE = 132
    OUT_OF_TURN = 133
    MALFORMED = 134
    OPAQUE_IN_USE = 135
    FLOW_CONTROL = 136
    IDLE = 137
    TOO_MANY = 138
    INTERNAL = 139
    COOKIE_IN_USE = 140
    LOG_IN_NEEDED = 141
    LOG_IN_FAILED = 142


ADVICE: Final[dict[Status, str]] = {
    Status.NOT_MY_PARTITION: "reload the partition map and ask the node that owns the partition",
    Status.WRONG_STATE: "reload the partition map, and ask the node that it names",
    Status.ROLLBACK: "roll back to the ceiling or below it, then ask again",
    Status.SEQ_TOO_HIGH: "this server is behind the client; ask again later, or ask another node",
    Status.NO_BUCKET: "correct the name, ask another node, or create the bucket first",
    Status.BUCKET_EXISTS: "use the existing bucket, or delete it first",
    Status.BAD_ARGUMENT: "correct the request",
    Status.UNSUPPORTED: "this server does not support it; do without, or use one that does",
    Status.TEMPORARY_FAILURE: "try again later",
    Status.TOKEN_TOO_OLD: "the answer was forgotten; read the keys to see the run's effect",
    Status.HISTORY_CHANGED: "changes may have been lost; read the keys to see what was kept",
    Status.TIMED_OUT: "ask again, or allow more time",
    Status.LIMIT_REACHED: "release some first, or ask for less at a time",
    Status.DAMAGED: "data on disk is damaged; run upr-server check, and restore a backup",
    Status.RANGE_GONE: "read again from the beginning, and renew leases in time",
    Status.SUPERSEDED: "a newer run of this task, or a consumer of the same name, is active; stop",
    Status.REPLAY_DIFFERS: (
        "the same run was sent before with other contents; make the input repeatable, "
        "by a checkpoint or a table"
    ),
    Status.REVISION_CONFLICT: "another command changed the map first; look at it, and repeat yours",
    Status.NOT_DURABLE_YET: (
        "the change was made but could still be lost; send the run again under its token, or "
        "wait until its sequence number is durable"
    ),
    Status.TOO_FEW_REPLICAS: "add replicas, or ask for fewer copies",
    Status.NOT_ALLOWED: (
        "log in as a user who may, or have the right granted: upr user grant USER RIGHT BUCKET"
    ),
    Status.EXISTS: "use set or replace if the key may exist",
    Status.NOT_FOUND: "the key is missing: to create it, use add, or set without a CAS",
    Status.CAS_MISMATCH: "read the item again and repeat the change with its new CAS",
    Status.NOT_A_NUMBER: "counters are decimal text below 2**64; set the key first",
    Status.TOO_LARGE: "keep values within 20 MiB",
    Status.BAD_KEY: "keys are 1 to 250 bytes",
    Status.END_REACHED: "nothing to do: the stream is complete",
    Status.STREAM_CLOSED: "nothing to do: the client asked for it",
    Status.STATE_CHANGED: "reload the partition map, and ask the node that it names",
    Status.ROLLBACK_NEEDED: "request the stream again, now or on another connection",
    Status.BACKFILL_FAILED: "request the stream again; if it ends again, read the server's log",
    Status.TOO_SLOW: "read faster, ask for fewer partitions, and send frames without pauses",
    Status.BUCKET_DELETED: "nothing to do: the bucket is gone",
    Status.SHUTTING_DOWN: "connect again after a pause, to this node or another",
    Status.RIGHT_REVOKED: "log in as a user who may still read the bucket, or stop",
    Status.BAD_MAGIC: (
        "use the UPR protocol on this port, as uprs:// if the server speaks TLS, or else as upr://"
    ),
    Status.BAD_VERSION: "use a protocol version that the server supports",
    Status.BAD_CHECKSUM: "connect again; if it happens again, check the network and the client",
    Status.FRAME_TOO_LONG: "keep frames within the limits in `HelloReply`",
    Status.UNKNOWN_MESSAGE: "send only messages of the agreed version",
    Status.OUT_OF_TURN: "follow the state table in docs/protocol.md",
    Status.MALFORMED: "follow the layouts in docs/protocol.md",
    Status.OPAQUE_IN_USE: "give each open request an opaque of its own",
    Status.COOKIE_IN_USE: "give each open barrier a cookie of its own",
    Status.FLOW_CONTROL: "stay within the granted window and credit",
    Status.IDLE: "send Hello at once, and Noop when silent for the idle interval",
    Status.TOO_MANY: "stay within the counts in `HelloReply`; while connecting, try again later",
    Status.LOG_IN_NEEDED: (
        "name a user with --user or UPR_USER, and give the password with UPR_PASSWORD or "
        "--password-file; or show a certificate with the user's name"
    ),
    Status.LOG_IN_FAILED: "check the user's name and the password, or the certificate",
    Status.INTERNAL: "the server failed unexpectedly; read its log",
}


class UprError(Exception):
    """The base of all exceptions that UPR raises on purpose."""


class ProtocolError(UprError):
    """A rule of the protocol was broken.

    Attributes:
        status: The code for the `Error` frame.
    """

    def __init__(self, message: str, status: Status = Status.MALFORMED) -> None:
        super().__init__(message)
        self.status = status


class LocalProtocolError(ProtocolError):
    """This side was about to break a rule of the protocol; nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule of the protocol; the connection cannot go on."""


class ChunkError(UprError):
    """The bytes are not a chunk, or break a rule of chunks."""


class ServerError(UprError):
    """The server refused one request, or ended the connection with an `Error` frame.

    Attributes:
        status: Why.
        sentence: What happened, without the advice that the exception's text adds.
        map_revision: The revision of the server's partition map; 0 where it sent none.
    """

    def __init__(self, status: Status, sentence: str = "", map_revision: int = 0) -> None:
        sentence = sentence or status.name.replace("_", " ").lower()
        advice = ADVICE.get(status)
        super().__init__(f"{sentence}: {advice}" if advice else sentence)
        self.status = status
        self.sentence = sentence
        self.map_revision = map_revision


class ClosedError(UprError):
    """The connection was closed on this side."""


class BrokenError(UprError):
    """The connection was lost or ended by the other side."""


class TlsError(UprError):
    """The two sides cannot agree on an encrypted connection: a certificate is not accepted, a file
    cannot be used, or one side does not speak TLS. To try again does not help."""


class CredentialsError(UprError):
    """A password is not to be had: its file cannot be read, or others can read it."""


def quoted_key(key: bytes) -> str:
    """A key in quotes, for a sentence: the text that the user wrote, with escapes for what is not
    printable, or not UTF-8. O(length)."""
    try:
        return repr(key.decode())
    except UnicodeDecodeError:
        return repr(key).removeprefix("b")
