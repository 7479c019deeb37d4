"""The chunk, against lists of rows and a checker that is slow and obviously right."""

from __future__ import annotations

import struct
import tracemalloc
from array import array
from itertools import cycle, islice, pairwise, product

import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from tests.protocol.strategies import (
    KEYS,
    U64,
    published_chunks,
    stored_chunks,
    stored_rows,
)
from upr_protocol.chunk import (
    CHUNK_HEAD_BYTES,
    Chunk,
    CounterDelta,
    Mutation,
    chunk_of_plain_sets,
    encoded_bytes,
    published_chunk,
)
from upr_protocol.errors import ChunkError
from upr_protocol.ids import SEQ_MAX, Cas, Operation, SeqNo
from upr_protocol.limits import CHUNK_MUTATIONS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX

MIB = 1024 * 1024


def a_set(seq: int, key: bytes, value: bytes = b"") -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq))


# --- the oracle -----------------------------------------------------------------------------------


class Columns:
    """A chunk taken apart byte by byte, as the module's text says it is laid out."""

    def __init__(self, data: bytes) -> None:
        self.at: dict[str, int] = {}
        head = struct.unpack_from("<IIIIQQ", data)
        self.count, self.key_length, self.value_length, _, self.start, self.end = head
        self.cursor = 32
        self.data = data
        self.seqs = self._column("seqs", "Q", self.count)
        self.cas = self._column("cas", "Q", self.count)
        self.expiries = self._column("expiries", "I", self.count)
        self.flags = self._column("flags", "I", self.count)
        self.key_offsets = self._column("key offsets", "i", self.count + 1)
        self.value_offsets = self._column("value offsets", "i", self.count + 1)
        self.operations = self._column("operations", "B", self.count)
        self.keys = bytes(self._column("keys", "B", self.key_length))
        self.values = bytes(self._column("values", "B", self.value_length))

    def _column(self, name: str, kind: str, count: int) -> list[int]:
        self.at[name] = self.cursor
        layout = struct.Struct(f"<{count}{kind}")
        column = list(layout.unpack_from(self.data, self.cursor))
        self.cursor += layout.size
        self.cursor += -self.cursor % 8
        return column

    def slice_is_right(self, offsets: list[int], length: int, least: int, most: int) -> bool:
        return (
            offsets[0] == 0
            and offsets[-1] == length
            and all(least <= b - a <= most for a, b in pairwise(offsets))
        )

    def key_list(self) -> list[bytes] | None:
        if not self.slice_is_right(self.key_offsets, self.key_length, 1, KEY_BYTES_MAX):
            return None
        return [self.keys[a:b] for a, b in pairwise(self.key_offsets)]

    def value_list(self) -> list[bytes] | None:
        if not self.slice_is_right(self.value_offsets, self.value_length, 0, VALUE_BYTES_MAX):
            return None
        return [self.values[a:b] for a, b in pairwise(self.value_offsets)]


def parses(data: bytes) -> bool:
    if len(data) < 32:
        return False
    count, keys, values, reserved, start, end = struct.unpack_from("<IIIIQQ", data)
    if count > CHUNK_MUTATIONS_MAX or reserved or start > end:
        return False
    lengths = (8 * count, 8 * count, 4 * count, 4 * count, 4 * count + 4, 4 * count + 4, count)
    return bool(len(data) == 32 + sum(n + -n % 8 for n in (*lengths, keys, values)))


def is_stored(data: bytes) -> bool:
    """Whether these are the bytes of a stored chunk that breaks no rule."""
    if not parses(data):
        return False
    columns = Columns(data)
    return (
        columns.key_list() is not None
        and columns.value_list() is not None
        and all(op in (1, 2, 3) for op in columns.operations)
        and all(a < b for a, b in pairwise([columns.start, *columns.seqs]))
        and all(seq <= columns.end for seq in columns.seqs)
    )


