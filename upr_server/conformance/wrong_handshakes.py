"""What a client may do wrong in any frame, and before it has opened a bucket."""

from __future__ import annotations

from upr_kernel import pack_header
from upr_protocol.errors import Status
from upr_protocol.ids import NO_PARTITION
from upr_protocol.wire import Go, Hello, Opened, StartLogIn
from upr_server.conformance.wrong_frames import HELLO, changed, encoded, frame_of, hello_of
from upr_server.conformance.wrong_input import Outcome, Progress, WrongInput, WrongInputs


def wrong_handshakes() -> list[WrongInput]:
    """Of frames, `Hello` and the log-in."""
    inputs = WrongInputs()
    connection_closed = Outcome.CLOSED
    hello = encoded(HELLO)

    case = inputs.topic("a frame's header", Progress.CONNECTED)
    case("the magic", changed(hello, 0, 0), connection_closed, Status.BAD_MAGIC)
    case(
        "its checksum",
        changed(hello, 20, hello[20] ^ 1, mend=False),
        connection_closed,
        Status.BAD_CHECKSUM,
    )
    case("the version", changed(hello, 2, 2), connection_closed, Status.BAD_VERSION)
    case(
        "a length that is not a multiple of 8",
        changed(hello, 12, 1),
        connection_closed,
        Status.MALFORMED,
    )
    case(
        "an opcode that is not in use",
        changed(hello, 3, 0x7F),
        connection_closed,
        Status.UNKNOWN_MESSAGE,
    )
    case(
        "a message that only the server sends",
        Opened(1, 0),
        connection_closed,
        Status.OUT_OF_TURN,
    )
    case("a message that the state does not allow", Go(), connection_closed, Status.OUT_OF_TURN)
    too_long = pack_header(Hello.opcode, 0, NO_PARTITION, 0, 4096 + 8, 0)
    case(
        "a body longer than the message may have",
        too_long,
        connection_closed,
        Status.FRAME_TOO_LONG,
    )

    case = inputs.topic("a frame's body", Progress.CONNECTED)
    damaged = hello[:-8] + bytes((hello[-8] ^ 1,)) + hello[-7:]
    case("its checksum", damaged, connection_closed, Status.BAD_CHECKSUM)
    body = b"".join(map(bytes, HELLO.body_buffers()))
    case(
        "it ends inside a field",
        frame_of(Hello, body[:16], opaque=0),
        connection_closed,
        Status.MALFORMED,
    )
    case(
        "8 bytes after the fields",
        frame_of(Hello, body + bytes(8)),
        connection_closed,
        Status.MALFORMED,
    )
    case(
        "padding that is not zeros",
        frame_of(Hello, body + b"x"),
        connection_closed,
        Status.MALFORMED,
    )
    not_utf8 = body[:-1] + b"\xff"
    case("a text that is not UTF-8", frame_of(Hello, not_utf8), connection_closed, Status.MALFORMED)

    case = inputs.topic("`Hello`", Progress.CONNECTED)
    case(
        "no version that the server speaks",
        hello_of(versions=(9,)),
        connection_closed,
        Status.BAD_VERSION,
    )
    case(
        "a window below 64 KiB", hello_of(window_bytes=65_535), connection_closed, Status.MALFORMED
    )
    case(
        "an idle interval of 0 s", hello_of(idle_interval_s=0), connection_closed, Status.MALFORMED
    )
    case(
        "an idle interval of 3,601 s",
        hello_of(idle_interval_s=3601),
        connection_closed,
        Status.MALFORMED,
    )
    case("an identity of no bytes", hello_of(identity=""), connection_closed, Status.MALFORMED)
    case(
        "an identity of 201 bytes",
        hello_of(identity="x" * 201),
        connection_closed,
        Status.MALFORMED,
    )
    control = hello_of(identity="a\x1b[2J")
    case("an identity with control characters", control, connection_closed, Status.MALFORMED)
    case("nothing within 10 s", None, connection_closed, Status.IDLE)

    case = inputs.topic("the log-in", Progress.READY)
    unasked = StartLogIn("SCRAM-SHA-256", b"n,,n=user,r=nonce")
    case("`StartLogIn` in a cluster without users", unasked, connection_closed, Status.OUT_OF_TURN)
    case(
        "another message before it, in a cluster with users",
        None,
        connection_closed,
        Status.OUT_OF_TURN,
    )
    case(
        "a mechanism that `HelloReply` does not name", None, connection_closed, Status.LOG_IN_FAILED
    )
    case("a message that does not fit the mechanism", None, connection_closed, Status.MALFORMED)
    case("`y,,`, if `HelloReply` names channel binding", None, connection_closed, Status.MALFORMED)
    case("a wrong user, password or certificate", None, connection_closed, Status.LOG_IN_FAILED)
    case("one more attempt, after too many have failed", None, connection_closed, Status.TOO_MANY)
    return inputs.all
