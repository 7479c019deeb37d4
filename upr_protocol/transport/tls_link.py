"""TLS between a session and a socket, without I/O: OpenSSL over two buffers in memory.

`trio.SSLStream` copies every byte several times; this decrypts a body right where it will stay, and
costs half as much for each chunk.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from upr_protocol.chunk import Buffer
from upr_protocol.errors import TlsError
from upr_protocol.session import Session
from upr_protocol.transport.channel_binding import channel_binding
from upr_protocol.transport.socket_io import read_spaces, unsent
from upr_protocol.transport.tls_errors import explained_tls_error

HANDSHAKE_BYTES_MAX: Final = 64 * 1024
"""What a peer may send before its handshake is done: several times the longest chain of
certificates that is in use. The memory of a stranger is bounded by it."""

STRANGER_READ_BYTES: Final = 16 * 1024
"""What is read at a time of a peer that has not said `Hello`, and logged in where there are users:
OpenSSL's buffers keep the size that they once had."""

READ_BYTES: Final = 256 * 1024
SERVER_READ_BYTES: Final = 64 * 1024
"""What one read of a socket takes. A server reads less, because it has many connections, and
OpenSSL keeps a buffer of this size for each."""

PIECE_BYTES: Final = 64 * 1024
"""What is encrypted at a time, for the same reason."""

WRITE_BYTES: Final = 256 * 1024
"""What is encrypted before the socket is asked whether it takes it."""

WRITE_BYTES_MAX: Final = 1024 * 1024
"""What is encrypted and sent before others have their turn, about a millisecond: while its peer
reads, a socket takes any amount."""

_RECORDS_MAX: Final = 512
"""Records that one read decrypts, at some 2 µs each: a peer may send a byte in each."""

FED_RECORDS: Final = 128
"""Records that OpenSSL is given at a time. It goes on to the next as long as they have no data, and
new keys, which a peer may tell or ask for in every record, take it 10 to 25 µs."""

HANDSHAKE_RECORDS: Final = 16
"""The same before the handshake is done: what comes right behind its last record is fed with it,
and is not counted."""

IDLE_RECORDS_MAX: Final = 100
DATA_RECORDS: Final = 100_000
"""How many records may come without data, and how many with data allow one more. Peers change their
keys after millions. A peer that has sent much data must not have saved up a flood."""

_HANDSHAKE: Final = b"\x16"
"""How the first record of a TLS connection begins."""

_RECORD_BYTES: Final = 16 * 1024
"""What one record has at most: up to this, buffers are joined."""

_RECORD_HEAD_BYTES: Final = 5
"""A record begins with its type, a version, and its length in two bytes."""


def new_tls_scratch(size: int = READ_BYTES) -> memoryview:
    """A buffer for what comes encrypted. All connections of one loop may share it."""
    return memoryview(bytearray(size))


class NotTlsError(TlsError):
    """The other side has begun to speak without TLS."""