def is_published(data: bytes) -> bool:
    if not parses(data):
        return False
    columns = Columns(data)
    return (
        columns.key_list() is not None
        and columns.value_list() is not None
        and all(op in (1, 2, 4, 5, 6, 7, 8, 9, 10) for op in columns.operations)
        and not any((columns.start, columns.end, *columns.seqs))
    )


def accepts(data: bytes) -> bool:
    """Whether the code under test takes `data` for a stored chunk; it raises nothing else."""
    try:
        Chunk(data).check()
    except ChunkError:
        return False
    return True


def accepts_published(data: bytes) -> bool:
    try:
        keys = Chunk(data).check_published()
    except ChunkError:
        return False
    assert keys == Columns(data).key_list()
    return True


# --- building, encoding, viewing ------------------------------------------------------------------


@given(stored_rows())
def test_rows_come_back_as_they_went_in(rows: list[Mutation]) -> None:
    chunk = Chunk.build(rows)
    chunk.check(chunk.crc)
    assert list(chunk) == rows
    assert [chunk.mutation(index) for index in range(len(rows))] == rows
    assert len(chunk) == chunk.count == len(rows)
    assert chunk.keys() == [row.key for row in rows]
    assert chunk.values() == [row.value for row in rows]
    assert [chunk.key(index) for index in range(len(rows))] == chunk.keys()
    assert [chunk.value(index) for index in range(len(rows))] == chunk.values()
    assert (chunk.start, chunk.end) == ((rows[0].seq - 1, rows[-1].seq) if rows else (0, 0))


@given(stored_chunks())
def test_encoding_and_viewing_are_each_others_reverse(chunk: Chunk) -> None:
    data = bytes(chunk)
    again = Chunk(data)
    assert again == chunk
    assert hash(again) == hash(chunk)
    assert bytes(again.encode()) == data
    assert (
        again.nbytes
        == len(data)
        == encoded_bytes(len(chunk), chunk.key_length, len(chunk.value_bytes))
    )
    assert again.crc == crc32c(data)
    assert Chunk.build(chunk, chunk.start, chunk.end) == chunk


@given(stored_chunks())
def test_the_layout_is_the_one_written_down(chunk: Chunk) -> None:
    columns = Columns(bytes(chunk))
    assert columns.cursor == chunk.nbytes
    assert columns.seqs == chunk.seqs.tolist()
    assert columns.cas == chunk.cas.tolist()
    assert columns.expiries == chunk.expiries.tolist()
    assert columns.flags == chunk.flags.tolist()
    assert columns.operations == chunk.operations.tolist()
    assert columns.key_list() == chunk.keys()
    assert columns.value_list() == chunk.values()
    assert (columns.start, columns.end) == (chunk.start, chunk.end)


def test_the_layout_of_one_mutation_byte_for_byte() -> None:
    row = Mutation(Operation.DELETE, b"key", b"value", SeqNo(5), Cas(6), flags=7, expiry=8)
    assert bytes(Chunk.build([row], SeqNo(3), SeqNo(9))) == bytes.fromhex(
        "01000000 03000000 05000000 00000000 0300000000000000 0900000000000000"  # head
        "0500000000000000 0600000000000000"  # number, CAS
        "0800000000000000 0700000000000000"  # expiry, flags, padded
        "00000000 03000000 00000000 05000000"  # offsets
        "0200000000000000"  # operation, padded
        "6b65790000000000 76616c7565000000"  # key and value, padded
    )


@given(stored_chunks())
def test_a_chunk_is_a_view_of_its_buffer(chunk: Chunk) -> None:
    buffer = bytearray(bytes(chunk))
    view = Chunk(buffer)
    assert view.encode().obj is buffer
    columns = Columns(bytes(buffer))
    for name, column in (
        ("seqs", view.seqs),
        ("cas", view.cas),
        ("expiries", view.expiries),
        ("flags", view.flags),
        ("key offsets", view.key_offsets),
        ("value offsets", view.value_offsets),
        ("operations", view.operations),
        ("keys", view.key_bytes),
        ("values", view.value_bytes),
    ):
        if column.nbytes:
            before = column[0]
            buffer[columns.at[name]] ^= 1
            assert column[0] == before ^ 1, name


