"""A TLS connection over a socket that does not block, for callers that wait for it themselves."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from upr_protocol.chunk import Buffer
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.security import TlsSettings
from upr_protocol.session import Session
from upr_protocol.transport.socket_io import receive_available, write_available
from upr_protocol.transport.tls_context import client_context
from upr_protocol.transport.tls_link import TlsLink, new_tls_scratch

_WAIT_S_MIN: Final = 0.001


class TlsSocket:
    """A TLS connection to a server.

    Args:
        connection: The socket; it does not block.
        tls: How to encrypt.
        server_name: Whom the server's certificate must name.

    Attributes:
        link: Encrypts and decrypts.
        sent_bytes: How many encrypted bytes the socket has taken.

    Raises:
        TlsError: A file cannot be used.
    """

    def __init__(self, connection: socket.socket, tls: TlsSettings, server_name: str) -> None:
        self.link = TlsLink(client_context(tls), server_name)
        self.sent_bytes = 0
        self._socket = connection
        self._scratch = new_tls_scratch()

    def handshake(self, deadline: float, clock: Callable[[], float]) -> None:
        """Waits until the handshake is done.

        Raises:
            BrokenError: The connection is gone, or the deadline is over.
            TlsError: The two sides do not agree, or one does not trust the other.
            OSError: The connection is gone.
        """
        is_done = False
        while not is_done:
            try:
                is_done = self.link.handshake()
            except UprError:
                with suppress(OSError):
                    self._send([self.link.take_outgoing()])  # why
                raise
            outgoing: Sequence[Buffer] = [self.link.take_outgoing()]
            while outgoing := self._send(outgoing):
                self._wait(select.POLLOUT, deadline - clock())
            if not is_done:
                self._wait(select.POLLIN, deadline - clock())
                with suppress(BlockingIOError):
                    self.link.feed(receive_available(self._socket.fileno(), self._scratch))

    def _wait(self, event: int, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if timeout_s <= 0 or not poll.poll(max(_WAIT_S_MIN, timeout_s) * 1000):
            raise BrokenError("it did not answer in time")

    def read_available(self, session: Session, scratch: memoryview, now: float) -> int:
        """Reads what the socket has, once, and gives it to the session.

        Returns:
            How many bytes came; 0 when the other side has ended.

        Raises:
            BlockingIOError: Nothing has come, or not enough.
            BrokenError: The connection was cut, or what came is not the other side's.
            TlsError: The other side does not accept this side's certificate.
            OSError: The connection is gone.
        """
        link = self.link
        if not link.has_undecrypted:
            link.feed(receive_available(self._socket.fileno(), self._scratch))
        count = link.read(session, scratch, now)
        if not count and not link.is_ended:
            raise BlockingIOError
        return count

    def write_available(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Writes as much of `buffers` as the socket takes now; returns what is left. The next call
        must begin with it."""
        return self.link.write(buffers, self._send)

    def _send(self, ciphertext: Sequence[Buffer]) -> Sequence[Buffer]:
        remainder = write_available(self._socket.fileno(), ciphertext)
        self.sent_bytes += sum(map(len, ciphertext)) - sum(map(len, remainder))
        return remainder

    def send_close_notify(self) -> None:
        """Says that nothing more will be sent, if the socket takes that at once."""
        if self.link.is_established and not self.link.has_unsent:
            with suppress(OSError):
                self._send([self.link.close_notify()])