class TlsLink:
    """One side of a TLS connection.

    Args:
        context: OpenSSL's settings.
        server_name: Whom the certificate of the other side must name; None on the server's side.
        own_channel_binding: On the server's side, the hash of its certificate; see
            `channel_binding`.

    Attributes:
        is_established: Whether the handshake is done.
        is_ended: Whether the other side has said that it sends nothing more.
        has_undecrypted: Whether the next `read` may give something though nothing more was fed.
    """

    def __init__(
        self, context: ssl.SSLContext, server_name: str | None, own_channel_binding: bytes = b""
    ) -> None:
        self._own_channel_binding = own_channel_binding
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._is_server = server_name is None
        self._object = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=self._is_server,
            server_hostname=server_name,
        )
        self.is_established = self.is_ended = self.has_undecrypted = False
        self._handshake_bytes = 0
        self._first_head = b""
        """How the first record begins."""
        self._is_cut = False
        """Whether the other side has left before its first record was whole."""
        self._ciphertext: Sequence[Buffer] = ()
        """What was encrypted, and the socket has not taken yet."""
        self._encrypted_bytes = 0
        """How many bytes that is in the clear."""
        self._unfed: bytes = b""
        """What came, and OpenSSL was not given yet."""
        self._head = b""
        """How the head of the record begins that is coming."""
        self._record_bytes_left = 0
        """What is missing of the record whose head has come."""
        self._records_fed = self._data_records = 0
        """The records that have come whole since the handshake, and those of them that had data:
        pieces of them, as one that is longer than the space for it is read in several."""

    # Handshake.

    def handshake(self) -> bool:
        """Goes on with the handshake; whether it is done. Send what `take_outgoing` gives after it,
        also if it raises.

        Raises:
            BrokenError: The other side has left, or sends what is not TLS.
            TlsError: The two sides do not agree, or one does not trust the other.
        """
        if self._is_server and not self.has_first_record:
            # From its first look at a record on, OpenSSL keeps 40 KiB of buffers. Many strangers
            # may never end their first.
            return False
        while True:
            try:
                self._object.do_handshake()
                break
            except ssl.SSLWantReadError:
                if not self._unfed:
                    return False
                self._feed_records(self._unfed)
            except ssl.SSLError as error:
                raise explained_tls_error(error, is_server=self._is_server) from error
        self.is_established = self.has_undecrypted = True
        self._records_fed = 0
        return True

    @property
    def has_first_record(self) -> bool:
        """Whether the first record has come whole, or OpenSSL is to say what is wrong with it."""
        head, count = self._first_head, self._handshake_bytes
        if self._is_cut:
            return True
        if len(head) < _RECORD_HEAD_BYTES:
            return False
        length = int.from_bytes(head[-2:])
        return count >= _RECORD_HEAD_BYTES + length or length > _RECORD_BYTES or head[1] != 3

    def take_outgoing(self) -> bytes:
        """What OpenSSL has to say that is not data: the handshake, and why it failed."""
        return self._outgoing.read()

    @property
    def peer_certificate(self) -> bytes:
        """The other side's certificate in DER form; empty if it has shown none."""
        return self._object.getpeercert(binary_form=True) or b""

    @property
    def peer_name(self) -> str:
        """The common name in the other side's certificate, which was verified; if it has none, the
        first DNS name. Empty if the other side has shown no certificate."""
        certificate: dict[str, Any] = self._object.getpeercert() or {}
        subject = certificate.get("subject", ())
        names = [value for part in subject for field, value in part if field == "commonName"]
        if names:
            return str(names[-1])
        alternatives = certificate.get("subjectAltName", ())
        return next((str(value) for kind, value in alternatives if kind == "DNS"), "")

    @property
    def channel_binding(self) -> bytes:
        """The hash of the server's certificate, for channel binding: the same on both sides, unless
        somebody is in between. Empty if there is none for this certificate."""
        return (
            self._own_channel_binding if self._is_server else channel_binding(self.peer_certificate)
        )

    @property
    def version(self) -> str:
        """The version of TLS; empty before the handshake is done."""
        return self._object.version() or "" if self.is_established else ""

    # Reading.

    def feed(self, data: Buffer) -> None:
        """Takes in what came from the socket; nothing if the socket is at its end.

        Raises:
            NotTlsError: It is no TLS.
            TlsError: The handshake takes too much.
        """
        if not data:
            self._incoming.write_eof()
        else:
            self._feed_records(self._unfed + bytes(data) if self._unfed else data)
        self.has_undecrypted = True
        if not self.is_established:
            if self._is_server and not self._handshake_bytes and data[:1] not in (b"", _HANDSHAKE):
                raise NotTlsError(
                    "the client does not speak TLS: it must write uprs:// in place of upr://"
                )
            self._is_cut = not data
            self._first_head += bytes(data[: _RECORD_HEAD_BYTES - len(self._first_head)])
            self._handshake_bytes += len(data)
            if self._handshake_bytes > HANDSHAKE_BYTES_MAX:
                raise TlsError(f"a TLS handshake of more than {HANDSHAKE_BYTES_MAX} bytes")

    def _feed_records(self, data: Buffer) -> None:
        """Gives OpenSSL the next `FED_RECORDS` of what has come, or `HANDSHAKE_RECORDS`; keeps the
        rest. O(records)."""
        view, end, whole_count = memoryview(data), len(data), 0
        count_max = FED_RECORDS if self.is_established else HANDSHAKE_RECORDS
        place = self._skip_head(view) if self._head else 0
        left = self._record_bytes_left
        while place < end and whole_count < count_max:
            if not left:
                if end - place < _RECORD_HEAD_BYTES:
                    self._head = bytes(view[place:])
                    place = end
                    break
                left = view[place + 3] << 8 | view[place + 4]
                place += _RECORD_HEAD_BYTES
            if left > end - place:
                left -= end - place
                place = end
            else:
                place += left
                left = 0
                whole_count += 1
        self._record_bytes_left = left
        self._records_fed += whole_count
        if place == end:
            self._incoming.write(data)
            self._unfed = b""
        else:
            self._incoming.write(view[:place])
            self._unfed = bytes(view[place:])

    def _skip_head(self, view: memoryview) -> int:
        """Completes the head of a record of which a part has come; returns where it ends."""
        count = min(_RECORD_HEAD_BYTES - len(self._head), len(view))
        self._head += bytes(view[:count])
        if len(self._head) == _RECORD_HEAD_BYTES:
            self._record_bytes_left, self._head = int.from_bytes(self._head[3:]), b""
        return count

    def read(self, session: Session, scratch: memoryview, now: float) -> int:
        """Decrypts what was fed, as much as one read may take, and gives it to the session.

        Returns:
            How many bytes there were; 0 if more must be fed first, or if the other side has ended.

        Raises:
            BrokenError: The connection was cut: its end was not announced. Or what came was not
                encrypted by the other side.
            TlsError: The other side does not accept this side's certificate.
        """
        room, scratch = read_spaces(session, scratch)
        filled = self._decrypt(room)
        behind = self._decrypt(scratch) if filled == len(room) else 0
        if filled + behind:
            session.receive(bytes(scratch[:behind]), now, filled)
        return filled + behind

    def read_bytes(self, bytes_max: int) -> bytes:
        """Decrypts at most so many bytes of what was fed; see `read`."""
        space = memoryview(bytearray(bytes_max))
        return bytes(space[: self._decrypt(space)])

    def _decrypt(self, space: memoryview) -> int:
        count = 0
        try:
            for _ in range(_RECORDS_MAX):
                if count == len(space):
                    break
                # With a buffer it gives the number of bytes.
                length = cast("int", self._object.read(len(space) - count, space[count:]))
                if not length:
                    # So Python tells of the end, or with an error if this side has ended, too.
                    raise ssl.SSLZeroReturnError
                count += length
                self._data_records += 1
        except ssl.SSLWantReadError:
            self._check_records()
            if not self._unfed:
                self.has_undecrypted = False
                return count
            self._feed_records(self._unfed)
            # Whoever gets nothing waits for the socket.
            return count or self._decrypt(space)
        except ssl.SSLZeroReturnError:
            self.has_undecrypted, self.is_ended = False, True
        except ssl.SSLError as error:
            raise explained_tls_error(error, is_server=self._is_server) from error
        return count

    def _check_records(self) -> None:
        """Everything that was fed has been looked at: checks that enough of it was data.

        Raises:
            TlsError: It was not.
        """
        # Nobody gains by records that are read in several pieces.
        self._records_fed = max(self._records_fed, self._data_records)
        idle_count = self._records_fed - self._data_records
        if idle_count > IDLE_RECORDS_MAX + self._data_records // DATA_RECORDS:
            raise TlsError(f"the other side has sent {idle_count} TLS records without data")

    # Writing.

    def write(
        self, buffers: Sequence[Buffer], send: Callable[[Sequence[Buffer]], Sequence[Buffer]]
    ) -> Sequence[Buffer]:
        """Encrypts `buffers`, as much as the socket takes now, and about `WRITE_BYTES_MAX` at most.

        Args:
            buffers: What to send.
            send: Sends encrypted buffers, and gives what the socket did not take of them.

        Returns:
            What is left. The next call must begin with it: some of it may be encrypted already.

        Raises:
            ssl.SSLError: As `encrypt` does.
        """
        sent_bytes = 0
        while buffers:
            ciphertext = self.encrypt(buffers)
            # What is left has been encrypted in part, so that nobody takes it for the end.
            if sent_bytes < WRITE_BYTES_MAX:
                ciphertext = send(ciphertext)
            if ciphertext:
                self._ciphertext = ciphertext
                return buffers
            sent_bytes += self._encrypted_bytes
            buffers = self.note_sent(buffers)
        return buffers

    def encrypt(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """The encrypted form of the first `WRITE_BYTES` of `buffers`; or what is left of that form
        if it was not sent as a whole. Call `note_sent` when all of it is.

        Raises:
            ssl.SSLError: What was read had an error, which has ended the connection.
        """
        if not self._ciphertext:
            self._ciphertext = self._encrypt(buffers)
        return self._ciphertext

    def note_sent(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """What `encrypt` gave was sent; returns what is left of the buffers that it was given."""
        self._ciphertext = ()
        return unsent(buffers, self._encrypted_bytes)

    def _encrypt(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        if len(buffers) > 1:
            buffers = _joined(buffers)
        # OpenSSL's own words, for instance a new key, are on their way before the data.
        ciphertext: list[Buffer] = [self._outgoing.read()] if self._outgoing.pending else []
        length = 0
        for buffer in buffers:
            view = memoryview(buffer)[: WRITE_BYTES - length]
            for start in range(0, len(view), PIECE_BYTES):
                self._object.write(view[start : start + PIECE_BYTES])
                ciphertext.append(self._outgoing.read())
            length += len(view)
            if length >= WRITE_BYTES:
                break
        self._encrypted_bytes = length
        return ciphertext

    @property
    def has_unsent(self) -> bool:
        """Whether something was encrypted that the socket has not taken yet."""
        return bool(self._ciphertext)

    def close_notify(self) -> bytes:
        """Says that nothing more will be sent; gives the bytes that say so."""
        with suppress(ssl.SSLError):  # the other side has not ended: nobody waits for it
            self._object.unwrap()
        return self._outgoing.read()


def _joined(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same bytes, short neighbours joined: each buffer becomes a record of its own or more."""
    joined: list[Buffer] = []
    short: list[Buffer] = []
    length = 0
    for buffer in buffers:
        if length + len(buffer) > _RECORD_BYTES and short:
            joined.append(b"".join(short))
            short, length = [], 0
        if len(buffer) >= _RECORD_BYTES:
            joined.append(buffer)
        else:
            short.append(buffer)
            length += len(buffer)
    if short:
        joined.append(b"".join(short))
    return joined
