"""How requests to the disk's processes are packed."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.answer_rows import pack_rows
from tests.kit.effort import effort
from tests.storage.log_model import chunk_of, record_of, row
from upr_protocol.ids import Operation, SeqNo
from upr_server.storage.calls import Commit
from upr_server.storage.errors import DataDirectoryError
from upr_server.storage.messages import (
    ITEM_BYTES,
    STEP_ITEMS,
    CallFailure,
    RequestPacking,
    StoreRequest,
    Unpacker,
    message_head,
    pack_message,
)
from upr_server.storage.partition_write import PartitionWrite

CHUNKS: Final = [chunk_of([row(Operation.SET, b"k", seq, seq)], seq - 1, seq) for seq in (1, 2, 3)]
ANSWER: Final = pack_rows([(b"w" * 16, 1, b"answer")])
FEW: Final = st.integers(0, 20)
MANY: Final = st.integers(STEP_ITEMS - 1, 2 * STEP_ITEMS + 1)


def write_of(chunk_count: int, answer_count: int, end_count: int) -> PartitionWrite:
    chunks = list(islice(cycle(CHUNKS), chunk_count))
    ends = (SeqNo(3),) * end_count
    answers = [ANSWER * min(200, answer_count - begin) for begin in range(0, answer_count, 200)]
    return PartitionWrite(5, record_of(3), chunks, answers, ends)


def writes_of(counts: st.SearchStrategy[int], most: int) -> st.SearchStrategy[list[PartitionWrite]]:
    return st.lists(st.builds(write_of, counts, counts, counts), max_size=most)


@settings(max_examples=effort(30, 300), deadline=None)
@given(
    st.one_of(
        writes_of(FEW | MANY, 3),
        st.builds(lambda writes: writes * 300, writes_of(FEW, 5)),
    )
)
def test_a_request_packed_in_steps_equals_one_packed_at_once(writes: list[PartitionWrite]) -> None:
    """A request is the same whether it is packed in steps or at once, whichever part of it is long,
    and each step is short."""
    request = StoreRequest(Commit("planes", writes), 7)
    message, buffers = pack_message(request)
    head = message_head(message, buffers, [False] * len(buffers))

    packing = RequestPacking(request.call, request.slot)
    step_count = sum(1 for _ in packing.steps())

    assert b"".join(packing.parts) == b"".join([head, message, *buffers])
    items = sum(
        1 + len(write.chunks) + len(write.ends) + write.answer_bytes // ITEM_BYTES
        for write in writes
    )
    assert step_count >= items // STEP_ITEMS


def test_answers_of_many_bytes_are_packed_one_string_in_each_step() -> None:
    answers = [bytes([number]) * (1 << 20) for number in range(5)]
    packing = RequestPacking(Commit("a bucket", [PartitionWrite(5, record_of(3), (), answers)]))
    step_count = sum(1 for _ in packing.steps())
    assert step_count > len(answers)
    assert max(map(len, packing.parts)) < (1 << 20) + 100


def test_a_failure_may_name_a_file_whose_name_is_not_text() -> None:
    failure = CallFailure.of(DataDirectoryError("b\udcff cannot be deleted"))
    message, _ = pack_message(failure)
    assert Unpacker().unpack(message, CallFailure, ()) == failure
    assert str(failure.error()) == r"b\udcff cannot be deleted"
