"""What a client may do wrong with a bucket that it opens, and with its streams."""

from __future__ import annotations

from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import PartitionState, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX
from upr_protocol.wire import Ack, Barrier, Open, Stats
from upr_server.conformance.wrong_frames import (
    BUCKET,
    MISSING,
    OPAQUE,
    P0,
    UNKNOWN_HISTORY,
    encoded,
    position_in,
    stream,
)
from upr_server.conformance.wrong_input import Outcome, Progress, WrongInput, WrongInputs


def wrong_streams() -> list[WrongInput]:
    """Of `Open`, and of what a consumer sends."""
    inputs = WrongInputs()
    connection_closed, request_refused = Outcome.CLOSED, Outcome.REFUSED
    case = inputs.topic("any request", Progress.OPENED)
    in_use = encoded(stream(), Stats(opaque=OPAQUE))
    case("an opaque that is in use", in_use, connection_closed, Status.OPAQUE_IN_USE)
    case("more than `requests_open_max` at a time", None, connection_closed, Status.TOO_MANY)
    case("about a bucket that was deleted meanwhile", None, request_refused, Status.NO_BUCKET)

    case = inputs.topic("`Open`", Progress.READY)
    case(
        "a bucket that does not exist",
        Open("nowhere", opaque=OPAQUE),
        request_refused,
        Status.NO_BUCKET,
    )
    case(
        "a partition that the bucket does not have",
        Open(BUCKET, (MISSING,), opaque=OPAQUE),
        Outcome.LOG,
        Status.NOT_MY_PARTITION,
    )
    named_twice = Open(BUCKET, (P0, P0), opaque=OPAQUE)
    case("a partition that is named twice", named_twice, request_refused, Status.BAD_ARGUMENT)
    case = inputs.topic("`Open`", Progress.OPENED)
    case("a second bucket", Open(BUCKET, opaque=OPAQUE), connection_closed, Status.OUT_OF_TURN)

    case = inputs.topic("`Stream`", Progress.OPENED)
    no_stream = Outcome.NO_STREAM
    twice = encoded(stream(), stream(opaque=OPAQUE + 1))
    case("a partition that is streamed already", twice, connection_closed, Status.OUT_OF_TURN)
    contradiction = stream(position=Position(FailoverLog(), SeqNo(9), SeqNo(3), None))
    case("a position that contradicts itself", contradiction, connection_closed, Status.MALFORMED)
    case(
        "a partition that the bucket does not have",
        stream(partition=MISSING),
        no_stream,
        Status.NOT_MY_PARTITION,
    )
    case("the state dead", stream(PartitionState.DEAD), no_stream, Status.BAD_ARGUMENT)
    case(
        "the state pending, without `with_answers`",
        stream(PartitionState.PENDING),
        no_stream,
        Status.BAD_ARGUMENT,
    )
    case("another state than it has", stream(PartitionState.REPLICA), no_stream, Status.WRONG_STATE)
    case(
        "`with_answers`, from a client that is not a replica",
        stream(with_answers=True),
        no_stream,
        Status.WRONG_STATE,
    )
    case(
        "a `key_prefix` that is longer than a key",
        stream(key_prefix=b"k" * (KEY_BYTES_MAX + 1)),
        no_stream,
        Status.BAD_ARGUMENT,
    )
    case("a lease that does not exist", stream(lease_id=7), no_stream, Status.RANGE_GONE)
    unknown = stream(position=position_in(UNKNOWN_HISTORY, 5))
    case("a history that the server does not know", unknown, no_stream, Status.ROLLBACK)
    case("a number that the server has not reached", None, no_stream, Status.SEQ_TOO_HIGH)

    case = inputs.topic("`CloseStream`", Progress.STREAMING)
    case("a partition that is not streamed", None, Outcome.IGNORED, Status.OK)
    case("another opaque than the stream's", None, connection_closed, Status.MALFORMED)
    case("a stream that is not answered yet", None, connection_closed, Status.OUT_OF_TURN)

    case = inputs.topic("`Ack`", Progress.STREAMING)
    case(
        "more than was taken from the window", Ack(1 << 40), connection_closed, Status.FLOW_CONTROL
    )

    case = inputs.topic("`Barrier`", Progress.STREAMING)
    case("a cookie of no bytes", Barrier(b""), connection_closed, Status.MALFORMED)
    case("a cookie of 65 bytes", Barrier(bytes(65)), connection_closed, Status.MALFORMED)
    case("the cookie of an open barrier", None, connection_closed, Status.COOKIE_IN_USE)
    case("more than `open_barriers_max` at a time", None, connection_closed, Status.TOO_MANY)
    return inputs.all
