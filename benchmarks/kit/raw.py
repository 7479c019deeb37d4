"""A session over a plain blocking socket: the least that a Python client of this server can be."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from typing import Self

from benchmarks.kit.processes import HOST
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.session import ClientSession
from upr_protocol.transport import FrameMemory
from upr_protocol.wire import Go, HelloReply, Message, Open, Opened, Stream, StreamReply

RECEIVE_BYTES = 256 * 1024
IDLE_INTERVAL_S = 3600


class RawConnection:
    """One connection with its bucket open.

    Args:
        port: Where the server listens.
        bucket: The bucket.
        certificate: The file with the server's certificate; empty for a connection in the clear.
        window_bytes: The window.

    Attributes:
        session: The session; what it is told to send goes out with `flush`.
        socket: The socket.
        partition_count: The bucket's.
    """

    def __init__(
        self, port: int, bucket: str, certificate: str = "", *, window_bytes: int = 16 << 20
    ) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if certificate:
            context = ssl.create_default_context(cafile=certificate)
            self.socket = context.wrap_socket(self.socket, server_hostname=HOST)
        self.session = ClientSession(
            "bench:raw",
            window_bytes=window_bytes,
            idle_interval_s=IDLE_INTERVAL_S,
            now=time.monotonic(),
            allocate=FrameMemory().allocate,
        )
        self.partition_count = 0
        self.flush()
        while not self.partition_count:
            for message in self.messages():
                if isinstance(message, HelloReply):
                    self.session.send(Open(bucket, opaque=self.session.new_opaque()))
                elif isinstance(message, Opened):
                    self.partition_count = message.partition_count
            self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def messages(self) -> Iterator[Message]:
        """What the next bytes bring; waits for them."""
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.session.receive(data, time.monotonic())
        yield from self.session.messages()

    def flush(self) -> None:
        """Sends what the session holds."""
        buffers = self.session.take_outgoing(time.monotonic())
        if buffers:
            self.socket.sendall(b"".join(buffers))

    def stream(self) -> None:
        """Asks for every partition from the beginning, and says `Go`."""
        position = ResumeState("").position
        for partition_id in range(self.partition_count):
            partition = PartitionId(partition_id)
            self.session.send(
                Stream(
                    PartitionState.ACTIVE,
                    position(partition),
                    partition=partition,
                    opaque=self.session.new_opaque(),
                )
            )
        self.flush()
        answered = 0
        while answered < self.partition_count:
            answered += sum(isinstance(message, StreamReply) for message in self.messages())
        self.session.send(Go())
        self.flush()
