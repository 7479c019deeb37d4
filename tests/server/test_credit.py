"""How publishers share what a bucket has room for."""

from __future__ import annotations

from typing import Final

import trio
import trio.testing

from tests.server.test_connection import make_service
from upr_server.net import Connection, Service
from upr_server.net.credit import (
    CREDIT_BYTES_MAX,
    CREDIT_BYTES_MIN,
    CreditShares,
)

MIB: Final = 1024 * 1024


def connections(service: Service, count: int) -> list[Connection]:
    return [
        Connection(service, trio.testing.memory_stream_pair()[0], "memory") for _ in range(count)
    ]


async def test_one_publisher_has_as_much_as_is_of_use() -> None:
    await trio.lowlevel.checkpoint()  # connections read Trio's clock: this must run in it
    service, shares = make_service(), CreditShares()
    bucket = service.buckets.create("large", 1, 1024 * MIB)
    publisher, reader = connections(service, 2)
    assert shares.of(bucket, publisher) == CREDIT_BYTES_MIN
    shares.publishes(bucket, publisher)
    assert shares.of(bucket, publisher) == CREDIT_BYTES_MAX
    assert shares.of(bucket, reader) == CREDIT_BYTES_MIN


async def test_many_share_what_is_left_of_the_quota_when_it_is_full() -> None:
    await trio.lowlevel.checkpoint()  # connections read Trio's clock: this must run in it
    service, shares = make_service(), CreditShares()
    bucket = service.buckets.create("small", 1, 100 * MIB)
    room = (bucket.quota.limit_bytes - bucket.quota.full_bytes) // 2
    publishers = connections(service, 1000)
    for count, publisher in enumerate(publishers, 1):
        shares.publishes(bucket, publisher)
        shares.publishes(bucket, publisher)
        share = max(CREDIT_BYTES_MIN, min(CREDIT_BYTES_MAX, room // count))
        assert shares.of(bucket, publisher) == shares.of(bucket, publishers[0]) == share
    for publisher in publishers[4:]:
        shares.leave(bucket, publisher)
        shares.leave(bucket, publisher)
    assert shares.of(bucket, publishers[0]) == room // 4
    shares.forget(bucket)
    assert shares.of(bucket, publishers[0]) == CREDIT_BYTES_MIN
