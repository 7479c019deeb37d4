"""Where what a socket gives is put."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.protocol.session.kit import OPAQUE, PARTITION, Pair, chunk, encoded
from upr_protocol.address import Address
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.session import SessionState
from upr_protocol.transport import SCRATCH_BYTES, dial_socket, new_scratch, read_available
from upr_protocol.wire import PartitionChunk

CHUNKS = 10


@pytest.mark.parametrize("value_bytes", [SCRATCH_BYTES, 120_000, 4 * SCRATCH_BYTES])
def test_next_to_nothing_of_large_bodies_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value_bytes: int
) -> None:
    """Wherever in a frame the first read happened to end."""
    pair = Pair.in_state(SessionState.STREAMING, window_bytes=1 << 24)
    pair.prepare(PartitionChunk)
    value = os.urandom(value_bytes)
    messages = [chunk(PARTITION, OPAQUE, index, index + 1, value) for index in range(CHUNKS)]
    path = tmp_path / "stream"
    path.write_bytes(encoded(*messages))
    session = pair.client
    receive, copied_bytes, received, reads = session.receive, [0], [], 0

    def receive_and_count(data: bytes, now: float, filled: int = 0) -> None:
        copied_bytes.append(len(data))
        receive(data, now, filled)

    monkeypatch.setattr(session, "receive", receive_and_count)
    scratch = new_scratch()
    with path.open("rb") as file:
        while read_available(file.fileno(), session, scratch, 0.0):
            reads += 1
            received += list(session.messages())
    assert received == messages
    assert sum(copied_bytes) <= SCRATCH_BYTES + CHUNKS * SCRATCH_BYTES // 16
    assert reads <= CHUNKS + 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system does not have it")
def test_a_machine_that_acknowledges_nothing_is_given_up() -> None:
    """It may have lost its power. The next request is to find another node then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address.parse(f"upr://127.0.0.1:{listener.getsockname()[1]}")
        with dial_socket(address, 5.0) as connection:
            timeout_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert timeout_ms == SEND_TIMEOUT_S * 1000
