"""A replica's consumer of a fake server."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager

from tests.kit.fake_net import FakeNet
from upr_protocol.client import (
    ReplicaConsumer,
    consume_as_replica,
)
from upr_protocol.ids import PartitionState

URL = "upr://fake/b"


def as_replica(net: FakeNet) -> AbstractAsyncContextManager[ReplicaConsumer]:
    return consume_as_replica(
        URL,
        state=PartitionState.ACTIVE,
        identity="replica:n",
        retry_timeout_s=60,
        dial=net.dial,
        draw=random.Random(1).random,
    )
