"""docs/protocol.md: current, whole, and right about the bytes it shows."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from docs.generate_protocol import (
    LINE_LENGTH,
    OF_A_STREAM,
    PROSE,
    REACTIONS,
    SHOWN_ONCE,
    STATUS_RANGES,
    allowance_sentence,
    blocks,
    document,
    example_conversation,
    filled,
    main,
    recorded_conversations,
)
from tests.kit.peer import peer
from upr_protocol.errors import Status
from upr_protocol.ids import NO_PARTITION
from upr_protocol.limits import HANDSHAKE_BODY_BYTES_MAX
from upr_protocol.session import SessionState
from upr_protocol.session.rules import CREDIT_MESSAGES, WINDOW_MESSAGES
from upr_protocol.session.states import SESSION, STREAM, stream_input
from upr_protocol.wire import (
    MESSAGES,
    FrameBuffer,
    Message,
    Noop,
    Open,
    PartitionStart,
    Refusal,
    Role,
    Stats,
    StatsReply,
    decode,
)
from upr_server.app import running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.conformance import WRONG_INPUTS, Outcome
from upr_server.indexer.config import IndexerConfig
from upr_server.storage.simulated import SimulatedStore

ROOT: Final = Path(__file__).resolve().parents[1]
PROTOCOL: Final = ROOT / "docs" / "protocol.md"


def test_the_document_is_current() -> None:
    main(["--check", str(PROTOCOL)])


def test_an_outdated_document_is_noticed_and_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "protocol.md"
    for text in (None, document().replace("u16", "u61", 1)):
        if text is not None:
            path.write_text(text)
        with pytest.raises(SystemExit, match="make docs"):
            main(["--check", str(path)])
    main(["--write", str(path)])
    main(["--check", str(path)])


def test_the_prose_calls_for_every_block_that_is_made_for_it() -> None:
    called = set(re.findall(r"\{\{(\w+)\}\}", PROSE.read_text()))
    assert called >= {name for name in blocks() if not name.isupper()}
    assert "{{" not in document()


def test_every_message_and_every_code_is_in_it() -> None:
    text = document()
    for kind in MESSAGES.values():
        assert f"\n### {kind.__name__}\n" in text
    for status in Status:
        assert f"| {status.value} | `{status.name}` |" in text
        assert sum(low <= status <= high for low, high, _ in STATUS_RANGES) == 1
    for state in (*SESSION, *STREAM):
        assert f"| `{state.name}` | {state.value} |" in text


def test_no_line_of_prose_is_long() -> None:
    without_code = re.sub(r"```.*?```", "", document(), flags=re.DOTALL)
    prose = [line for line in without_code.split("\n") if not line.startswith(("|", "#"))]
    assert max(map(len, prose)) <= LINE_LENGTH


def test_lists_and_code_keep_their_form() -> None:
    words = " ".join(["word"] * 40)
    code = "```text\n" + words + "\n\n- " + words + "\n```"
    items = filled(f"- {words}\n- two\n\n{code}\n").split("\n\n", 1)
    assert items[0].count("\n- ") == 1
    assert all(line.startswith(("- ", "  ")) for line in items[0].split("\n"))
    assert items[1] == code + "\n"


def test_its_links_lead_somewhere() -> None:
    text = document()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = [heading.lower().replace(" ", "-") for heading in headings]
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#(.*?)\)", text)) <= set(anchors)
    for path in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (PROTOCOL.parent / path).exists(), path


def test_the_bytes_it_shows_are_the_frames_it_names() -> None:
    shown_frames = re.findall(
        r"^\*\*\d+\. (\w+): \[`(\w+)`\].*\n\n```text\n((?s:.*?))```", document(), re.MULTILINE
    )
    buffer = FrameBuffer(lambda header: None)
    for sender, name, dump in shown_frames:
        # A line is an offset, at most 16 bytes, and what they mean.
        lines = [line for line in dump.split("\n") if line]
        assert [int(line[:4]) for line in lines] == offsets([line[6:53] for line in lines])
        buffer.receive(b"".join(bytes.fromhex(line[6:53]) for line in lines))
        frame = buffer.next_frame()
        assert frame is not None
        assert not buffer.is_in_frame
        message = decode(*frame)
        assert type(message).__name__ == name
        assert message.sender & (Role.CLIENT if sender == "client" else Role.SERVER)
    (_, _, first, first_from), *others = recorded_conversations()
    assert len(shown_frames) == len(first) - first_from + sum(
        type(message) not in SHOWN_ONCE
        for _, _, messages, shown_from in others
        for _, message, _ in messages[shown_from:]
    )


def offsets(rows: list[str]) -> list[int]:
    row_offsets, offset = [], 0
    for row in rows:
        row_offsets.append(offset)
        offset += len(bytes.fromhex(row))
    return row_offsets


# What the prose says and the declarations do not, tried on the example and the tables.

CONVERSATION: Final = [message for _, message, _ in example_conversation()]


@pytest.mark.parametrize("message", CONVERSATION, ids=lambda message: type(message).__name__)
def test_the_header_fields_are_as_told(message: Message) -> None:
    kind = type(message)
    assert (message.partition != NO_PARTITION) == kind.about_partition
    if kind in OF_A_STREAM:
        assert message.opaque == next(m for m in CONVERSATION if type(m) is PartitionStart).opaque
    answers_or_asks = bool(kind.answers) or any(kind in k.answers for k in MESSAGES.values())
    assert (message.opaque != 0) == (answers_or_asks or kind in OF_A_STREAM)
    assert message.status == 0 or kind.status_meaning != "0"


def test_the_kit_lists_the_messages_of_the_stream_table() -> None:
    # A stream's own frames, and the request and answer that open it.
    example = {type(message): message for message in CONVERSATION}
    for kind in OF_A_STREAM & set(example):
        assert stream_input(example[kind]) is not None
    assert all(kind.about_partition for kind in OF_A_STREAM)


def test_no_frame_before_the_bucket_is_open_is_long() -> None:
    early = (SessionState.GREETING, SessionState.GREETED, SessionState.READY, SessionState.OPENING)
    for state in early:
        for kind in SESSION[state]:
            if kind.sender & Role.CLIENT:
                assert kind.body_bytes_max <= HANDSHAKE_BODY_BYTES_MAX


def test_open_may_be_refused_and_nothing_else_is_said_meanwhile() -> None:
    row = SESSION[SessionState.OPENING]
    assert row[Refusal] is SessionState.READY
    assert Open not in row


# Sentences that follow from the rules.


def test_requests_declare_how_wrong_input_is_refused() -> None:
    refused = [
        case for case in WRONG_INPUTS if case.outcome in (Outcome.REFUSED, Outcome.NO_STREAM)
    ]
    for case in refused:
        if case.frames is not None:
            buffer = FrameBuffer(lambda header: None)
            buffer.receive(case.frames)
            *_, frame = iter(buffer.next_frame, None)
            assert case.status in type(decode(*frame)).refusals, case.wrong
    assert len(refused) > 50


def test_what_a_client_does_about_a_status_names_no_status_twice_in_one_place() -> None:
    places = [(status, where) for statuses, where, _ in REACTIONS for status in statuses]
    assert len(set(places)) == len(places)
    text = document()
    for status, _ in places:
        assert f"`{status.name}`" in text.partition("### What a client does")[2].partition("###")[0]


def test_what_takes_from_the_window_is_read_from_the_rules() -> None:
    text = document()
    for kinds, sentence in (
        (
            WINDOW_MESSAGES,
            "`PartitionChunk` and `PartitionSnapshot` take their whole frames from it",
        ),
        (CREDIT_MESSAGES, "`Mutate` takes its whole frame from it"),
    ):
        assert sentence in allowance_sentence(kinds, "it")
        assert sentence in " ".join(text.split())
        for kind in MESSAGES.values():
            section = text.partition(f"\n### {kind.__name__}\n")[2].partition("\n### ")[0]
            allowance = "window" if kinds is WINDOW_MESSAGES else "credit"
            fact = f"- takes its whole frame from the {allowance}\n"
            assert (fact in section) == (kind in kinds)
    assert allowance_sentence((Noop,), "it").startswith("`Noop` takes its whole frame from it")


async def test_the_statistics_are_those_that_a_server_gives() -> None:
    config = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", 1),))
    async with (
        running_server(config, SimulatedStore()) as server,
        peer("127.0.0.1", server.port, "b") as client,
    ):
        answers = []
        for bucket in ("b", ""):
            await client.send(Stats(bucket, opaque=client.opaque()))
            answers.append(json.loads((await client.expect(StatsReply)).json))
    of_bucket, of_server = answers
    section = document().partition("### Statistics")[2].partition("\n### ")[0]
    bucket_table, server_table = section.split("An answer about the server has these")
    on_a_node_with_a_map = {"node", "revision", "is_confirmed", "follows"}
    lists = {"disk.log", "disk.index", "leases.leases", "leases.consumers"}
    assert names_in(bucket_table) - on_a_node_with_a_map == field_names(of_bucket, lists)
    assert names_in(server_table) == field_names(
        {name: group for name, group in of_server.items() if name != "buckets"},
        {"connections", "damaged_buckets"},
    )
    for connection in of_server["connections"]:
        assert all(f"`{name}`" in server_table for name in connection)
    of_same_bucket = field_names(of_server["buckets"]["b"], lists)
    assert of_same_bucket == field_names(of_bucket, lists) - {
        *("bucket", "leases.leases", "leases.consumers")
    }


def names_in(text: str) -> set[str]:
    """The names in the first column of a table."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def field_names(fields: dict[str, Any], whole: set[str], prefix: str = "") -> set[str]:
    """The names of fields, with those of groups; the ones in `whole` are taken as they are."""
    names: set[str] = set()
    for name, value in fields.items():
        path = prefix + name
        if isinstance(value, dict) and path not in whole:
            names |= field_names(value, whole, f"{path}.")
        else:
            names.add(path)
    return names