def test_making_a_chunk_looks_at_the_head_only() -> None:
    chunk = Chunk.build([a_set(1, b"k")])
    data = bytearray(bytes(chunk))
    data[CHUNK_HEAD_BYTES:] = b"\xff" * (len(data) - CHUNK_HEAD_BYTES)
    damaged = Chunk(data)
    assert damaged.count == 1
    with pytest.raises(ChunkError):
        damaged.check()


def test_a_chunk_of_nothing() -> None:
    chunk = Chunk.build([])
    chunk.check(chunk.crc)
    assert (len(chunk), chunk.keys(), chunk.values(), list(chunk)) == (0, [], [], [])
    assert chunk.nbytes == CHUNK_HEAD_BYTES + 16
    assert chunk.check_published() == []
    wide = Chunk.build([], SeqNo(3), SeqNo(9))
    wide.check()
    assert (wide.start, wide.end) == (3, 9)


def test_empty_values_and_binary_keys() -> None:
    rows = [a_set(1, bytes(range(256))[:250]), a_set(2, b"\0"), a_set(3, b"\xff" * 3, b"\0")]
    chunk = Chunk.build(rows)
    chunk.check()
    assert list(chunk) == rows


def test_a_key_of_250_bytes_and_one_of_251() -> None:
    Chunk.build([a_set(1, b"k" * KEY_BYTES_MAX)]).check()
    with pytest.raises(ChunkError, match="a key is not 1 to 250 bytes"):
        Chunk.build([a_set(1, b"a"), a_set(2, b"k" * (KEY_BYTES_MAX + 1))]).check()


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ChunkError, match="a key is not 1 to 250 bytes"):
        Chunk.build([a_set(1, b"a"), a_set(2, b"")]).check()
    with pytest.raises(ChunkError, match="a key is not 1 to 250 bytes"):
        chunk_of_plain_sets([b""], [b"value"]).check_published()


def test_a_value_of_20_mib_and_one_byte_more() -> None:
    value = b"v" * VALUE_BYTES_MAX
    largest = Chunk.build([a_set(1, b"k", value)])
    largest.check(largest.crc)
    assert largest.value(0) == value
    chunk_of_plain_sets([b"k"], [value]).check_published()
    two = chunk_of_plain_sets(
        [b"k", b"l"], [value, b"v"]
    )  # the limit is each value's, not their sum's
    two.check_published()
    for keys, values in (([b"k"], [value + b"v"]), ([b"k", b"l"], [b"", value + b"v"])):
        with pytest.raises(ChunkError, match="a value is longer"):
            chunk_of_plain_sets(keys, values).check_published()
    with pytest.raises(ChunkError, match="a value is longer"):
        Chunk.build([a_set(1, b"k", value + b"v")]).check()


def test_a_chunk_of_the_most_mutations_and_one_of_more() -> None:
    keys = [b"k"] * CHUNK_MUTATIONS_MAX
    values = [b""] * CHUNK_MUTATIONS_MAX
    assert len(chunk_of_plain_sets(keys, values).check_published()) == CHUNK_MUTATIONS_MAX
    with pytest.raises(ChunkError, match="mutations in a chunk"):
        chunk_of_plain_sets([*keys, b"k"], [*values, b""])


def test_a_chunk_s_repr_tells_its_range_and_size() -> None:
    assert repr(Chunk.build([a_set(4, b"k")])) == "<Chunk of 1 in (3, 4], 96 bytes>"
    assert Chunk.build([]) != b"no chunk"


# --- damage ---------------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_random_bytes_are_a_chunk_or_a_chunk_error(data: bytes) -> None:
    assert accepts(data) == is_stored(data)
    assert accepts_published(data) == is_published(data)


