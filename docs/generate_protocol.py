"""Writes docs/protocol.md: the prose of docs/protocol.in.md, and what the code declares.

    python docs/generate_protocol.py --write docs/protocol.md
    python docs/generate_protocol.py --check docs/protocol.md

Layouts, opcodes, senders, limits, states, status codes and advice are read from `upr_protocol`, and
the conversations from docs/vectors. In the prose, `{{name}}` stands for what
`blocks` has by that name. A message that is declared anew appears by itself.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
import typing
from binascii import a2b_base64
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import construct as cs
from crc32c import crc32c

from upr_protocol import chunk as chunk_module
from upr_protocol import limits
from upr_protocol.address import PORT_DEFAULT
from upr_protocol.bucket_event import BucketFate
from upr_protocol.chunk import Chunk, CounterDelta, Mutation, encoded_bytes
from upr_protocol.client.core.retry import (
    FIRST_WAIT_S,
    MAP_WAIT_S_MAX,
    RETRY_TIMEOUT_S_DEFAULT,
    WAIT_S_MAX,
)
from upr_protocol.errors import ADVICE, Status
from upr_protocol.failover import FailoverLog, StartReason
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    NO_PARTITION,
    Cas,
    Durability,
    HistoryId,
    Operation,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.partition_map import Assignment, HistoryPoint, PartitionMap
from upr_protocol.scram import (
    SCRAM_PLUS,
    FirstMessage,
    ScramClient,
    ScramServer,
    new_verifier,
)
from upr_protocol.session.keepalive import DEAD_AFTER_INTERVALS
from upr_protocol.session.rules import CREDIT_MESSAGES, WINDOW_MESSAGES
from upr_protocol.session.states import SESSION, STREAM, STREAM_INPUTS
from upr_protocol.wire import (
    HEADER_BYTES,
    MESSAGES,
    Close,
    CycleEnd,
    Error,
    FrameBuffer,
    Go,
    Header,
    HelloReply,
    LeaseAction,
    Message,
    Refusal,
    Role,
    SessionState,
    Stream,
    StreamReply,
    decode,
)
from upr_protocol.wire.columns import BUNDLE, CHUNK, LOG, POSITION
from upr_protocol.wire.frame import HEADER
from upr_protocol.wire.message import BODY_BYTES_MAX_DEFAULT, layout_fields
from upr_server.config import ServerConfig
from upr_server.conformance import WRONG_INPUTS, Outcome, Progress, client_scenario
from upr_server.engine.bucket import QUOTA_BYTES_DEFAULT
from upr_server.engine.memory_policy import ANSWERS_PART, MemoryPolicy
from upr_server.engine.operations import (
    COUNTER_DIGITS_MAX,
    COUNTS,
    PUBLISHED,
    JoinedValue,
    StoredOutcome,
    operation_outcome,
)
from upr_server.engine.operations import (
    Outcome as OperationOutcome,
)
from upr_server.engine.publisher_answers import ANSWERS_BYTES_MAX, BATCHES_MAX, WRITERS_MAX
from upr_server.net.credit import CREDIT_BYTES_MAX, CREDIT_BYTES_MIN
from upr_server.net.frame_budget import FRAME_BYTES_PER_S_MIN, FRAME_TIMEOUT_S
from upr_server.net.handlers.publishing import EVALUATED_BYTES_MAX
from upr_server.net.server import BUCKETS_TOLD_MAX, CONNECTIONS_TOLD_MAX
from upr_server.runtime import FAILURES_MAX
from upr_server.storage.online.leases import BACKFILL_LEASE_S, EVICTED_LEASES_MAX, LAPSED_S

OF_A_STREAM: Final[frozenset[type[Message]]] = frozenset(STREAM_INPUTS) - {Stream}
"""Messages that carry the opaque of the `Stream` that opened theirs."""

PROSE: Final = Path(__file__).with_name("protocol.in.md")
CONVERSATIONS: Final = Path(__file__).with_name("vectors") / "conversations.json"
"""What docs/conversations.py has recorded."""

STARTS: Final = CONVERSATIONS.with_name("starts.json")
"""Where streams of several clients start."""

ENUMERATIONS: Final[tuple[type[IntEnum], ...]] = (
    Operation,
    PartitionState,
    SnapshotKind,
    LeaseAction,
    BucketFate,
)

SENDERS: Final = {Role.CLIENT: "client", Role.SERVER: "server", Role.EITHER: "either side"}

REACTIONS: Final[Sequence[tuple[Sequence[Status], str, str]]] = (
    (
        (Status.NOT_MY_PARTITION, Status.WRONG_STATE, Status.STATE_CHANGED),
        "about a partition",
        "asks again at the node in the [partition map](#the-partition-map)",
    ),
    (
        (Status.TEMPORARY_FAILURE, Status.SEQ_TOO_HIGH),
        "of any request",
        "asks again after a pause",
    ),
    (
        (Status.NO_BUCKET,),
        "of `Open` or `GetMap`",
        "asks the [other nodes](#a-missing-or-deleted-bucket) of the map, if it knows one",
    ),
    ((Status.ROLLBACK,), "of a `StreamReply`", "rolls back, then asks again"),
    ((Status.DAMAGED,), "of a `StreamReply`", "asks another node, or reports this"),
    (
        (Status.ROLLBACK_NEEDED, Status.TOO_SLOW, Status.BACKFILL_FAILED),
        "of a `StreamEnd`",
        "asks for the stream again; after `BACKFILL_FAILED` only once",
    ),
    (
        (Status.NOT_DURABLE_YET,),
        "of a run",
        "sends the run again; or, if its `last_seq` is not 0, [waits](#durability) with `Await`",
    ),
    (
        (Status.HISTORY_CHANGED,),
        "of a `Get` or `SeqnosAt`",
        "asks again in the new history; what it knows of the old one may be lost",
    ),
    (
        (Status.HISTORY_CHANGED,),
        "of an `Await`",
        (
            "does not ask again: the number may be lost, or belong to another mutation. "
            "A publisher [sends the run again](#durability); another client reads the keys again"
        ),
    ),
    ((Status.TIMED_OUT,), "of an `Await`", "asks again, if it still wants to wait"),
    (
        (
            Status.TOO_SLOW,
            Status.SHUTTING_DOWN,
            Status.BAD_CHECKSUM,
            Status.IDLE,
            Status.INTERNAL,
            Status.TOO_MANY,
        ),
        (
            "of an `Error`; `SHUTTING_DOWN` also of a `StreamEnd`; "
            "`TOO_MANY` only while the client connects"
        ),
        "connects again after a pause",
    ),
)
"""Statuses about which a client does something by itself: where they come, and what it does."""

STATUS_RANGES: Final = (
    (0, 0, "Success."),
    (1, 31, "In a `Refusal`, `StreamReply`, `PartitionLog`, or for a run in a `MutateReply`."),
    (
        32,
        63,
        (
            "For one row of a run, in `MutateReply.failures`. `DAMAGED` occurs there, too. A key "
            "that a `GetReply` refuses has `BAD_KEY` or `DAMAGED`."
        ),
    ),
    (
        64,
        127,
        (
            "Why a stream ended, in `StreamEnd`. `ROLLBACK_NEEDED` also refuses a `Lease`: its "
            "range has lost deletions, so ask for a range from 0."
        ),
    ),
    (
        128,
        0xFFFF,
        (
            "In an `Error`, after which the connection is closed. `SHUTTING_DOWN`, `TOO_SLOW` and "
            "`NOT_ALLOWED` occur there, too. No server sends `LOG_IN_NEEDED`: client programs "
            "report it."
        ),
    ),
)


# --- small things of Markdown ---------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; what is no text is written as it prints."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [str(cell).replace("|", r"\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fenced(text: str, language: str = "text") -> str:
    """A block of code."""
    return f"```{language}\n{text}\n```"


def number(value: float) -> str:
    """A number that is easy to read."""
    return f"{value:,.10g}"


def size(value: int) -> str:
    """A number of bytes, in MiB or KiB where it is round there."""
    for unit, unit_bytes in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value and value % unit_bytes == 0:
            return f"{value // unit_bytes:,} {unit}"
    return f"{value:,} bytes"


def one_line(text: str) -> str:
    """`text` without its line breaks."""
    return " ".join(text.split())


def listed(words: Sequence[str], last: str = "and") -> str:
    """Words as a sentence lists them."""
    *first_words, final = words
    return f"{', '.join(first_words)} {last} {final}" if first_words else final


def link(kind: type[Message]) -> str:
    """A message's name, which leads to its section."""
    return f"[`{kind.__name__}`](#{kind.__name__.lower()})"


