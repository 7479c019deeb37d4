"""A message leaves nothing to Python's collector, which looks at all of it at once."""

from __future__ import annotations

import gc

import pytest

from tests.kit.reference_cycles import no_collections
from tests.protocol.session.kit import SAMPLES
from upr_protocol.wire import Message


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_a_message_that_is_made_and_read_is_in_no_cycle(kind: type[Message]) -> None:
    message = SAMPLES[kind]
    with no_collections():
        body = b"".join(map(bytes, message.body_buffers()))
        kind.parse(body, message.partition, message.opaque, message.status)
        assert gc.collect() == 0
