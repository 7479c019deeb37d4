"""One connection."""

from __future__ import annotations

import socket

import attrs
import trio
import trio.testing

from tests.kit.fake_server import FakeServer
from upr_protocol.address import Address
from upr_protocol.client.trio.connection import ConnectionHandler, TrioOptions, open_connection
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.wire import Error, Message, Noop, Stats


@attrs.define
class RecordingHandler(ConnectionHandler):
    """Records what happens, in its order."""

    events: list[Message | UprError] = attrs.Factory(list)

    def message_received(self, message: Message) -> None:
        self.events.append(message)

    def connection_lost(self, error: UprError) -> None:
        self.events.append(error)


async def test_what_came_is_handed_out_before_a_refused_write_ends_the_connection(
    server: FakeServer,
) -> None:
    """It may be the answer to a request, or say why the server ends."""
    client_end, server_end = socket.socketpair()
    frames = [Noop(), Noop(), Error("it stops", "", status=Status.SHUTTING_DOWN)]
    handler = RecordingHandler()

    async def dial(address: Address) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return trio.SocketStream(trio.socket.from_stdlib_socket(client_end))

    async with trio.open_nursery() as nursery:
        server_stream = trio.SocketStream(trio.socket.from_stdlib_socket(server_end))
        nursery.start_soon(server.serve, server_stream)
        address = Address("fake", 12000, "b")
        async with open_connection(address, TrioOptions(dial=dial), handler) as connection:
            await trio.testing.wait_all_tasks_blocked(0.01)
            handler.events.clear()
            server_end.send(
                b"".join(buffer for frame in frames for buffer in frame.frame_buffers())
            )
            server_end.shutdown(socket.SHUT_RDWR)
            connection.send(Stats("b", opaque=connection.session.new_opaque()))
            await connection.ended.wait()
    *messages, error = handler.events
    assert messages == frames[:-1]
    assert isinstance(error, ServerError)
    assert error.status is Status.SHUTTING_DOWN
