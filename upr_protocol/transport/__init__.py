"""Bytes between a session and the system: sockets, Trio streams and memory for frames.

The client's and the server's connections both stand on this. Nothing here knows what a message
means.
"""

from upr_protocol.transport.frame_memory import FrameMemory, new_memory
from upr_protocol.transport.socket_io import (
    SCRATCH_BYTES,
    SocketDial,
    dial_socket,
    new_scratch,
    read_available,
    write_available,
)
from upr_protocol.transport.trio_stream import (
    Dial,
    dial_tcp,
    read_rest,
    read_some,
    write_all,
    write_now,
    write_rest,
)

__all__ = [
    "SCRATCH_BYTES",
    "Dial",
    "FrameMemory",
    "SocketDial",
    "dial_socket",
    "dial_tcp",
    "new_memory",
    "new_scratch",
    "read_available",
    "read_rest",
    "read_some",
    "write_all",
    "write_available",
    "write_now",
    "write_rest",
]