@given(
    count=st.integers(0, 5),
    keys=st.integers(0, 20),
    values=st.integers(0, 20),
    body=st.binary(max_size=400),
    start=U64,
    end=U64,
)
def test_random_bytes_behind_a_right_head(
    count: int, keys: int, values: int, body: bytes, start: int, end: int
) -> None:
    length = encoded_bytes(count, keys, values) - 32
    head = struct.pack("<IIIIQQ", count, keys, values, 0, start, end)
    data = head + (body + bytes(length))[:length]
    assert accepts(data) == is_stored(data)
    assert accepts_published(data) == is_published(data)


@given(stored_chunks(), st.data())
def test_damage_anywhere_is_judged_as_the_slow_checker_judges_it(
    chunk: Chunk, data: st.DataObject
) -> None:
    damaged = bytearray(bytes(chunk))
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, len(damaged) - 1))
        damaged[offset] = data.draw(
            st.one_of(st.sampled_from([0, 1, 0x80, 0xFF]), st.integers(0, 255))
        )
    assert accepts(bytes(damaged)) == is_stored(bytes(damaged))
    if damaged != bytes(chunk):
        with pytest.raises(ChunkError):
            Chunk(damaged).check(chunk.crc)


@given(stored_chunks(), st.data())
def test_a_chunk_that_is_too_short_or_too_long_is_refused(
    chunk: Chunk, data: st.DataObject
) -> None:
    whole = bytes(chunk)
    with pytest.raises(ChunkError):
        Chunk(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ChunkError):
        Chunk(whole + data.draw(st.binary(min_size=1, max_size=16)))


OFFSETS = st.one_of(st.integers(-3, 12), st.sampled_from([-(1 << 31), (1 << 31) - 1, 250, 251]))


@given(
    keys=st.lists(st.binary(min_size=1, max_size=4), max_size=5),
    values=st.lists(st.binary(max_size=4), max_size=5),
    data=st.data(),
)
@example(keys=[b"a", b"b", b"c"], values=[], data=None)
def test_offsets_of_any_kind_are_judged_as_the_slow_checker_judges_them(
    keys: list[bytes], values: list[bytes], data: st.DataObject | None
) -> None:
    count = max(len(keys), len(values))
    keys += [b"k"] * (count - len(keys))
    values += [b""] * (count - len(values))
    chunk = Chunk.build(
        [a_set(n, k, v) for n, (k, v) in enumerate(zip(keys, values, strict=True), 1)]
    )
    damaged = bytearray(bytes(chunk))
    columns = Columns(bytes(chunk))
    key_offsets, value_offsets = list(columns.key_offsets), list(columns.value_offsets)
    if data is None:
        key_offsets[1:3] = key_offsets[2:0:-1]
    else:
        for offsets in (key_offsets, value_offsets):
            for index in data.draw(st.lists(st.integers(0, count), max_size=3)):
                offsets[index] = data.draw(st.one_of(OFFSETS, st.sampled_from(offsets)))
    struct.pack_into(f"<{count + 1}i", damaged, columns.at["key offsets"], *key_offsets)
    struct.pack_into(f"<{count + 1}i", damaged, columns.at["value offsets"], *value_offsets)

    expected = Columns(bytes(damaged))
    if expected.key_list() is not None and expected.value_list() is not None:
        Chunk(damaged).check()
        assert Chunk(damaged).keys() == expected.key_list()
        assert Chunk(damaged).values() == expected.value_list()
    else:
        with pytest.raises(ChunkError):
            Chunk(damaged).check()


