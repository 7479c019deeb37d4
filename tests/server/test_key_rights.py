"""Rights on some keys of a bucket and rights through a role: what they allow, and when they end."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mending import mended_frames
from tests.kit.audit_notes import AuditNotes
from tests.kit.effort import effort
from tests.protocol.grants import GRANTS, KEYS, allows_all, allows_key
from tests.server.connected_peer import P0, Peer, connected, make_server, sets
from tests.server.granted_peer import ADMIN, OWN, USER, access_of, logged_in, revoke, sample
from tests.server.users import USERS, VERIFIER, address_of, server_with_users
from upr_protocol.bucket_event import BucketEvent, BucketFate
from upr_protocol.chunk import Bundle, BundleRun, Chunk, CounterDelta, Mutation
from upr_protocol.client import Address, Credentials, PublishError, publisher
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import PUBLISHED_OPERATIONS, Operation, PartitionState
from upr_protocol.limits import GET_REPLY_KEYS_MAX
from upr_protocol.users import EVERYTHING, Grant, GrantToRole, Right, User, UserRole, Users
from upr_protocol.wire import (
    HEADER_BYTES,
    ChangeUsers,
    Get,
    GetReply,
    Go,
    HelloReply,
    Lease,
    LeaseAction,
    Message,
    Mutate,
    MutateReply,
    PartitionStart,
    Refusal,
    Stream,
    StreamEnd,
    StreamReply,
)
from upr_server.app import Server
from upr_server.net.access import Access

READ_A: Final = Grant(Right.READ, "b", b"a/")
WRITE_A: Final = Grant(Right.WRITE, "b", b"a/")
READ_ALL: Final = Grant(Right.READ, "b")
WRITER: Final = b"a writer's ID..."
INSIDE: Final = (b"a/", b"a/1", b"a/\xff")
OUTSIDE: Final = (b"a", b"a0", b"b/1", b"A/1", b"_design/a/", b"\0", b"\xff")
BUNDLES: Final = st.lists(KEYS, min_size=1, max_size=6)


def refusal_of(access: Access, message: Get | Mutate) -> str:
    """The sentence with which a message is refused; empty if it is allowed."""
    try:
        access.check_message(message)
        if isinstance(message, Get):
            access.check_read_keys(message)
        else:
            access.check_changed_keys(message)
    except ServerError as error:
        if error.status is not Status.NOT_ALLOWED:
            raise
        return error.sentence
    return ""


@given(GRANTS, BUNDLES, st.booleans())
def test_a_get_is_allowed_if_each_of_its_keys_is_allowed(
    grants: tuple[Grant, ...], keys: list[bytes], by_role: bool
) -> None:
    access = access_of(*grants, bucket="ab", by_role=by_role)
    expected = all(allows_key(grants, Right.READ, "ab", key) for key in keys)
    assert (not refusal_of(access, Get(tuple(keys), opaque=1))) == expected


@given(GRANTS, BUNDLES, st.booleans())
def test_a_bundle_is_allowed_if_each_of_its_keys_is_allowed(
    grants: tuple[Grant, ...], keys: list[bytes], by_role: bool
) -> None:
    """Design documents need the right `index`, whatever the other keys are."""
    access = access_of(*grants, bucket="ab", by_role=by_role)
    may_index = allows_all(grants, Right.INDEX, "ab")
    expected = all(
        may_index if key.startswith(b"_design/") else allows_key(grants, Right.WRITE, "ab", key)
        for key in keys
    )
    message = Mutate(Bundle.of_one_run(P0, sets(*keys)), opaque=1)
    assert (not refusal_of(access, message)) == expected


def test_a_refusal_names_the_first_key_that_is_not_allowed() -> None:
    access = access_of(Grant(Right.READ, OWN, b"a/"), Grant(Right.WRITE, OWN, b"a/"))
    get = Get((b"a/1", b"b\n", b"c"), opaque=1)
    assert refusal_of(access, get) == (
        "user bob may not do this: Get needs the right read on key 'b\\n' of bucket own"
    )
    mutate = Mutate(Bundle.of_one_run(P0, sets(b"a/1", b"_design/a")), opaque=1)
    assert "Mutate needs the right index on key '_design/a'" in refusal_of(access, mutate)


def test_the_audit_log_has_no_key_of_a_refused_request() -> None:
    log = AuditNotes()
    access = access_of(Grant(Right.READ, OWN, b"a/"))
    access._audit_log = log
    assert refusal_of(access, Get((b"secret",), opaque=1))
    ((event, fields),) = log.notes
    assert (event, fields["request"], fields["allowed"]) == ("request", "Get", False)
    assert "secret" not in str(fields)


def test_the_audit_log_has_changes_of_roles() -> None:
    change = GrantToRole("editors", (Grant(Right.READ, "orders", b"a/"),))
    message = ChangeUsers(change.to_json(), opaque=1)
    log = AuditNotes()
    for access in (access_of(Grant(Right.SECURE, EVERYTHING), by_role=True), access_of()):
        access._audit_log = log
        with nullcontext() if access.rights_on("").on_all_keys else pytest.raises(ServerError):
            access.check_message(message)
    (_, allowed), (_, refused) = log.notes
    assert (allowed["allowed"], refused["allowed"]) == (True, False)
    assert allowed["detail"] == repr(change)
    assert "b'a/'" in repr(change)
    assert refused["detail"] == "GrantToRole editors"


# With a server.


async def written(peer: Peer, operation: Operation, *keys: bytes) -> bool:
    """Whether these operations were applied. Otherwise they were refused as a whole."""
    value = b"1"
    if operation in (Operation.INCREMENT, Operation.DECREMENT):
        value = CounterDelta(1, 0, True).encode()
    chunk = Chunk.build([Mutation(operation, key, value) for key in keys])
    await peer.send(Mutate(Bundle.of_one_run(P0, chunk), opaque=peer.opaque()))
    answer = await peer.receive(Message)
    while not isinstance(answer, Refusal | MutateReply):
        answer = await peer.receive(Message)
    if isinstance(answer, Refusal):
        assert answer.status == Status.NOT_ALLOWED
    return isinstance(answer, MutateReply)


def high_seq(server: Server) -> int:
    return server.catalog.bucket("b").partitions[0].high_seq


@pytest.mark.parametrize("operation", [Operation(value) for value in PUBLISHED_OPERATIONS])
async def test_the_keys_of_every_operation_are_checked(operation: Operation) -> None:
    async with logged_in(WRITE_A) as (server, peer):
        await peer.open()
        for key in OUTSIDE:
            assert not await written(peer, operation, key)
            assert not await written(peer, operation, INSIDE[0], key, INSIDE[1])
        assert high_seq(server) == 0
        assert await written(peer, Operation.SET, *INSIDE)
        assert await written(peer, operation, *INSIDE)


async def test_the_keys_of_single_sets_that_arrive_together_are_checked() -> None:
    async with logged_in(WRITE_A) as (server, peer):
        await peer.open()
        keys = (b"a/1", b"b", b"a/2", b"_design/a", b"a/3")
        requests = [Mutate(Bundle.of_one_run(P0, sets(key)), opaque=peer.opaque()) for key in keys]
        await peer.send(*requests)
        answers: dict[int, bool] = {}
        while len(answers) < len(requests):
            answer = await peer.receive(Message)
            if isinstance(answer, Refusal | MutateReply):
                answers[answer.opaque] = isinstance(answer, MutateReply)
        assert [answers[request.opaque] for request in requests] == [
            key.startswith(b"a/") for key in keys
        ]
        assert high_seq(server) == 3


async def test_a_user_with_a_right_on_some_keys_reads_only_those() -> None:
    async with logged_in(READ_A, Grant(Right.WRITE, "b"), Grant(Right.INDEX, "b")) as (_, peer):
        await peer.open()
        assert await written(peer, Operation.SET, *INSIDE, *OUTSIDE)
        await peer.send(Get(INSIDE, partition=P0, opaque=peer.opaque()))
        chunk = (await peer.receive(GetReply)).chunk
        assert [chunk.mutation(row).value for row in range(len(INSIDE))] == [b"1"] * len(INSIDE)
        many = tuple(b"a/%d" % number for number in range(GET_REPLY_KEYS_MAX))
        for keys in (*((key,) for key in OUTSIDE), (b"",), (*INSIDE, b"b/1"), (*many, b"b/1")):
            await peer.send(Get(keys, partition=P0, opaque=peer.opaque()))
            assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED
        lease = Lease(LeaseAction.ACQUIRE, 0, 1, "o", (), opaque=peer.opaque())
        await peer.send(lease)
        assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED
        for with_answers in (False, True):
            reply = await peer.ask(with_answers=with_answers)
            assert reply.status == Status.NOT_ALLOWED


@settings(max_examples=effort(30, 500), deadline=None)
@given(
    st.lists(st.sampled_from([*INSIDE, *INSIDE, *OUTSIDE]), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=4),
)
def test_a_damaged_bundle_changes_no_key_that_is_not_allowed(
    keys: list[bytes], damage: list[tuple[int, int]]
) -> None:
    """Whatever the offsets of a bundle are, the server applies the keys that it has checked."""
    stored = trio.run(_stored, keys, damage)
    assert all(key.startswith(b"a/") for key in stored), stored
    if not damage:
        assert stored == (set(keys) if set(keys) <= set(INSIDE) else set())


async def _stored(keys: list[bytes], damage: list[tuple[int, int]]) -> set[bytes]:
    """The keys that the partition has after a bundle of some `SET`s with damaged bytes."""
    async with logged_in(WRITE_A) as (server, peer):
        await peer.open()
        message = Mutate(Bundle.of_one_run(P0, sets(*keys)), opaque=peer.opaque())
        frame = bytearray(b"".join(bytes(piece) for piece in message.frame_buffers()))
        for position, byte in damage:
            frame[HEADER_BYTES + position % (len(frame) - HEADER_BYTES)] = byte
        await peer.stream.send_all(mended_frames(bytes(frame)))
        await trio.testing.wait_all_tasks_blocked()
        return {key for key, *_ in server.catalog.bucket("b").partitions[0].table}


async def test_the_error_of_a_publisher_names_the_key_that_is_not_allowed() -> None:
    users = USERS.with_user(User("eve", VERIFIER, (WRITE_A,)))
    async with server_with_users(users) as server:
        address = address_of(server, Credentials("eve", "pencil"))
        with pytest.raises(PublishError) as caught:
            await publish(address, "a/1", "b/1", "a/2")
        assert "needs the right write on key 'b/1' of bucket b" in str(caught.value)
        for partition in server.catalog.bucket("b").partitions:
            assert b"b/1" not in {key for key, *_ in partition.table}


async def publish(address: Address, *keys: str) -> None:
    async with publisher(address) as sink:
        for key in keys:
            await sink.set(key, "v")


def batch(peer: Peer, counter: int, *keys: bytes, attempt: int = 0, joined: bool = False) -> Mutate:
    """A batch of one writer: increments, or plain `SET`s that may be joined with others."""
    value = b"v" if joined else CounterDelta(1, 0, True).encode()
    operation = Operation.SET if joined else Operation.INCREMENT
    chunk = Chunk.build([Mutation(operation, key, value) for key in keys])
    bundle = Bundle(chunk, (BundleRun(P0, len(keys), counter, 0),))
    return Mutate(bundle, WRITER, attempt=attempt, opaque=peer.opaque())


async def result_of(peer: Peer, request: Mutate) -> MutateReply:
    await peer.send(request)
    return await peer.receive(MutateReply)


@pytest.mark.parametrize("joined", [False, True])
async def test_a_user_cannot_use_the_writer_id_of_another_user(joined: bool) -> None:
    """A writer's ID may be known: that of a named write in Spark is a hash of the name. A client
    that could use it would receive answers to others, and the server would take their batches for
    repeated ones."""
    rights = (Grant(Right.WRITE, "b"), Grant(Right.INDEX, "b"))
    server = make_server()
    async with connected(server) as peer, connected(server) as second_peer:
        for one_peer in (peer, second_peer):
            await one_peer.send()
            one_peer.received.append(await one_peer.receive(HelloReply))
        users = (ADMIN, User("bob", None, rights), User("eve", None, (WRITE_A,)))
        for connection, user in zip(server.connections.connections, users[1:], strict=True):
            connection.context.access.user_name = user.name
        server.users.users = Users(1, {user.name: user for user in users})
        await peer.open()
        await second_peer.open()
        first = await result_of(peer, batch(peer, 1, b"k1", b"k2", joined=joined))
        assert (first.runs[0].first_seq, first.runs[0].last_seq) == (1, 2)
        # Eve receives no answer to bob, and has an order of her own.
        for counter, expected in ((1, 3), (2, 4), (3, 5)):
            answer = await result_of(second_peer, batch(second_peer, counter, b"a/1", attempt=7))
            assert answer.runs[0].status == Status.OK
            assert answer.runs[0].first_seq == expected
            assert answer.counters == ((0, counter - 1),)
        # Bob's batches are still recognised, and new ones are applied.
        again = await result_of(peer, batch(peer, 1, b"k1", b"k2", joined=joined))
        assert (again.runs, again.counters) == (first.runs, first.counters)
        second = await result_of(peer, batch(peer, 2, b"k1", joined=joined))
        assert second.runs[0].first_seq == 6


async def test_runs_of_a_task_behind_a_run_that_is_not_allowed_are_not_applied() -> None:
    """The next attempt of the task may have the right. Otherwise it would take the refused run for
    one that was applied and forgotten."""
    async with logged_in(WRITE_A) as (server, peer):
        await peer.open()
        statuses = []
        # A client sends the last two again, because they were refused for a temporary reason.
        keys = {1: b"a/1", 2: b"b/1", 3: b"a/1", 4: b"a/1"}
        for counter, key in [*keys.items(), (3, b"a/1"), (4, b"a/1")]:
            await peer.send(batch(peer, counter, key, attempt=1, joined=True))
            answer = await peer.receive(Message)
            while not isinstance(answer, Refusal | MutateReply):
                answer = await peer.receive(Message)
            statuses.append(answer.status)
        refused = Status.TEMPORARY_FAILURE
        assert statuses == [Status.OK, Status.NOT_ALLOWED, *[refused] * 4]
        assert high_seq(server) == 1
        for counter in (1, 2, 3, 4):
            request = batch(peer, counter, b"a/1", attempt=2, joined=True)
            assert (await result_of(peer, request)).runs[0].status == Status.OK
        assert high_seq(server) == 4


async def test_single_sets_and_bundles_with_the_same_id_have_the_same_writer() -> None:
    rights = (Grant(Right.WRITE, "b"), Grant(Right.INDEX, "b"))
    async with logged_in(*rights) as (server, peer):
        await peer.open()
        await peer.send(*(batch(peer, counter, b"k", joined=True) for counter in (1, 2, 3)))
        answers = [await peer.receive(MutateReply) for _ in range(3)]
        # The same batch again, in a frame that is not joined with others.
        for counter, answer in ((3, answers[2]), (3, answers[2])):
            again = await result_of(peer, batch(peer, counter, b"k", b"k", joined=True))
            assert again.runs == answer.runs
        assert high_seq(server) == 3


async def test_a_revoked_right_on_some_keys_ends_at_once() -> None:
    async with logged_in(READ_A, WRITE_A) as (server, peer):
        await peer.open()
        assert await written(peer, Operation.SET, b"a/1")
        await revoke(server, WRITE_A)
        assert not await written(peer, Operation.SET, b"a/1")
        await peer.send(Get((b"a/1",), partition=P0, opaque=peer.opaque()))
        await peer.receive(GetReply)
        await revoke(server, READ_A)
        await peer.send(Get((b"a/1",), partition=P0, opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED


async def streaming(peer: Peer) -> None:
    await peer.open()
    await peer.mutate(sets(b"k"))
    assert not (await peer.ask()).status
    await peer.send(Go())
    await peer.receive(PartitionStart)


async def check_stream_ends(peer: Peer) -> None:
    """Checks that the stream ends within a second, with the reason."""
    began = trio.current_time()
    assert (await peer.receive(StreamEnd)).status == Status.RIGHT_REVOKED
    assert trio.current_time() - began < 1


async def test_a_stream_ends_when_its_user_may_read_only_some_keys(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with logged_in(READ_ALL, Grant(Right.WRITE, "b")) as (server, peer):
        await streaming(peer)
        await server.users.apply_change(lambda users: users.granting(USER, (READ_A,)))
        await revoke(server, READ_ALL)
        await check_stream_ends(peer)


async def test_a_stream_that_waits_for_a_change_needs_its_right_then() -> None:
    """While the partition changes its state, the request waits."""
    async with logged_in(READ_ALL) as (server, peer):
        await peer.open()
        (partition,) = server.catalog.bucket("b").partitions
        partition.begins_no_stream = True
        request = Stream(PartitionState.ACTIVE, NOTHING_YET, partition=P0, opaque=peer.opaque())
        await peer.send(request)
        await trio.testing.wait_all_tasks_blocked()
        await revoke(server, READ_ALL)
        partition.begins_no_stream = False
        server.streams_may_begin()
        assert (await peer.receive(StreamReply)).status == Status.NOT_ALLOWED


@pytest.mark.parametrize("how", ["revoke", "withdraw", "remove"])
async def test_revoking_a_right_from_a_role_ends_the_streams_of_its_users(
    autojump_clock: trio.testing.MockClock, how: str
) -> None:
    grants = (READ_ALL, Grant(Right.WRITE, "b"))
    async with logged_in() as (server, peer):
        await server.users.apply_change(lambda users: users.with_role(UserRole("editors", grants)))
        await server.users.apply_change(lambda users: users.assigning(USER, ("editors",)))
        await streaming(peer)
        # The stream goes on while another role has the right.
        await server.users.apply_change(lambda users: users.with_role(UserRole("others", grants)))
        await server.users.apply_change(lambda users: users.assigning(USER, ("others",)))
        await server.users.apply_change(lambda users: users.without_role("others"))
        assert not (await peer.mutate(sets(b"k2"))).status
        assert not any(isinstance(message, StreamEnd) for message in peer.received)
        if how == "revoke":
            await server.users.apply_change(
                lambda users: users.revoking_from_role("editors", grants[:1])
            )
        elif how == "withdraw":
            await server.users.apply_change(lambda users: users.withdrawing(USER, ("editors",)))
        else:
            await server.users.apply_change(lambda users: users.without_role("editors"))
        await check_stream_ends(peer)
        assert await written(peer, Operation.SET, b"k3") == (how == "revoke")


async def test_a_right_that_is_granted_to_a_role_counts_at_once() -> None:
    async with logged_in(READ_A) as (server, peer):
        await server.users.apply_change(lambda users: users.with_role(UserRole("editors")))
        await server.users.apply_change(lambda users: users.assigning(USER, ("editors",)))
        await peer.open()
        assert not await written(peer, Operation.SET, b"a/1")
        await server.users.apply_change(lambda users: users.granting_to_role("editors", (WRITE_A,)))
        assert await written(peer, Operation.SET, b"a/1")
        assert not await written(peer, Operation.SET, b"b")


def test_events_name_no_design_document_to_a_user_with_rights_on_some_keys() -> None:
    """The name of a design document is a key. A user with a right on the whole bucket sees it."""
    event = BucketEvent(OWN, 1, BucketFate.NONE, 3, (b"_design/a",))
    some_keys = access_of(Grant(Right.READ, OWN, b"a/"))
    assert some_keys.visible_part(event) == BucketEvent(OWN, 1, BucketFate.NONE, 3)
    assert some_keys.visible_part(BucketEvent(OWN, 1, BucketFate.NONE, 0, (b"_design/a",))) is None
    assert access_of(Grant(Right.WRITE, EVERYTHING)).visible_part(event) == event
    assert access_of(Grant(Right.READ, "other", b"a/")).visible_part(event) is None


def test_a_user_with_rights_on_some_keys_may_ask_for_events() -> None:
    message = sample("NextEvents", OWN)
    access_of(Grant(Right.READ, OWN, b"a/")).check_uses_any(message)
    access_of(Grant(Right.READ, OWN, b"a/"), by_role=True).check_uses_any(message)
    with pytest.raises(ServerError):
        access_of(by_role=True).check_uses_any(message)
