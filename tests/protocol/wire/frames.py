"""Frames of any body, and a reader that takes all of them."""

from __future__ import annotations

from crc32c import crc32c

from upr_kernel import pack_header
from upr_protocol.wire import Header
from upr_protocol.wire.frame import (
    padding,
)


def admit(header: Header) -> None:
    """Everything is welcome."""


def frame_of(body: bytes, opcode: int = 0x0E) -> bytes:
    body += padding(len(body))
    return pack_header(opcode, 0, 0, 0, len(body), crc32c(body)) + body