@pytest.mark.parametrize("count", range(4))
def test_every_array_of_key_offsets_there_is(count: int) -> None:
    """Up to three keys in three bytes, with all offsets that could point near them."""
    data = bytearray(bytes(Chunk.build([a_set(n, b"k", b"v") for n in range(1, count + 1)])))
    offset = Columns(bytes(data)).at["key offsets"]
    at_keys = Columns(bytes(data)).at["keys"]
    accepted = 0
    for offsets in product(range(-count - 1, count + 2), repeat=count + 1):
        struct.pack_into(f"<{count + 1}i", data, offset, *offsets)
        data[at_keys : at_keys + count] = b"abc"[:count]
        expected = Columns(bytes(data)).key_list()
        is_sound = accepts(bytes(data))
        assert is_sound == (expected is not None), offsets
        assert not is_sound or Chunk(data).keys() == expected
        accepted += is_sound
    assert accepted == 1  # each key one byte


def poked(chunk: Chunk, column: str, kind: str, index: int, value: int) -> Chunk:
    data = bytearray(bytes(chunk))
    offset = Columns(bytes(chunk)).at.get(column, 0)
    struct.pack_into("<" + kind, data, offset + index * struct.calcsize(kind), value)
    return Chunk(data)


THREE = Chunk.build(
    [a_set(3, b"aa", b"x"), a_set(5, b"bb", b"y"), a_set(6, b"cc", b"z")], SeqNo(2), SeqNo(8)
)


@pytest.mark.parametrize(
    ("column", "kind", "index", "value", "complaint"),
    [
        ("head", "I", 0, 4, "do not add up"),
        ("head", "I", 0, CHUNK_MUTATIONS_MAX + 1, "mutations in a chunk"),
        ("head", "I", 1, 14, "do not add up"),
        ("head", "I", 1, 5, "do not span the key bytes"),  # the same, padded
        ("head", "I", 2, 14, "do not add up"),
        ("head", "I", 2, 4, "do not span the value bytes"),
        ("head", "I", 3, 1, "reserved"),
        ("head", "Q", 2, 9, "before its start"),
        ("head", "Q", 2, 3, "leave the chunk's range"),
        ("head", "Q", 3, 5, "leave the chunk's range"),
        ("seqs", "Q", 0, 2, "leave the chunk's range"),
        ("seqs", "Q", 0, 5, "do not increase"),
        ("seqs", "Q", 1, 3, "do not increase"),
        ("seqs", "Q", 1, 2, "do not increase"),
        ("seqs", "Q", 1, SEQ_MAX, "do not increase"),
        ("seqs", "Q", 2, 9, "leave the chunk's range"),
        ("seqs", "Q", 2, 4, "do not increase"),
        ("key offsets", "i", 0, 1, "do not span the key bytes"),
        ("key offsets", "i", 0, -1, "do not span the key bytes"),
        ("key offsets", "i", 1, 4, "is not 1 to 250 bytes"),
        ("key offsets", "i", 1, 5, "offsets decrease"),
        ("key offsets", "i", 1, -2, "offsets decrease"),
        ("key offsets", "i", 2, 7, "offsets decrease"),
        ("key offsets", "i", 3, 5, "do not span the key bytes"),
        ("value offsets", "i", 0, -1, "do not span the value bytes"),
        ("value offsets", "i", 1, 3, "decrease"),
        ("value offsets", "i", 1, -1, "decrease"),
        ("value offsets", "i", 2, 4, "decrease"),
        ("value offsets", "i", 3, 2, "do not span the value bytes"),
        ("operations", "B", 1, 0, "never stored"),
        ("operations", "B", 1, Operation.ADD, "never stored"),
        ("operations", "B", 2, 255, "never stored"),
    ],
)
def test_each_kind_of_damage_is_named(
    column: str, kind: str, index: int, value: int, complaint: str
) -> None:
    with pytest.raises(ChunkError, match=complaint):
        poked(THREE, column, kind, index, value).check()


def test_keys_that_lie_over_each_other_take_no_memory() -> None:
    """Offsets that go to and fro: cut by them, these keys would take 400 MB, of a chunk of 400 KB;
    and of one of 32 MiB more than there is."""
    count, length = 4096, 200_000
    offsets = array("i", [0, *islice(cycle((length - 1, 0)), count - 1), length]).tobytes()
    nowhere, sets = bytes(4 * count + 4), bytes([Operation.SET]) * count
    chunk = published_chunk(offsets, bytes(length), nowhere, b"", sets)
    tracemalloc.start()
    try:
        with pytest.raises(ChunkError, match="key offsets decrease"):
            chunk.check_published()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * chunk.nbytes


