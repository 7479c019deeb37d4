"""How publishers share what a bucket has room for."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing

from tests.server.connected_peer import make_server
from upr_server.app import Server
from upr_server.net import credit
from upr_server.net.credit import CREDIT_BYTES_MAX, CREDIT_BYTES_MIN, PublisherCredit

MIB: Final = 1024 * 1024


def publishers_of(server: Server, count: int) -> list[PublisherCredit]:
    return [
        server.connections.new_connection(trio.testing.memory_stream_pair()[0], "").context.credit
        for _ in range(count)
    ]


async def test_a_single_publisher_has_the_largest_credit() -> None:
    await trio.lowlevel.checkpoint()  # connections read Trio's clock: this must run in it
    server = make_server()
    shares = server.connections.resources.credit_shares
    bucket = server.catalog.buckets.create("large", 1, 1024 * MIB)
    publisher, reader = publishers_of(server, 2)
    assert shares.share(bucket, publisher) == CREDIT_BYTES_MIN
    shares.add(bucket, publisher)
    assert shares.share(bucket, publisher) == CREDIT_BYTES_MAX
    assert shares.share(bucket, reader) == CREDIT_BYTES_MIN


async def test_publishers_share_the_rest_of_the_quota_when_the_bucket_is_full() -> None:
    await trio.lowlevel.checkpoint()  # connections read Trio's clock: this must run in it
    server = make_server()
    shares = server.connections.resources.credit_shares
    bucket = server.catalog.buckets.create("small", 1, 100 * MIB)
    room = (bucket.memory_policy.limit_bytes - bucket.memory_policy.full_bytes) // 2
    publishers = publishers_of(server, 1000)
    for count, publisher in enumerate(publishers, 1):
        shares.add(bucket, publisher)
        shares.add(bucket, publisher)
        share = max(CREDIT_BYTES_MIN, min(CREDIT_BYTES_MAX, room // count))
        assert shares.share(bucket, publisher) == shares.share(bucket, publishers[0]) == share
    for publisher in publishers[4:]:
        shares.remove(bucket, publisher)
        shares.remove(bucket, publisher)
    assert shares.share(bucket, publishers[0]) == room // 4
    shares.remove_bucket(bucket)
    assert shares.share(bucket, publishers[0]) == CREDIT_BYTES_MIN


async def test_users_have_equal_shares_however_many_connections_they_have() -> None:
    await trio.lowlevel.checkpoint()  # connections read Trio's clock: this must run in it
    server = make_server()
    shares = server.connections.resources.credit_shares
    bucket = server.catalog.buckets.create("small", 1, 100 * MIB)
    room = (bucket.memory_policy.limit_bytes - bucket.memory_policy.full_bytes) // 2
    publishers = publishers_of(server, 11)
    for publisher, user in zip(publishers, ["bob", *["eve"] * 10], strict=True):
        publisher.user = user
        shares.add(bucket, publisher)
    bobs, *eves = publishers
    assert shares.share(bucket, bobs) == room // 2
    assert {shares.share(bucket, connection_credit) for connection_credit in eves} == {
        room // 2 // 10
    }
    for connection_credit in eves[1:]:
        shares.remove(bucket, connection_credit)
    assert shares.share(bucket, eves[0]) == shares.share(bucket, bobs) == room // 2
    shares.remove(bucket, eves[0])
    assert shares.share(bucket, bobs) == min(CREDIT_BYTES_MAX, room)
    shares.remove(bucket, bobs)
    assert not shares._publishers[bucket]


async def test_publishers_that_were_refused_credit_get_it_some_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await trio.lowlevel.checkpoint()  # connections read Trio's clock: this must run in it
    server, topped_up = make_server(), list[PublisherCredit]()
    shares = server.connections.resources.credit_shares
    bucket = server.catalog.buckets.create("small", 1, 100 * MIB)
    monkeypatch.setattr(credit, "STEP_PUBLISHERS", 3)

    def note(publisher: PublisherCredit) -> None:
        topped_up.append(publisher)

    monkeypatch.setattr(PublisherCredit, "top_up", note)
    publishers = publishers_of(server, 8)
    for publisher in publishers:
        shares.withhold_credit(publisher)
    steps = shares._top_up_refused()
    next(steps)
    assert topped_up == publishers[:3]
    # One is refused again, and one has gone.
    shares.withhold_credit(publishers[0])
    shares.remove(bucket, publishers[-1])
    assert len(list(steps)) == 1
    assert topped_up == publishers[:-1]
    assert not list(shares._top_up_refused())
    assert topped_up == [*publishers[:-1], publishers[0]]
