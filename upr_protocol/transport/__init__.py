"""Bytes between a session and the system: sockets, Trio streams and memory for frames.

The client's and the server's connections both stand on this. Nothing here knows what a message
means.
"""

from upr_protocol.transport.channel_binding import channel_binding_of_file
from upr_protocol.transport.frame_memory import FrameMemory, new_memory
from upr_protocol.transport.socket_io import (
    SCRATCH_BYTES,
    SocketDial,
    dial_socket,
    first_bytes,
    new_scratch,
    read_available,
    unsent,
    write_available,
)
from upr_protocol.transport.tls_context import (
    FileStamp,
    client_context,
    file_stamp,
    load_authorities,
    load_certificate,
    server_context,
)
from upr_protocol.transport.tls_errors import explained_tls_error
from upr_protocol.transport.tls_link import SERVER_READ_BYTES, NotTlsError, TlsLink, new_tls_scratch
from upr_protocol.transport.tls_socket import TlsSocket
from upr_protocol.transport.trio_stream import (
    Dial,
    TlsStream,
    WorkTurns,
    allow_unsent_bytes,
    dial_tcp,
    encrypted_to_server,
    read_rest,
    read_some,
    write_all,
    write_now,
    write_rest,
)

__all__ = [
    "SCRATCH_BYTES",
    "SERVER_READ_BYTES",
    "Dial",
    "FileStamp",
    "FrameMemory",
    "NotTlsError",
    "SocketDial",
    "TlsLink",
    "TlsSocket",
    "TlsStream",
    "WorkTurns",
    "allow_unsent_bytes",
    "channel_binding_of_file",
    "client_context",
    "dial_socket",
    "dial_tcp",
    "encrypted_to_server",
    "explained_tls_error",
    "file_stamp",
    "first_bytes",
    "load_authorities",
    "load_certificate",
    "new_memory",
    "new_scratch",
    "new_tls_scratch",
    "read_available",
    "read_rest",
    "read_some",
    "server_context",
    "unsent",
    "write_all",
    "write_available",
    "write_now",
    "write_rest",
]