def test_a_wrong_crc_is_named() -> None:
    THREE.check(THREE.crc)
    with pytest.raises(ChunkError, match="CRC32C"):
        THREE.check(THREE.crc ^ 1)
    with pytest.raises(ChunkError, match="CRC32C"):
        poked(THREE, "values", "B", 0, 0).check(THREE.crc)


def test_a_published_chunk_has_no_sequence_numbers_and_expires_nothing() -> None:
    published = chunk_of_plain_sets([b"a", b"b"], [b"", b""])
    assert published.check_published() == [b"a", b"b"]
    for column, kind, value in (("seqs", "Q", 1), ("operations", "B", 3), ("operations", "B", 11)):
        with pytest.raises(ChunkError):
            poked(published, column, kind, 1, value).check_published()
    with pytest.raises(ChunkError, match="no sequence numbers"):
        poked(published, "head", "Q", 3, 1).check_published()
    with pytest.raises(ChunkError, match="no sequence numbers"):
        THREE.check_published()


@given(published_chunks())
def test_published_chunks_pass(chunk: Chunk) -> None:
    assert chunk.check_published() == chunk.keys()
    assert is_published(bytes(chunk))


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="99"):
        list(poked(THREE, "operations", "B", 1, 99))


# --- chunks from chunks ---------------------------------------------------------------------------


@given(stored_chunks(), st.data())
def test_a_slice_has_the_rows_in_its_range(chunk: Chunk, data: st.DataObject) -> None:
    near = st.one_of(st.integers(max(chunk.start - 2, 0), chunk.end + 2), U64).map(SeqNo)
    after, through = data.draw(near), data.draw(near)
    part = chunk.slice(after, through)
    part.check()
    assert list(part) == [row for row in chunk if after < row.seq <= through]
    assert chunk.start <= part.start <= part.end <= chunk.end
    if chunk.start <= after <= through <= chunk.end:
        assert (part.start, part.end) == (after, through)


@given(stored_chunks(), st.data())
def test_slices_side_by_side_merge_to_the_rows_again(chunk: Chunk, data: st.DataObject) -> None:
    middle = SeqNo(data.draw(st.integers(chunk.start, chunk.end)))
    low, high = chunk.slice(chunk.start, middle), chunk.slice(middle, chunk.end)
    assert [*low, *high] == list(chunk)
    assert (low.start, low.end, high.start, high.end) == (chunk.start, middle, middle, chunk.end)


@given(st.one_of(stored_chunks(), published_chunks()), st.data())
def test_rows_by_index_are_those_rows(chunk: Chunk, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, len(chunk)))
    high = data.draw(st.integers(low, len(chunk)))
    part = chunk.rows(low, high, SeqNo(0), SEQ_MAX)
    assert list(part) == list(chunk)[low:high]
    assert (part.start, part.end) == (0, SEQ_MAX)
    assert part.keys() == [row.key for row in part]


@given(published_chunks(4), st.lists(KEYS, max_size=4))
def test_a_batch_of_plain_sets_cannot_fail(chunk: Chunk, keys: list[bytes]) -> None:
    assert chunk_of_plain_sets(keys, keys).is_unconditional
    assert chunk.is_unconditional == all(row.op is Operation.SET and row.cas == 0 for row in chunk)


def test_a_slice_of_everything_is_the_chunk_itself() -> None:
    assert THREE.slice(SeqNo(0), SEQ_MAX) is THREE
    assert THREE.slice(SeqNo(2), SeqNo(8)) is THREE