# What operators read.


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize(
    ("settings", "pages"),
    [(ServerConfig, ("operations", "security")), (IndexerConfig, ("indexer",))],
)
def test_every_setting_is_in_a_table(
    settings: type[msgspec.Struct], pages: tuple[str, ...]
) -> None:
    documented_names = names_in("\n".join(map(page, pages)))
    assert set(settings.__struct_fields__) - documented_names - {"buckets"} == set()


def test_every_error_in_the_servers_log_is_explained() -> None:
    text = page("operations") + page("security")
    unexplained_events = {
        event
        for path in (ROOT / "upr_server").rglob("*.py")
        if "indexer" not in path.parts
        for event in errors_logged(path)
        # The pages leave out what stands behind a semicolon.
        if f"`{event.partition(';')[0]}" not in text
    }
    assert unexplained_events == set()


def errors_logged(path: Path) -> set[str]:
    """The events that a module logs as errors."""
    events = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name(id="log"), attr="error" | "critical" | "exception"
                ),
                args=[ast.Constant(value=str(event)), *_],
            ):
                events.add(event)
    return events


# The architecture page names modules: a reader opens them.


def test_every_path_in_the_architecture_page_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = ("", "upr_protocol", "upr_server", "upr_server/storage", "upr_server/indexer")
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(paths) > 30
    assert [path for path in paths if not any((ROOT / f / path).exists() for f in folders)] == []
