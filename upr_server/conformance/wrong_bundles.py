"""What a publisher may do wrong."""

from __future__ import annotations

from upr_protocol.chunk import CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, Durability, Operation
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, BUNDLE_RUNS_MAX
from upr_server.conformance.wrong_frames import (
    KEY,
    MISSING,
    ONE_ROW,
    OPAQUE,
    TEXT_KEY,
    TWO_ROWS,
    WRITER,
    altered,
    bundle,
    encoded,
    key_in,
    mutate,
    runs_of_one_writer,
    set_row,
    text_row,
    wrong_durability,
)
from upr_server.conformance.wrong_input import Outcome, Progress, WrongInput, WrongInputs


def wrong_bundles() -> list[WrongInput]:
    """Of bundles, their runs, and the rows of these."""
    inputs = WrongInputs()
    connection_closed, request_refused, row_failed = (
        Outcome.CLOSED,
        Outcome.REFUSED,
        Outcome.ROW_FAILED,
    )
    case = inputs.topic("a bundle", Progress.OPENED)
    case("sent with no credit", None, connection_closed, Status.FLOW_CONTROL)
    case("an unknown durability", wrong_durability(), connection_closed, Status.MALFORMED)
    case(
        "no run",
        bundle([], bytes(chunk_of_plain_sets([], []))),
        connection_closed,
        Status.MALFORMED,
    )
    case("a run without rows", bundle([(0, 1), (1, 0)]), connection_closed, Status.MALFORMED)
    case(
        "runs that are not in order", bundle([(1, 1), (0, 1)]), connection_closed, Status.MALFORMED
    )
    case("two runs of one partition", bundle([(0, 1), (0, 1)]), connection_closed, Status.MALFORMED)
    case(
        "runs with other rows than the chunk",
        bundle([(0, 2)], bytes(ONE_ROW)),
        connection_closed,
        Status.MALFORMED,
    )
    runs = [(partition, 1) for partition in range(BUNDLE_RUNS_MAX + 1)]
    case(f"more than {BUNDLE_RUNS_MAX:,} runs", bundle(runs), connection_closed, Status.MALFORMED)
    long_run = [(0, BUNDLE_MUTATIONS_MAX + 1)]
    case(
        f"more than {BUNDLE_MUTATIONS_MAX:,} mutations",
        bundle(long_run),
        connection_closed,
        Status.MALFORMED,
    )
    lengths = altered(ONE_ROW, 4, (99).to_bytes(4, "little"))
    case("a chunk whose lengths do not add up", lengths, connection_closed, Status.MALFORMED)
    reserved = altered(ONE_ROW, 12, b"\x01")
    case("a chunk whose reserved field is not 0", reserved, connection_closed, Status.MALFORMED)
    backwards = altered(ONE_ROW, 16, b"\x01")
    case("a chunk whose end is below its start", backwards, connection_closed, Status.MALFORMED)
    numbered = altered(ONE_ROW, 32, b"\x01")
    case("a chunk with sequence numbers", numbered, request_refused, Status.BAD_ARGUMENT)
    expire = mutate(Mutation(Operation.EXPIRE, KEY))
    case("a chunk with `EXPIRE`", expire, request_refused, Status.BAD_ARGUMENT)
    # Before the operation of one row lie 32 bytes of head, and six columns of 8.
    undefined = altered(ONE_ROW, 32 + 48, b"\x63")
    case("a chunk with an undefined operation", undefined, request_refused, Status.BAD_ARGUMENT)
    # Before the key offsets of two rows lie 32 bytes of head, and 48 of numbers and the like.
    falling = altered(TWO_ROWS, 32 + 48 + 4, (100).to_bytes(4, "little"))
    case("a chunk whose offsets fall", falling, request_refused, Status.BAD_ARGUMENT)
    delta = mutate(Mutation(Operation.INCREMENT, KEY, b"1"))
    case("a counter's value that is not 24 bytes", delta, request_refused, Status.BAD_ARGUMENT)

    case = inputs.topic("a run", Progress.OPENED)
    wrong_partition = mutate(set_row(), partition=MISSING)
    case(
        "a partition that the node is not active for",
        wrong_partition,
        request_refused,
        Status.NOT_MY_PARTITION,
    )
    elsewhere = mutate(set_row(key_in(1)))
    case("a key that belongs to another partition", elsewhere, request_refused, Status.BAD_ARGUMENT)
    case(
        "the counter 0, under a writer",
        mutate(set_row(), writer=WRITER),
        request_refused,
        Status.BAD_ARGUMENT,
    )
    replicated = mutate(set_row(), durability=Durability.REPLICATED, copies=1)
    case(
        "more copies than there are replicas", replicated, request_refused, Status.TOO_FEW_REPLICAS
    )
    case(
        "a replicated level with 0 copies, of a partition that has replicas",
        None,
        request_refused,
        Status.BAD_ARGUMENT,
    )
    case(
        "a run whose result was forgotten",
        runs_of_one_writer(),
        request_refused,
        Status.TOKEN_TOO_OLD,
    )
    later = mutate(set_row(), writer=WRITER, counter=1, attempt=2, opaque=OPAQUE + 1)
    earlier = mutate(set_row(), writer=WRITER, counter=2, attempt=1)
    case("an older attempt", encoded(later, earlier), request_refused, Status.SUPERSEDED)
    first_run = mutate(
        set_row(), writer=WRITER, counter=1, chain=ONE_ROW.chained_crc(0), opaque=OPAQUE + 1
    )
    other_chain = mutate(set_row(value=b"w"), writer=WRITER, counter=1, chain=1)
    case(
        "the token of a run with another chain",
        encoded(first_run, other_chain),
        request_refused,
        Status.REPLAY_DIFFERS,
    )
    broken = mutate(set_row(), writer=WRITER, counter=2, chain=1)
    case(
        "a chain that does not continue the last one",
        encoded(first_run, broken),
        request_refused,
        Status.REPLAY_DIFFERS,
    )
    case(
        "the disk is full, or an earlier run was refused",
        None,
        request_refused,
        Status.TEMPORARY_FAILURE,
    )
    case(
        "operations that need too many bytes of old values",
        None,
        request_refused,
        Status.LIMIT_REACHED,
    )

    case = inputs.topic("a row of a run", Progress.OPENED)
    case("an empty key", mutate(set_row(b"")), row_failed, Status.BAD_KEY)
    case("a key of 251 bytes", mutate(set_row(b"k" * 251)), row_failed, Status.BAD_KEY)
    case("a value above 20 MiB", None, row_failed, Status.TOO_LARGE)
    case("`ADD` of a key that exists", mutate(text_row(Operation.ADD)), row_failed, Status.EXISTS)
    absent = key_in(0, "absent")
    for operation in (Operation.REPLACE, Operation.DELETE, Operation.APPEND, Operation.TOUCH):
        row = Mutation(operation, absent)
        case(f"`{operation.name}` of a missing key", mutate(row), row_failed, Status.NOT_FOUND)
    no_create = Mutation(Operation.INCREMENT, absent, CounterDelta(1, create=False).encode())
    case(
        "`INCREMENT` without `create`, of a missing key",
        mutate(no_create),
        row_failed,
        Status.NOT_FOUND,
    )
    text = Mutation(Operation.INCREMENT, TEXT_KEY, CounterDelta(1).encode())
    case(
        "`INCREMENT` of a value that is not a number",
        mutate(text),
        row_failed,
        Status.NOT_A_NUMBER,
    )
    stale = Mutation(Operation.SET, TEXT_KEY, b"", cas=Cas(7))
    case("another CAS than the item's", mutate(stale), row_failed, Status.CAS_MISMATCH)
    no_item = Mutation(Operation.SET, absent, b"", cas=Cas(7))
    case("an expected CAS, and a missing key", mutate(no_item), row_failed, Status.NOT_FOUND)
    case(
        "a key whose old value is damaged, if the operation needs it",
        None,
        row_failed,
        Status.DAMAGED,
    )
    return inputs.all
