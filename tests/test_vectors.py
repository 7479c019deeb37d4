"""docs/vectors: current, and right about what a server does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from docs import generate_vectors
from docs.generate_vectors import SAMPLES, main
from docs.session_rules import cases, read_case, session_rules
from upr_protocol.chunk import Chunk
from upr_protocol.errors import ChunkError, RemoteProtocolError
from upr_protocol.wire import FrameBuffer, decode

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "vectors"


def test_the_vectors_are_current_and_complete() -> None:
    main(["--check", str(FOLDER)])
    names = {f"{name}.json" for name in generate_vectors.VECTORS}
    assert {path.name for path in FOLDER.iterdir()} == names


@pytest.mark.parametrize("name", ["numbers", "messages", "wrong_input"])
def test_a_changed_declaration_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "numbers": dict,
        "messages": list,
        "wrong_input": list,
    }
    monkeypatch.setitem(generate_vectors.VECTORS, name, changes[name])
    with pytest.raises(SystemExit, match="make docs"):
        main(["--check", str(FOLDER)])


def test_a_changed_limit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upr_protocol.limits.GET_KEYS_MAX", 4095)
    with pytest.raises(SystemExit, match=r"numbers\.json"):
        main(["--check", str(FOLDER)])


def test_the_samples_are_read_as_they_were_written() -> None:
    for message in SAMPLES:
        buffer = FrameBuffer(lambda header: None)
        buffer.receive(b"".join(map(bytes, message.frame_buffers())))
        frame = buffer.next_frame()
        assert frame is not None
        assert decode(*frame) == message


def test_chunks_that_are_said_to_be_bad_are_refused() -> None:
    vectors = generate_vectors.chunks()
    for bad in vectors["bad"]:
        with pytest.raises(ChunkError):
            checked(bad["kind"], bytes.fromhex(bad["chunk"]))
    for good in vectors["good"]:
        checked(good["kind"], bytes.fromhex(good["chunk"]))


def checked(kind: str, data: bytes) -> None:
    chunk = Chunk(data)
    if kind == "stored":
        chunk.check()
    else:
        chunk.check_published()


def test_the_bytes_of_each_session_rule_have_the_outcome_of_its_case() -> None:
    for case, entry in zip(cases(), session_rules(), strict=True):
        assert _outcome_of_bytes(entry) == case.outcome(), case.rule


def _outcome_of_bytes(entry: dict[str, object]) -> str:
    try:
        case = read_case(entry)
    except RemoteProtocolError as error:
        return error.status.name
    return case.outcome()
