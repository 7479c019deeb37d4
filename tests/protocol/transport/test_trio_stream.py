"""Reading and writing Trio streams, sockets and others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair

from upr_protocol.address import Address
from upr_protocol.chunk import Buffer
from upr_protocol.session import ClientSession, ServerSession, SessionState
from upr_protocol.transport import (
    allow_unsent_bytes,
    dial_tcp,
    new_scratch,
    read_rest,
    read_some,
    write_all,
    write_now,
    write_rest,
)
from upr_protocol.transport.socket_io import WRITE_BYTES, first_bytes, unsent, write_available
from upr_protocol.transport.trio_stream import UNSENT_BYTES
from upr_protocol.wire import Hello


def socket_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    near, far = trio.socket.socketpair()
    return trio.SocketStream(near), trio.SocketStream(far)


def hello() -> list[Buffer]:
    """The first frame of a client."""
    return ClientSession("test:transport", now=0.0).take_outgoing(0.0)


@given(st.lists(st.binary(max_size=5), max_size=8), st.data())
def test_unsent_gives_exactly_the_bytes_that_were_not_sent(
    buffers: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(buffers)
    sent_bytes = data.draw(st.integers(0, len(whole)))
    assert b"".join(unsent(buffers, sent_bytes)) == whole[sent_bytes:]


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=8), st.integers(1, 50))
def test_the_first_bytes_and_the_rest_are_all(buffers: list[bytes], bytes_max: int) -> None:
    whole, first = b"".join(buffers), first_bytes(buffers, bytes_max)
    assert b"".join(first) == whole[:bytes_max]
    assert b"".join(unsent(buffers, bytes_max)) == whole[bytes_max:]


@pytest.mark.parametrize("lengths", [(5 * WRITE_BYTES,), (100_000,) * 60, (2 * WRITE_BYTES, 10)])
def test_one_write_takes_a_bounded_number_of_bytes(tmp_path: Path, lengths: list[int]) -> None:
    """Though what is written to takes all of them, as a file does."""
    buffers: Sequence[Buffer] = [b"%d" % (index % 10) * size for index, size in enumerate(lengths)]
    whole = b"".join(buffers)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        while buffers:
            size_before = file.tell()
            buffers = write_available(file.fileno(), buffers)
            assert file.tell() - size_before == min(WRITE_BYTES, len(whole) - size_before)
    assert (tmp_path / "file").read_bytes() == whole


async def taken_bytes(*, is_allowed: bool) -> int:
    """How much a TCP socket takes whose peer has room for little and reads nothing."""
    listener = trio.socket.socket()
    listener.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
    await listener.bind(("127.0.0.1", 0))
    listener.listen()
    stream = await trio.open_tcp_stream(*listener.getsockname())
    async with stream, trio.SocketListener(listener) as peers, await peers.accept():
        if is_allowed:
            allow_unsent_bytes(stream)
        size = 16 * UNSENT_BYTES
        return size - sum(map(len, write_now(stream, [bytes(size)])))


async def test_a_socket_takes_more_than_its_peer_has_room_for() -> None:
    assert await taken_bytes(is_allowed=False) < UNSENT_BYTES // 2
    assert UNSENT_BYTES <= await taken_bytes(is_allowed=True) < 2 * UNSENT_BYTES


async def test_only_a_tcp_socket_has_unsent_bytes() -> None:
    near, far = socket_pair()
    memory, _ = memory_stream_pair()
    async with near, far:
        allow_unsent_bytes(near)
        allow_unsent_bytes(memory)
        assert not write_now(near, [b"text"])
        assert await far.receive_some(4) == b"text"
    allow_unsent_bytes(near)


async def test_a_socket_takes_more_buffers_than_one_call() -> None:
    buffers = [b"%d," % index + bytes(index % 7) for index in range(5000)]
    near, far = socket_pair()
    received = bytearray()

    async def receive() -> None:
        async with far:
            async for data in far:
                received.extend(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        async with near:
            await write_all(near, buffers)
    assert received == b"".join(buffers)


async def test_a_session_gets_what_comes_from_a_socket_and_from_any_other_stream() -> None:
    for near, far in (socket_pair(), memory_stream_pair()):
        async with near, far:
            session = ServerSession("test:server", now=0.0)
            await write_all(near, hello())
            assert await read_some(far, session, new_scratch()) > 0
            assert [type(message) for message in session.messages()] == [Hello]
            assert session.state is SessionState.READY
            assert read_rest(far, session, new_scratch()) == 0
            await near.send_eof()
            assert await read_some(far, session, new_scratch()) == 0


class BodyUnderWay(ServerSession):
    """A session that receives a body, of which so many bytes are missing."""

    missing_bytes = 0

    @property
    def unfinished_body_bytes(self) -> int:
        return self.missing_bytes

    def receive_buffer(self) -> memoryview:
        return memoryview(bytearray(self.missing_bytes))

    def receive(self, data: bytes, now: float, filled: int = 0) -> None:
        self.missing_bytes -= filled


async def test_only_the_read_of_a_large_body_waits_for_its_turn() -> None:
    near, far = socket_pair()
    scratch = new_scratch()
    turns: list[int] = []
    session = BodyUnderWay("test:server", now=0.0)

    async def wait_for_turn() -> None:
        turns.append(session.missing_bytes)
        await trio.lowlevel.checkpoint()

    async with near, far:
        for missing_bytes in (0, len(scratch), len(scratch) + 1):
            session.missing_bytes = missing_bytes
            await write_all(near, [bytes(8)])
            await read_some(far, session, scratch, wait_for_turn)
        assert turns == [len(scratch) + 1]

        async def close() -> None:
            await far.aclose()

        session.missing_bytes = len(scratch) + 1
        await write_all(near, [bytes(8)])
        with pytest.raises(trio.ClosedResourceError):
            await read_some(far, session, scratch, close)


async def test_reading_waits_for_the_first_byte_and_may_be_cancelled(
    autojump_clock: MockClock,
) -> None:
    for near, far in (socket_pair(), memory_stream_pair()):
        async with near, far:
            session = ServerSession("test:server", now=0.0)
            with trio.move_on_after(1) as scope:
                await read_some(far, session, new_scratch())
            assert scope.cancelled_caught
            # It has taken nothing.
            await write_all(near, hello())
            await read_some(far, session, new_scratch())
            assert [type(message) for message in session.messages()] == [Hello]


async def test_a_peer_that_reads_nothing_times_out(autojump_clock: MockClock) -> None:
    near, far = socket_pair()
    async with near, far:
        remainder = write_now(near, [bytes(1 << 20)] * 16)
        assert remainder, "the socket is full"
        with pytest.raises(trio.TooSlowError):
            await write_rest(near, remainder, timeout_s=3.0)


async def test_a_closed_stream_differs_from_a_lost_one() -> None:
    near, far = socket_pair()
    session = ServerSession("test:server", now=0.0)
    await far.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await write_all(near, [bytes(1 << 20)])
    await near.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await write_all(near, hello())
    with pytest.raises(trio.ClosedResourceError):
        await read_some(near, session, new_scratch())


async def test_a_host_name_that_cannot_be_one_is_an_os_error() -> None:
    with pytest.raises(OSError, match="not a valid host name"):
        await dial_tcp(Address("mün..chen", 1))