# --- docstrings -----------------------------------------------------------------------------------


def prose(documented: type) -> str:
    """The docstring without its section of attributes."""
    return (inspect.getdoc(documented) or "").split("Attributes:")[0].strip()


def attributes(documented: type) -> dict[str, str]:
    """What the docstring says about each attribute."""
    _, _, section = (inspect.getdoc(documented) or "").partition("Attributes:\n")
    texts = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: one_line(text) for name, text in texts}


def string_below(source: str) -> dict[str, str]:
    """The docstring below each assignment in `source`, by the assigned name."""
    module = ast.parse(inspect.cleandoc(source))
    body = module.body
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):
        body = body[0].body
    texts = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        if not isinstance(target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = one_line(str(following.value.value))
        texts[target.id] = text
    return texts


# --- layouts --------------------------------------------------------------------------------------

LAYOUT_HEAD: Final = ("offset", "size", "type", "name", "meaning")
INTEGERS: Final = {"B": "u8", "H": "u16", "L": "u32", "Q": "u64"}


def subcons(construct: Any) -> list[Any]:
    """The parts of a structure, in order."""
    return list(construct.subcons)


def bare(construct: Any) -> Any:
    """A construct without its name and its adapters."""
    while isinstance(construct, (cs.Renamed, cs.Rebuild, cs.ExprAdapter)) and not any(
        construct is known for known in (BUNDLE, CHUNK, LOG, POSITION)
    ):
        construct = construct.subcon
    return construct


def type_of(construct: Any) -> str:
    """The type of a field, as words."""
    construct = bare(construct)
    if construct is CHUNK:
        return "[chunk](#chunks) to the end of the body"
    if construct is LOG:
        return "[failover log](#failover-logs)"
    if construct is cs.Flag:
        return "u8, 0 or 1"
    match construct:
        case cs.FormatField():
            return INTEGERS[construct.fmtstr.strip("<>=")]
        case cs.StringEncoded():
            return f"text({type_of(construct.subcon.lengthfield)})"
        case cs.Prefixed():
            return f"bytes({type_of(construct.lengthfield)})"
        case cs.Bytes() | cs.Padded():
            return f"{construct.length} bytes"
        case cs.FocusedSeq():
            count, items = map(bare, subcons(construct))
            return f"list({type_of(count)}) of {type_of(items.subcon)}"
        case cs.Struct():
            fields = ", ".join(f"{sub.name} {type_of(sub)}" for sub in subcons(construct))
            return f"({fields})"
    raise TypeError(f"no words for {construct!r}: add them to docs/generate_protocol.py")


def size_of(construct: Any) -> int | None:
    """A field's size in bytes, or None when it varies."""
    try:
        return int(construct.sizeof())
    except cs.SizeofError:
        return None


def flattened(layout: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a layout with their names; those of a position or bundle one by one."""
    for sub in subcons(layout):
        if bare(sub) in (BUNDLE, POSITION):
            yield from flattened(bare(sub).subcon, f"{sub.name}.")
        else:
            yield prefix + sub.name, sub


def layout_rows(layout: Any, kind: type[Message] | None = None) -> list[list[object]]:
    """Offset, size, type, name and meaning of each field."""
    rows: list[list[object]] = []
    further = attributes(kind) if kind else {}
    hints = typing.get_type_hints(kind) if kind else {}
    offset: int | None = 0
    for name, sub in flattened(layout):
        size = size_of(sub)
        words = type_of(sub)
        hint = hints.get(name)
        if isinstance(hint, type) and issubclass(hint, IntEnum):
            words += f" [`{hint.__name__}`](#{hint.__name__.lower()})"
        meaning = further.get(name) or sub.docs
        rows.append(
            [
                "behind it" if offset is None else offset,
                "varies" if size is None else size,
                words,
                f"`{name}`",
                "zeros; a receiver does not look" if name == "padding" else meaning,
            ]
        )
        offset = None if offset is None or size is None else offset + size
    return rows


# --- sections -------------------------------------------------------------------------------------


def session_diagram() -> str:
    """The states of a connection as a diagram. `Error` leads to the end from everywhere."""
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {SessionState.GREETING.name}"]
    for state, row in SESSION.items():
        edges: dict[SessionState, list[str]] = {}
        for kind, target in row.items():
            if target is not state and kind is not Error:
                edges.setdefault(target, []).append(kind.__name__)
            if kind is HelloReply:
                edges[SessionState.UNAUTHENTICATED] = ["HelloReply with mechanisms"]
        lines += [f"    {state.name} --> {to.name}: {', '.join(on)}" for to, on in edges.items()]
    lines.append(f"    {SessionState.CLOSED.name} --> [*]")
    return fenced("\n".join(lines), "mermaid")


def state_rows() -> list[list[str]]:
    """For each state what either side may say; a message that leads elsewhere says where."""
    rows = []
    for state, row in SESSION.items():
        cells = [f"`{state.name}`", state.value]
        for side in (Role.CLIENT, Role.SERVER):
            counts = [
                link(kind) + (f" → `{to.name}`" if to is not state else "")
                for kind, to in row.items()
                if kind.sender & side and kind is not Error
            ]
            if state in SMALLER:
                counts = [addition_sentence(state, side)]
            if state is SessionState.GREETED and side is Role.SERVER:
                counts.append(f"with mechanisms → `{SessionState.UNAUTHENTICATED.name}`")
            cells.append(", ".join(counts) or "–")
        rows.append(cells)
    return rows


SMALLER: Final = {
    SessionState.OPEN: SessionState.READY,
    SessionState.STREAMING: SessionState.OPEN,
}
"""States that allow nearly all that another one allows, and more."""


def addition_sentence(state: SessionState, side: Role) -> str:
    """What a side may say in `state`, beside what it may say in the state before."""
    row, smaller = SESSION[state], SMALLER[state]
    kinds = [kind for kind in row if kind.sender & side and kind is not Error]
    kinds_before = [kind for kind in SESSION[smaller] if kind.sender & side and kind is not Error]
    missing = [link(kind) for kind in kinds_before if kind not in row]
    more = [
        link(kind) + (f" → `{row[kind].name}`" if row[kind] is not state else "")
        for kind in kinds
        if kind not in kinds_before
    ]
    omitted = f" except {listed(missing)}" if missing else ""
    return f"all that `{smaller.name}` allows{omitted}; also {listed(more)}"


def stream_rows() -> list[list[str]]:
    """For each state of a stream what may happen to it."""
    return [
        [
            f"`{state.name}`",
            state.value,
            ", ".join(
                happened.value + (f" → `{to.name}`" if to is not state else "")
                for happened, to in inputs.items()
            ),
        ]
        for state, inputs in STREAM.items()
    ]


def reason_rows() -> list[list[str]]:
    """Each reason, with the statuses of the vectors' answers that have it."""
    statuses: dict[str, set[Status]] = {}
    for start in json.loads(STARTS.read_text()):
        statuses.setdefault(start["reason"], set()).add(Status(start["status"]))
    return [
        [
            f"`{reason.name}`",
            listed([f"`{status.name}`" for status in sorted(statuses[reason.name])], "or"),
            reason.value,
        ]
        for reason in StartReason
    ]


def index_rows() -> list[list[str]]:
    """Opcode, name, sender and answers of each message."""
    return [
        [
            f"`{kind.opcode:#04x}`",
            link(kind),
            SENDERS[kind.sender],
            ", ".join(map(link, kind.answers)) or "–",
        ]
        for kind in MESSAGES.values()
    ]


HEADER_FIELDS: Final = ("partition", "opaque", "status")


def message_section(kind: type[Message]) -> str:
    """One message: what it is for, its header fields, its layout."""
    asked_by = [
        link(message_type) for message_type in MESSAGES.values() if kind in message_type.answers
    ]
    sender = "either side" if kind.sender is Role.EITHER else f"the {SENDERS[kind.sender]}"
    usual_fields = ("0xFFFF", "0", "0")
    fields = (partition_field(kind), opaque_field(kind), kind.status_meaning)
    header = [
        f"`{name}` = {field}"
        for name, field, usual in zip(HEADER_FIELDS, fields, usual_fields, strict=True)
        if field != usual
    ]
    allowances = [
        f"takes its whole frame from the {allowance}"
        for allowance, kinds in (("window", WINDOW_MESSAGES), ("credit", CREDIT_MESSAGES))
        if kind in kinds
    ]
    facts = [
        f"opcode `{kind.opcode:#04x}`, sent by {sender}",
        *([f"header: {', '.join(header)}"] if header else []),
        *allowances,
    ]
    if kind.body_bytes_max != BODY_BYTES_MAX_DEFAULT:
        facts.append(f"body of at most {size(kind.body_bytes_max)}")
    if asked_by:
        facts.append(f"answers {', '.join(asked_by)}")
    if kind is Stream:
        facts.append(f"answered by {link(StreamReply)}, also when it is refused")
    elif kind.answers:
        facts.append(f"answered by {', '.join(map(link, kind.answers))}, or {refusals_of(kind)}")
    rows = layout_rows(kind.layout, kind)
    body = table(LAYOUT_HEAD, rows) if rows else "No body."
    return f"""\
### {kind.__name__}

{prose(kind)}

{chr(10).join(f"- {fact}" for fact in facts)}

{body}"""


def refusals_of(kind: type[Message]) -> str:
    """How a request may be refused."""
    names = [f"`{status.name}`" for status in kind.refusals]
    statuses = f" with {listed(names, 'or')}" if names else ""
    return f"{link(Refusal)}{statuses}"


def partition_field(kind: type[Message]) -> str:
    """What stands in the partition field."""
    if kind is Refusal:
        return "its request's"
    return "its partition" if kind.about_partition else "0xFFFF"


def opaque_field(kind: type[Message]) -> str:
    """What stands in the opaque field."""
    if kind in OF_A_STREAM:
        return "the stream's"
    if kind.answers:
        return "a number that is not in use"
    if kind is Refusal or any(kind in message_type.answers for message_type in MESSAGES.values()):
        return "its request's"
    return "0"


# --- sentences that follow from declarations and rules --------------------------------------------


def allowance_sentence(kinds: Sequence[type[Message]], allowance: str) -> str:
    """Which frames count for the window, or for the credit."""
    names = listed([f"`{kind.__name__}`" for kind in kinds])
    verb = "take their whole frames" if len(kinds) > 1 else "takes its whole frame"
    return f"{names} {verb} from {allowance}, header counted; no other message does."


def opcodes_sentence() -> str:
    """How opcodes tell who says a message."""
    kinds = MESSAGES.values()
    assert all(kind.opcode < 0x80 for kind in kinds if kind.sender is Role.CLIENT)
    assert all(kind.opcode >= 0x80 for kind in kinds if kind.sender is Role.SERVER)
    names = [f"`{kind.__name__}`" for kind in kinds if kind.sender is Role.EITHER]
    of_their_own = {
        f"`{answer.__name__}`"
        for kind in kinds
        for answer in kind.answers
        if answer.opcode != kind.opcode | 0x80
    }
    return (
        f"The client's opcodes are below 0x80, also {listed(names)}, which either side sends. The "
        "server's other opcodes are 0x80 or above. An answer's opcode is the opcode of its request "
        f"with the high bit set. {listed(sorted(of_their_own))} also answer requests with other "
        "opcodes, and `Refusal` answers any request."
    )


def map_fields() -> str:
    """The fields of a partition map's document."""
    parts = []
    for kind, title in (
        (PartitionMap, "The map:"),
        (
            Assignment,
            (
                "The assignment of one partition. A field is left out if it is an empty text, an "
                "empty object or the number 0, or a point that does not exist:"
            ),
        ),
        (
            HistoryPoint,
            "A point in a history; its numbers have 64 bits, and are **decimal text**:",
        ),
    ):
        texts = attributes(kind)
        rows = [
            (f"`{json_name}`", json_type(kind, name), texts[name])
            for name, json_name in zip(
                kind.__struct_fields__, kind.__struct_encode_fields__, strict=True
            )
        ]
        parts.append(f"{title}\n\n{table(('field', 'type', 'meaning'), rows)}")
    return "\n\n".join(parts)


def json_type(kind: type, name: str) -> str:
    """The type of a map's field in its document."""
    if kind is HistoryPoint:
        return "text, a decimal number"
    hint = typing.get_type_hints(kind)[name]
    if hint in (int, str):
        return "a number" if hint is int else "text"
    if typing.get_origin(hint) is dict:
        return "an object from text to text"
    if typing.get_origin(hint) is tuple:
        return "an array of assignments"
    return "a point in a history"


EXAMPLE_MAP: Final = PartitionMap(
    bucket="flights",
    revision=7,
    nodes={"a": "10.0.0.1:12000", "b": "10.0.0.2:12000"},
    partitions=(
        Assignment(active="a", replicas={"b": ""}),
        Assignment(
            active="b",
            replicas={"a": ""},
            failover_revision=7,
            promotion_point=HistoryPoint(HistoryId(0x1122334455667788), SeqNo(1200)),
        ),
    ),
)
"""A bucket of two partitions on two nodes, after a failover of the second partition."""


def map_example() -> str:
    """The example's document, broken into lines."""
    document = EXAMPLE_MAP.encode()
    for before in ('"revision"', '"nodes"', '"partitions"', '{"active":"b"'):
        document = document.replace(before, "\n " + before, 1)
    return fenced(document, "json")


OUTCOME_TEXTS: Final = {
    Outcome.CLOSED: "closed",
    Outcome.REFUSED: "refused",
    Outcome.NO_STREAM: "refused, by `StreamReply`",
    Outcome.ROW_FAILED: "the row fails alone, in `failures`",
    Outcome.LOG: "reported, by `PartitionLog`",
    Outcome.KEY_REFUSED: "the key is refused alone, by a `DELETE` with the code in its flags",
    Outcome.IGNORED: "dropped",
}
"""What becomes of wrong input, in the table of wrong input."""


def wrong_input_rows() -> list[tuple[str, str, str, str]]:
    """What may be wrong, and what becomes of it."""
    rows, topic = [], ""
    for case in WRONG_INPUTS:
        topic_cell = "" if case.topic == topic else case.topic
        code = "–" if case.outcome is Outcome.IGNORED else f"`{case.status.name}`"
        rows.append((topic_cell, case.wrong, OUTCOME_TEXTS[case.outcome], code))
        topic = case.topic
    return rows


def wrong_input_progress() -> str:
    """How far a connection has come when wrong input arrives, as the vectors name it."""
    return listed([f"`{progress.name}` ({progress.value})" for progress in Progress], "or")


def wrong_input_outcomes() -> str:
    """What becomes of wrong input, as the vectors name it."""
    return listed([f"`{outcome.name}` ({text})" for outcome, text in OUTCOME_TEXTS.items()], "or")


OPERATION_HEAD: Final = (
    "operation",
    "if the key is missing, it",
    "if the key has an item, it",
    "flags and expiry time",
)

STORES: Final = {
    b"row": "stores the row's value",
    b"7": "keeps the value",
    b"7row": "stores the item's value, and the row's behind it",
    b"row7": "stores the row's value, and the item's behind it",
    b"10": "stores the value plus `delta`",
    b"4": "stores the value minus `delta`",
    b"100": "stores `initial`",
}
"""What an operation does, by what it stores where the item has the value 7."""


def operation_rows() -> list[list[str]]:
    """What each operation does to a missing key and to an item, and whose flags and expiry time the
    new item has: as the engine works it out."""
    item = Mutation(Operation.SET, b"key", b"7", flags=3, expiry=4)
    rows = []
    for operation in PUBLISHED:
        value = CounterDelta(3, 100).encode() if operation in COUNTS else b"row"
        request = Mutation(operation, b"key", value, flags=1, expiry=2)
        of_missing, of_item = operation_outcome(request, None), operation_outcome(request, item)
        missing, fields = what_it_does(of_missing), whose_fields(of_item)
        if operation in COUNTS:
            uncreated = Mutation(operation, b"key", CounterDelta(3, create=False).encode())
            missing += f"; {what_it_does(operation_outcome(uncreated, None))} without `create`"
            fields += f"; of a new counter {whose_fields(of_missing)}"
        elif not isinstance(of_missing, Status):
            fields = whose_fields(of_missing)
        rows.append([f"`{operation.name}`", missing, what_it_does(of_item), fields])
    return rows


def what_it_does(result: OperationOutcome) -> str:
    """An operation's outcome in words."""
    if isinstance(result, Status):
        return f"fails with `{result.name}`"
    if result.op is Operation.DELETE:
        return "removes the item"
    value = result.value
    return STORES[value.join() if isinstance(value, JoinedValue) else value]


def whose_fields(result: OperationOutcome) -> str:
    """Whose flags and expiry time a new item has."""
    if not isinstance(result, StoredOutcome) or result.op is Operation.DELETE:
        return "none"
    flags = "the row's" if result.flags == 1 else "the item's"
    expiry = "the row's" if result.expiry == 2 else "the item's"
    return flags if flags == expiry else f"{flags} flags, {expiry} expiry time"


def client_tasks() -> str:
    """How a client is told its tasks."""
    _, _, tasks = (inspect.getdoc(client_scenario) or "").partition("\n\n")
    return tasks.removeprefix("The client is a command. ")


# --- chunks, enumerations, codes and limits -------------------------------------------------------


SCRAM_NONCE: Final = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE: Final = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SCRAM_SALT: Final = a2b_base64("W22ZaJ0SNY7soEsUEjb6gQ==")
"""Those of the example in RFC 7677."""

CERTIFICATE_HASH: Final = bytes(range(32))


def log_in_examples() -> dict[str, str]:
    """The messages of two log-ins by SCRAM: without channel binding and with it."""
    unbound = ScramClient("user", "pencil", SCRAM_NONCE, CERTIFICATE_HASH)
    final = unbound.client_final(scram_server(unbound, CERTIFICATE_HASH).server_first())
    first_bytes, last_byte = CERTIFICATE_HASH[:3].hex(" "), CERTIFICATE_HASH[-1:].hex()
    return {
        "log_in_plain": log_in_example(None),
        "log_in_bound": log_in_example(CERTIFICATE_HASH),
        "binding_words": f"the 32 bytes `{first_bytes}` … `{last_byte}`",
        "unbound_c": final.decode().split(",")[0].removeprefix("c="),
    }


def scram_server(client: ScramClient, binding: bytes) -> ScramServer:
    """The server's side of the example, which has read the client's first message."""
    message, offers_binding = client.client_first(), client.mechanism == SCRAM_PLUS
    first = FirstMessage.read(client.mechanism, message, offers_binding=offers_binding)
    verifier = new_verifier("pencil", SCRAM_SALT, limits.SCRAM_ITERATIONS_MIN)
    return ScramServer(first, verifier, SERVER_NONCE, binding)


def log_in_example(binding: bytes | None) -> str:
    """The messages of one log-in."""
    client = ScramClient(
        "user", "pencil", SCRAM_NONCE, binding, server_offers_binding=binding is not None
    )
    server = scram_server(client, binding or b"")
    challenge = server.server_first()
    final = client.client_final(challenge)
    outcome = server.server_final(final)
    assert outcome is not None
    client.check_server_final(outcome)
    messages = (
        (f"StartLogIn, {client.mechanism}", client.client_first()),
        ("LogInChallenge", challenge),
        ("ContinueLogIn", final),
        ("LoggedIn", outcome),
    )
    return fenced("\n".join(f"{name}:\n    {data.decode()}" for name, data in messages))


def chunk_layout() -> str:
    """The chunk module's text as Markdown: its literal block as a block of code."""
    before, block, after = re.split(
        r"::\n\n((?: {4}.*\n|\n)+)", inspect.getdoc(chunk_module) or "", maxsplit=1
    )
    lines = [line[4:] for line in block.strip("\n").split("\n")]
    _, _, description = before.partition("\n\n")
    return f"{description}:\n\n{fenced(chr(10).join(lines))}\n\n{after.strip()}"


def chunk_example() -> str:
    """A stored chunk of two mutations, byte for byte."""
    chunk = Chunk.build(
        [
            Mutation(Operation.SET, b"N14228", b'{"dep":"EWR"}', SeqNo(4), Cas(9)),
            Mutation(Operation.DELETE, b"N24211", b"", SeqNo(6), Cas(10)),
        ],
        SeqNo(3),
        SeqNo(7),
    )
    return fenced(dump_chunk(bytes(chunk)))


def enumeration_section(kind: type[IntEnum]) -> str:
    """One enumeration: what it is for, its members."""
    rows = enumeration_rows(kind)
    return f"### {kind.__name__}\n\n{prose(kind)}\n\n" + table(("value", "name", "meaning"), rows)


def enumeration_rows(kind: type[IntEnum]) -> list[list[object]]:
    """Value, name and meaning of each member."""
    texts = string_below(inspect.getsource(kind))
    return [[member.value, f"`{member.name}`", texts[member.name]] for member in kind]


def reaction_rows() -> list[list[str]]:
    """What a client does about statuses by itself."""
    return [
        [listed([f"`{status.name}`" for status in codes], "or"), where, action]
        for codes, where, action in REACTIONS
    ]


def refused_requests(status: Status) -> str:
    """The requests that may be refused with a status."""
    if status is Status.NOT_ALLOWED:
        return "every request, if the cluster has users"
    if status is Status.NOT_DURABLE_YET:
        return "nothing: it tells about a run that was applied"
    names = [f"`{kind.__name__}`" for kind in MESSAGES.values() if status in kind.refusals]
    return ", ".join(names) or "–"


def statuses() -> str:
    """Every code, by where it is said."""
    parts = []
    for low, high, title in STATUS_RANGES:
        codes = [status for status in Status if low <= status <= high]
        rows: list[list[object]] = [[status.value, f"`{status.name}`"] for status in codes]
        head = ["code", "name", "what to do"]
        if low == 1:
            head.insert(2, "refuses")
            for row, status in zip(rows, codes, strict=True):
                row.append(refused_requests(status))
        for row, status in zip(rows, codes, strict=True):
            row.append(ADVICE.get(status, "–"))
        parts += [title, table(head, rows)]
    return "\n\n".join(parts)


def limit_rows() -> list[list[str]]:
    """Every limit with its reason."""
    rows = []
    for name, text in string_below(inspect.getsource(limits)).items():
        value = getattr(limits, name)
        is_size = "BYTES" in name and value >= 1 << 10
        value_text = f"{number(value)} ({size(value)})" if is_size else number(value)
        rows.append([f"`{name}`", value_text, text])
    return rows


# --- the example ----------------------------------------------------------------------------------


Said = tuple[str, Message, bytes]
"""Who said which message, and its frame."""


def recorded_conversations() -> list[tuple[str, str, list[Said], int]]:
    """Title, introduction and messages of each recorded conversation, and the first message that is
    shown."""
    conversations = []
    for recorded in json.loads(CONVERSATIONS.read_text()):
        messages = []
        for entry in recorded["frames"]:
            buffer = FrameBuffer(_admit_all)
            buffer.receive(bytes.fromhex(entry["frame"]))
            frame = buffer.next_frame()
            assert frame is not None, "a frame of the record is not whole"
            messages.append((entry["from"], decode(*frame), bytes.fromhex(entry["frame"])))
        conversations.append(
            (recorded["title"], recorded["about"], messages, recorded["shown_from"])
        )
    return conversations


def _admit_all(_header: Header) -> None:
    """Takes every frame."""


def example_conversation() -> list[Said]:
    """The first of the recorded conversations."""
    return recorded_conversations()[0][2]


SHOWN_ONCE: Final = (Go, CycleEnd, Close)
"""Messages that look the same in every conversation: only the first one shows their bytes."""


def conversations() -> str:
    """The recorded conversations, byte for byte."""
    parts = []
    for position, (title, about, messages, shown_from) in enumerate(recorded_conversations()):
        parts += [f"### {title}", about]
        for place, (name, message, frame) in enumerate(messages[shown_from:], 1):
            parts.append(f"**{place}. {name}: {link(type(message))}**")
            if not position or type(message) not in SHOWN_ONCE:
                is_first = place == 1 and not position
                parts.append(fenced(dump_frame(message, frame, in_full=is_first)))
    return "\n\n".join(parts)


def dump_frame(message: Message, frame: bytes, in_full: bool) -> str:
    """A frame's bytes, field by field; the header's only when it is to be `in_full`."""
    body = frame[HEADER_BYTES:]
    kind = type(message)
    if in_full:
        lines = list(dump_layout(HEADER, frame[:HEADER_BYTES], 0))
    else:
        partition = "none" if message.partition == NO_PARTITION else message.partition
        code = f" ({Status(message.status).name})" if message.status else ""
        lines = dump_bytes(
            0,
            frame[:HEADER_BYTES],
            f"header: opcode {kind.opcode:#04x}, status {message.status}{code}, "
            f"partition {partition},\n"
            f"opaque {message.opaque}, length {len(body)}, checksums",
        )
    example_count = 0
    if layout_fields(kind):
        lines.append("")
        built = b"".join(map(bytes, message.body_buffers()))
        lines += dump_layout(kind.layout, built, HEADER_BYTES)
        example_count = len(built)
    if body[example_count:]:
        lines += dump_bytes(
            HEADER_BYTES + example_count, body[example_count:], "padding of the body"
        )
    return "\n".join(lines)


def dump_layout(layout: Any, data: bytes, offset: int) -> Iterator[str]:
    """The bytes of each field of a layout, with its value."""
    parsed = layout.parse(data)
    begin = 0
    for index, sub in enumerate(subcons(layout)):
        end = len(cs.Struct(*subcons(layout)[: index + 1]).build(parsed))
        field, inner = data[begin:end], bare(sub)
        if inner in (BUNDLE, POSITION):
            yield from dump_layout(inner.subcon, field, offset + begin)
        elif inner is CHUNK:
            yield from dump_chunk(field, offset + begin).split("\n")
        else:
            value = parsed.get(sub.name)
            yield from dump_bytes(offset + begin, field, described(sub.name, value, row_names(sub)))
        begin = end


def row_names(construct: Any) -> list[str]:
    """The names of the fields of a list's rows; none if the items have no fields."""
    construct = bare(construct)
    if not isinstance(construct, cs.FocusedSeq):
        return []
    row = bare(bare(subcons(construct)[1]).subcon)
    return [sub.name for sub in subcons(row) if sub.name] if isinstance(row, cs.Struct) else []


def described(name: str, value: object, names: Sequence[str] = ()) -> str:
    """A field and its value, where the bytes do not show it.

    Args:
        name: The field.
        value: Its value.
        names: Of a list with several fields in a row, the fields.
    """
    match value:
        case tuple() if names:
            fields = [name for name in names if name != "padding"]
            rows = [
                ", ".join(
                    f"{field} {part:#x}" if field == "history_id" else f"{field} {part}"
                    for field, part in zip(fields, row, strict=True)
                )
                for row in value
            ]
            return f"{name}: {'; '.join(rows) or 'none'}"
        case tuple():
            return f"{name}: {', '.join(map(repr, value)) or 'none'}"
        case None:
            return f"{name}, zeros"
        case bool():
            return f"{name}: {'yes' if value else 'no'}"
        case IntEnum():
            return f"{name}: {value.name}"
        case int() if "crc" in name or name in ("magic", "partial_history", "history_id"):
            return f"{name}: {value:#x}"
        case int():
            return f"{name}: {'all ones' if value == (1 << 64) - 1 else f'{value:,}'}"
        case FailoverLog():
            entries = ", ".join(f"{entry.history_id:#x} at {entry.seq}" for entry in value)
            return f"{name}: {entries or 'empty'}"
        case str() | bytes():
            return f"{name}: {value!r}"
    return f"{name}: {value}"


CHUNK_COLUMNS: Final = (
    ("sequence numbers", 8, 0),
    ("CAS", 8, 0),
    ("expiries", 4, 0),
    ("flags", 4, 0),
    ("key offsets", 4, 1),
    ("value offsets", 4, 1),
    ("operations", 1, 0),
)


def dump_chunk(data: bytes, offset: int = 0) -> str:
    """A chunk's bytes, column by column."""
    chunk = Chunk(data)
    lengths = f"count {chunk.count}, key bytes {chunk.key_length}, value bytes {chunk.value_length}"
    lines = dump_bytes(offset, data[:16], f"chunk: {lengths}, reserved")
    lines += dump_bytes(offset + 16, data[16:32], f"start {chunk.start}, end {chunk.end}")
    columns = [(name, size * (chunk.count + more)) for name, size, more in CHUNK_COLUMNS]
    columns += [("keys", chunk.key_length), ("values", chunk.value_length)]
    begin = 32
    for name, length in columns:
        end = begin + length + -length % 8
        if end > begin:
            pad = ", padded" if length % 8 else ""
            lines += dump_bytes(offset + begin, data[begin:end], name + pad)
        begin = end
    assert begin == len(data), "the columns are not those of the chunk"
    return "\n".join(lines)


def dump_bytes(offset: int, data: bytes, meaning: str) -> list[str]:
    """Lines of 16 bytes; beside the first ones stand the lines of what they mean."""
    rows = [data[begin : begin + 16].hex(" ") for begin in range(0, len(data), 16)]
    return [
        f"{offset + 16 * index:4}  {row:47}  {words}".rstrip()
        for index, (row, words) in enumerate(zip_longest(rows, meaning.split("\n"), fillvalue=""))
    ]


# --- the whole ------------------------------------------------------------------------------------


def blocks() -> dict[str, str]:
    """What the prose may call for, by name. Every limit is there by its own."""
    delta = CounterDelta(5, 100, create=True)
    texts = {
        name: size(value) if "BYTES" in name else number(value)
        for name, value in vars(limits).items()
        if name.isupper()
    }
    message_head = ("opcode", "message", "sent by", "answered by")
    state_head = ("state", "what it means", "the client may send", "the server may send")
    return texts | {
        "port_default": str(PORT_DEFAULT),
        "checksum_of_123456789": f"{crc32c(b'123456789'):#010x}",
        "partition_of_N14228": str(partition_of(b"N14228", 64)),
        "header_bytes": str(HEADER_BYTES),
        "header": table(LAYOUT_HEAD, layout_rows(HEADER)),
        "conversations": conversations(),
        "session_diagram": session_diagram(),
        "session_states": table(state_head, state_rows()),
        "stream_states": table(("state", "what it means", "what may happen"), stream_rows()),
        "reasons": table(("reason", "with the status", "text"), reason_rows()),
        "message_index": table(message_head, index_rows()),
        "messages": "\n\n".join(map(message_section, MESSAGES.values())),
        "wrong_input": table(("in", "what is wrong", "it is", "code"), wrong_input_rows()),
        "wrong_input_progress": wrong_input_progress(),
        "wrong_input_outcomes": wrong_input_outcomes(),
        "client_tasks": client_tasks(),
        "body_bytes_max_default": size(BODY_BYTES_MAX_DEFAULT),
        "opcodes": opcodes_sentence(),
        "operations": table(OPERATION_HEAD, operation_rows()),
        "counter_digits_max": number(COUNTER_DIGITS_MAX),
        "evaluated_bytes_max": size(EVALUATED_BYTES_MAX),
        **log_in_examples(),
        "window_messages": allowance_sentence(WINDOW_MESSAGES, "it"),
        "credit_messages": allowance_sentence(CREDIT_MESSAGES, "it"),
        "batches_max": number(BATCHES_MAX),
        "writers_max": number(WRITERS_MAX),
        "answers_bytes_max": size(ANSWERS_BYTES_MAX),
        "answers_part": f"{100 * ANSWERS_PART:g} %",
        "answers_bytes_default": size(
            MemoryPolicy(QUOTA_BYTES_DEFAULT).answers_bytes(limits.PARTITIONS_DEFAULT)
        ),
        "quota_default": size(QUOTA_BYTES_DEFAULT),
        "partitions_default": number(limits.PARTITIONS_DEFAULT),
        "first_wait_ms": number(round(FIRST_WAIT_S * 1000)),
        "wait_s_max": f"{WAIT_S_MAX:g}",
        "map_wait_s_max": f"{MAP_WAIT_S_MAX:g}",
        "retry_timeout_s": number(round(RETRY_TIMEOUT_S_DEFAULT)),
        "dead_after_intervals": number(DEAD_AFTER_INTERVALS),
        "lapsed_days": number(int(LAPSED_S) // (24 * 3600)),
        "evicted_leases_max": number(EVICTED_LEASES_MAX),
        "leased_ranges_max": number(limits.LEASED_RANGES_MAX),
        "credit_bytes_min": size(CREDIT_BYTES_MIN),
        "credit_bytes_max": size(CREDIT_BYTES_MAX),
        "replication_timeout_s": number(ServerConfig().replication_timeout_s),
        "backfill_timeout_s": number(BACKFILL_LEASE_S),
        "frame_timeout_s": number(FRAME_TIMEOUT_S),
        "frame_bytes_per_s_min": size(FRAME_BYTES_PER_S_MIN),
        "leases_max": number(limits.LEASES_MAX),
        "lease_owner_bytes_max": number(limits.LEASE_OWNER_BYTES_MAX),
        "connections_told_max": number(CONNECTIONS_TOLD_MAX),
        "failures_max": number(FAILURES_MAX),
        "buckets_told_max": number(BUCKETS_TOLD_MAX),
        "map_fields": map_fields(),
        "map_example": map_example(),
        "chunk": chunk_layout(),
        "empty_chunk_bytes": str(encoded_bytes(0, 0, 0)),
        "chunk_example": chunk_example(),
        "delta_bytes": str(len(delta.encode())),
        "delta_example": delta.encode().hex(" "),
        **attributes(CounterDelta),
        "failover_log": prose(FailoverLog),
        "failover_layout": type_of(LOG.subcon),
        "position": table(LAYOUT_HEAD, layout_rows(POSITION.subcon)),
        "durability": table(("value", "name", "meaning"), enumeration_rows(Durability)),
        "enumerations": "\n\n".join(map(enumeration_section, ENUMERATIONS)),
        "reactions": table(("status", "where", "the client"), reaction_rows()),
        "status_codes": statuses(),
        "limits": table(("limit", "value", "why"), limit_rows()),
    }


LINE_LENGTH: Final = 110
"""Characters in a line of prose at most."""


def filled(text: str) -> str:
    """The document with its paragraphs and lists in lines of nearly the same length. Tables and
    code stay as they are."""
    filled_blocks, is_code = [], False
    for block in text.split("\n\n"):
        is_prose = not is_code and not block.startswith(("|", "#", "```", "<"))
        is_code ^= block.count("```") % 2 == 1
        filled_blocks.append(filled_block(block.rstrip("\n")) if is_prose else block)
    return "\n\n".join(filled_blocks).rstrip("\n") + "\n"


def filled_block(block: str) -> str:
    """One paragraph, or the items of one list, broken into lines."""
    lines = []
    for item in re.split(r"\n(?=- |\d+\. )", block):
        mark = re.match(r"- |\d+\. |", item)
        assert mark is not None, "the empty text matches"
        lines += textwrap.wrap(
            one_line(item),
            LINE_LENGTH,
            subsequent_indent=" " * len(mark[0]),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def document() -> str:
    """The document.

    Raises:
        KeyError: The prose calls for a block that there is not.
    """
    texts = blocks()
    return filled(re.sub(r"\{\{(\w+)\}\}", lambda call: texts[call[1]], PROSE.read_text()))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description="Write docs/protocol.md, or check that it is current."
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", type=Path, metavar="FILE")
    mode.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    text = document()
    if options.write:
        options.write.write_text(text)
    elif not options.check.exists() or options.check.read_text() != text:
        sys.exit(f"{options.check} is not what the code declares: run `make docs` and commit it")


if __name__ == "__main__":
    main()
