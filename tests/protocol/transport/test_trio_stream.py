"""Writing many buffers to a socket, in as many calls as it takes."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.transport import write_all
from upr_protocol.transport.socket_io import unsent


@given(st.lists(st.binary(max_size=5), max_size=8), st.data())
def test_unsent_gives_exactly_the_bytes_that_were_not_sent(
    buffers: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(buffers)
    sent = data.draw(st.integers(0, len(whole)))
    assert b"".join(unsent(buffers, sent)) == whole[sent:]


async def test_a_socket_takes_more_buffers_than_one_call() -> None:
    buffers = [b"%d," % index + bytes(index % 7) for index in range(5000)]
    ours, theirs = trio.socket.socketpair()
    received = bytearray()

    async def receive() -> None:
        while data := await theirs.recv(65536):
            received.extend(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        async with trio.SocketStream(ours) as stream:
            await write_all(stream, buffers)
    theirs.close()
    assert received == b"".join(buffers)