@given(published_chunks(), st.integers(0, 1 << 62), st.integers(0, 1 << 62), st.integers(0, 3))
def test_numbering_writes_two_columns_and_the_range(
    chunk: Chunk, seq: int, cas: int, gap: int
) -> None:
    start, end = SeqNo(seq), SeqNo(seq + len(chunk) + gap)
    rows = [
        Mutation(
            row.op, row.key, row.value, SeqNo(seq + 1 + n), Cas(cas + n), row.flags, row.expiry
        )
        for n, row in enumerate(chunk)
    ]
    memory = bytearray(bytes(chunk))
    for numbered in (
        chunk.numbered(SeqNo(seq + 1), Cas(cas), start, end),
        Chunk(bytes(chunk)).numbered_in_place(SeqNo(seq + 1), Cas(cas), start, end),
        Chunk(memory).numbered_in_place(SeqNo(seq + 1), Cas(cas), start, end),
        # Once more, as where a chunk was only looked at before.
        Chunk(memory).numbered_in_place(SeqNo(seq + 1), Cas(cas), start, end),
    ):
        assert (numbered.start, numbered.end) == (start, end)
        assert list(numbered) == rows
    assert memory == bytes(numbered)


@given(U64, U64, st.booleans())
def test_counter_deltas_come_back(delta: int, initial: int, create: bool) -> None:
    value = CounterDelta(delta, initial, create)
    assert CounterDelta.decode(value.encode()) == value
    assert len(value.encode()) == 24


@pytest.mark.parametrize("length", [0, 23, 25])
def test_a_counter_delta_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ChunkError, match="24 bytes"):
        CounterDelta.decode(bytes(length))


# --- keys and values of one length ----------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 12))
def test_keys_of_one_length_are_cut_like_others(
    key_length: int, count: int, value_length: int
) -> None:
    keys = [
        index.to_bytes(2, "little").rjust(key_length, b"k")[-key_length:] for index in range(count)
    ]
    chunk = chunk_of_plain_sets(keys, [bytes(value_length)] * count)
    assert chunk.keys() == keys
    if key_length <= KEY_BYTES_MAX:
        assert chunk.check_published() == keys
    else:
        with pytest.raises(ChunkError, match="250"):
            chunk.check_published()


@given(st.integers(1, 9), st.integers(2, 9), st.data())
def test_an_offset_that_is_wrong_among_keys_of_one_length_is_noticed(
    length: int, count: int, data: st.DataObject
) -> None:
    encoded = bytearray(
        bytes(chunk_of_plain_sets([b"k" * length] * count, [b"v" * length] * count))
    )
    columns = Columns(bytes(encoded))
    name = data.draw(st.sampled_from(["key offsets", "value offsets"]))
    offset = columns.at[name] + 4 * data.draw(st.integers(0, count))
    (right,) = struct.unpack_from("<i", encoded, offset)
    wrong = data.draw(st.integers(-2, length * count + 2).filter(lambda offset: offset != right))
    struct.pack_into("<i", encoded, offset, wrong)
    chunk = Chunk(bytes(encoded))
    offsets = Columns(bytes(encoded))
    is_right = columns.slice_is_right(
        offsets.key_offsets, offsets.key_length, 1, KEY_BYTES_MAX
    ) and columns.slice_is_right(offsets.value_offsets, offsets.value_length, 0, VALUE_BYTES_MAX)
    if is_right:
        chunk.check_published()
    else:
        with pytest.raises(ChunkError):
            chunk.check_published()


def test_a_chain_tells_chunks_and_their_order() -> None:
    first_chunk, second_chunk = (
        chunk_of_plain_sets([b"a"], [b"1"]),
        chunk_of_plain_sets([b"a"], [b"2"]),
    )
    ends = {
        first_chunk.chained_crc(0),
        second_chunk.chained_crc(0),
        first_chunk.chained_crc(second_chunk.chained_crc(0)),
        second_chunk.chained_crc(first_chunk.chained_crc(0)),
    }
    assert len(ends) == 4
    assert first_chunk.chained_crc(0) == crc32c(first_chunk.crc.to_bytes(4, "little"))
