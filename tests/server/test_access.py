"""Which right each message needs, and how the server refuses a user who does not have it."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing

from tests.engine.helpers import put
from tests.kit.audit_notes import AuditNotes
from tests.server.connected_peer import P0, connected, make_server, sets
from tests.server.granted_peer import (
    ADMIN,
    OTHER,
    OWN,
    USER,
    access_of,
    logged_in,
    revoke,
    sample,
)
from upr_protocol.bucket_event import BucketEvent
from upr_protocol.chunk import Bundle
from upr_protocol.client import Address, Credentials, LookAtEverything, Security, follow_events
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.partition_map import PartitionMap
from upr_protocol.scram import new_verifier
from upr_protocol.users import (
    EVERYTHING,
    SERVER,
    AddUser,
    Grant,
    GrantRights,
    RemoveUser,
    RevokeRights,
    Right,
    User,
    UserListing,
    Users,
    Verifier,
)
from upr_protocol.wire import (
    MESSAGES,
    BucketDone,
    ChangeUsers,
    CreateBucket,
    Credit,
    DeleteBucket,
    Error,
    Get,
    GetMap,
    GetReply,
    GetUsers,
    Go,
    HelloReply,
    Join,
    Lease,
    LeaseAction,
    ListBuckets,
    ListBucketsReply,
    ListUsers,
    Message,
    Mutate,
    MutateReply,
    NextEvents,
    Open,
    PartitionStart,
    Refusal,
    ReplicaAck,
    Role,
    SetMap,
    Stats,
    Stream,
    StreamEnd,
    StreamReply,
    UsersReply,
)
from upr_server.app import running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.net import server as net_server
from upr_server.net.access import NEEDED, Access
from upr_server.net.credit import CREDIT_BYTES_MIN
from upr_server.net.streamer import STEP_STREAMS
from upr_server.runtime import AuditLog
from upr_server.storage.simulated import SimulatedStore
from upr_server.user_store import UserStore

# Every message that a client may send, and the rights for it, written by hand. One of the rights is
# enough. A test fails if a message has no line.
TABLE: Final = """
    Hello                anybody
    StartLogIn                anybody
    ContinueLogIn        anybody
    Noop                 anybody
    Close                anybody
    Error                anybody
    Go                   anybody
    Ack                  anybody
    Barrier              anybody
    CloseStream          anybody
    ListBuckets          anybody
    NextEvents           anybody
    Open                 read write replicate index operate
    GetMap               read write replicate index operate
    Seqnos               read write replicate index operate
    SeqnosAt             read write replicate index operate
    Await                read write replicate index operate
    Stream               read
    Stream/with_answers  replicate
    ReplicaAck           replicate
    Get                  read
    Lease                read
    Mutate               write index
    CreateBucket         operate
    DeleteBucket         operate
    Stats                operate
    SetMap               operate
    Join                 operate
    ListUsers            secure
    ChangeUsers          secure
    GetUsers             replicate
"""

# The messages for which a right on some of the bucket's keys is enough.
TABLE_OF_SOME_KEYS: Final = """
    Open      read write
    GetMap    read write
    Seqnos    read write
    SeqnosAt  read write
    Await     read write
    Get       read
    Mutate    write
"""
OF_CLUSTER: Final = ("ListUsers", "ChangeUsers", "GetUsers")
ANYBODY: Final = "anybody"


def of_lines(table: str) -> dict[str, frozenset[str]]:
    lines = (line.split() for line in table.split("\n") if line.strip())
    return {name: frozenset(rights) for name, *rights in lines}


ALLOWED: Final = of_lines(TABLE)
OF_SOME_KEYS: Final = of_lines(TABLE_OF_SOME_KEYS)


def is_allowed(access: Access, message: Message) -> bool:
    try:
        access.check_message(message)
    except ServerError as error:
        return error.status is not Status.NOT_ALLOWED
    return True


def test_every_message_of_a_client_has_a_line() -> None:
    kinds = {kind for kind in MESSAGES.values() if kind.sender & Role.CLIENT}
    assert {name.partition("/")[0] for name in ALLOWED} == {kind.__name__ for kind in kinds}
    assert set(NEEDED) == kinds


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("right", Right)
@pytest.mark.parametrize("by_role", [False, True], ids=["own", "role"])
def test_a_message_needs_one_of_its_rights_on_its_bucket(
    name: str, right: Right, by_role: bool
) -> None:
    needed = ALLOWED[name]
    expected = ANYBODY in needed or right.value in needed
    message = sample(name, OWN)
    # Messages about the whole cluster need the right on everything.
    for pattern in (EVERYTHING,) if name in OF_CLUSTER else (OWN, EVERYTHING, "o*"):
        access = access_of(Grant(right, pattern), by_role=by_role)
        assert is_allowed(access, message) == expected
    # A right on another bucket allows nothing in this one.
    access = access_of(Grant(right, OTHER), by_role=by_role)
    assert is_allowed(access, message) == (ANYBODY in needed)


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("right", [Right.READ, Right.WRITE])
def test_a_right_on_some_keys_is_enough_for_some_messages(name: str, right: Right) -> None:
    """The server also checks the keys of `Get` and `Mutate`: see test_key_rights.py."""
    kind = name.partition("/")[0]
    expected = ANYBODY in ALLOWED[name] or right.value in OF_SOME_KEYS.get(kind, ())
    message = sample(name, OWN)
    for pattern in (OWN, EVERYTHING, "o*"):
        assert is_allowed(access_of(Grant(right, pattern, b"k")), message) == expected
    access = access_of(Grant(right, OTHER, b"k"))
    assert is_allowed(access, message) == (ANYBODY in ALLOWED[name])


def test_the_messages_whose_keys_the_server_checks_are_get_and_mutate() -> None:
    """The other messages for which a right on some keys is enough have no keys."""
    kinds = {kind for kind in MESSAGES.values() if kind.sender & Role.CLIENT}
    of_keys = {
        kind.__name__
        for kind in kinds
        if not {"key", "keys", "chunk", "bundle"}.isdisjoint(kind.__struct_fields__)
    }
    assert of_keys == {"Get", "Mutate"} <= OF_SOME_KEYS.keys()


@pytest.mark.parametrize("name", ALLOWED)
def test_a_user_without_a_grant_may_not_send_a_message_that_needs_a_right(name: str) -> None:
    message = sample(name, OWN)
    is_free = ANYBODY in ALLOWED[name]
    assert is_allowed(access_of(), message) == is_free
    stranger = access_of(*(Grant(right, EVERYTHING) for right in Right))
    stranger.user_name = None
    stranger.set_bucket(OWN)
    assert is_allowed(stranger, message) == is_free
    removed = access_of(*(Grant(right, EVERYTHING) for right in Right))
    removed.user_name = "eve"
    removed.set_bucket(OWN)
    assert is_allowed(removed, message) == is_free


@pytest.mark.parametrize(
    "name", ["Open", "GetMap", "CreateBucket", "DeleteBucket", "Stats", "Join", "SetMap"]
)
def test_a_message_about_another_bucket_needs_the_right_on_that_bucket(name: str) -> None:
    for right in Right:
        access = access_of(Grant(right, OWN))
        assert not is_allowed(access, sample(name, OTHER))


@pytest.mark.parametrize("name", OF_CLUSTER)
def test_a_message_about_users_needs_a_right_on_everything(name: str) -> None:
    assert not is_allowed(access_of(*(Grant(right, "o*") for right in Right)), sample(name, OWN))


def test_statistics_of_the_server_need_the_right_to_operate_everything() -> None:
    assert not is_allowed(access_of(Grant(Right.OPERATE, OWN)), Stats(SERVER, opaque=1))
    assert is_allowed(access_of(Grant(Right.OPERATE, EVERYTHING)), Stats(SERVER, opaque=1))


def test_every_logged_in_user_may_ask_for_the_name_of_the_node() -> None:
    assert is_allowed(access_of(), GetMap("", opaque=1))


@pytest.mark.parametrize("name", ["bucket", r"b\u0075cket"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_map_that_names_two_buckets_needs_the_right_on_the_last_one(
    name: str, is_first: bool
) -> None:
    document = PartitionMap.of_one_node(OWN, 1, "node", "host:1").encode()
    other_entry = f'"{name}":"{OTHER}"'
    document = f"{{{other_entry},{document[1:]}" if is_first else f"{document[:-1]},{other_entry}}}"
    bucket = PartitionMap.decode(document).bucket
    assert bucket == (OWN if is_first else OTHER)
    operator = access_of(Grant(Right.OPERATE, OWN))
    assert is_allowed(operator, SetMap(0, document, opaque=1)) == is_first


def test_an_invalid_map_is_refused_before_anything_is_looked_up() -> None:
    with pytest.raises(ServerError) as refusal:
        access_of().check_message(SetMap(0, "{}", opaque=1))
    assert refusal.value.status is Status.BAD_ARGUMENT


def test_without_users_every_message_is_allowed() -> None:
    access = Access(UserStore(SimulatedStore()))
    access.set_bucket(OWN)
    for name in ALLOWED:
        assert is_allowed(access, sample(name, OTHER))
    assert not access.is_lost


def test_a_refusal_names_the_missing_right() -> None:
    with pytest.raises(ServerError) as refusal:
        access_of().check_message(sample("Get", OWN))
    assert str(refusal.value) == (
        "user bob may not do this: Get needs the right read on bucket own: log in as a user "
        "who may, or have the right granted: upr user grant USER RIGHT BUCKET"
    )


def test_a_refusal_says_that_a_right_on_some_keys_is_not_enough() -> None:
    with pytest.raises(ServerError, match="Stream needs the right read on the whole bucket own"):
        access_of(Grant(Right.READ, OWN, b"k")).check_message(sample("Stream", OWN))


# With a server.


def reading() -> Grant:
    return Grant(Right.READ, "b")


def writing() -> Grant:
    return Grant(Right.WRITE, "b")


async def test_a_user_with_the_right_to_read_may_not_write() -> None:
    async with logged_in(reading()) as (_, peer):
        await peer.open()
        # One request alone, and then several that the server handles together.
        for count in (1, 3):
            requests = [
                Mutate(Bundle.of_one_run(P0, sets(b"k%d" % number)), opaque=peer.opaque())
                for number in range(count)
            ]
            await peer.send(*requests)
            for request in requests:
                refusal = await peer.receive(Refusal)
                assert (refusal.status, refusal.opaque) == (Status.NOT_ALLOWED, request.opaque)
        await peer.send(Get((b"k0",), partition=P0, opaque=peer.opaque()))
        assert (await peer.receive(GetReply)).chunk.mutation(0).seq == 0


async def test_a_user_who_may_not_write_is_refused_at_each_attempt() -> None:
    """A refused request has used credit, which the server grants again. Otherwise the client would
    wait for credit as if the bucket were full, also after it gets the right."""
    async with logged_in(reading()) as (server, peer):
        await peer.open()
        (connection,) = server.connections.connections
        for _ in range(3):
            bundle = Bundle.of_one_run(P0, sets(b"k", value=bytes(CREDIT_BYTES_MIN)))
            await peer.send(Mutate(bundle, opaque=peer.opaque()))
            assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED
            await peer.receive(Credit)
            assert peer.session.credit.remaining_bytes == CREDIT_BYTES_MIN
        # The connection takes no part of the credit that writers share.
        bucket = server.catalog.bucket("b")
        shares = server.connections.resources.credit_shares
        assert shares.share(bucket, connection.context.credit) == CREDIT_BYTES_MIN
        await server.users.apply_change(lambda users: users.granting(USER, (writing(),)))
        assert not (await peer.mutate(sets(b"k"))).status


@pytest.mark.parametrize(
    ("rights", "keys", "is_allowed"),
    [
        (("write",), (b"a", b"b"), True),
        (("write",), (b"a", b"_design/b"), False),
        # The bytes of the prefix are in the column of keys, but no key begins with them.
        (("write",), (b"_des", b"ign/b"), True),
        (("write",), (b"a_design/b",), True),
        (("index",), (b"_design/a", b"_design/b"), True),
        (("index",), (b"_design/a", b"b"), False),
        (("index",), (b"b",), False),
        (("write", "index"), (b"_design/a", b"b"), True),
        (("read",), (b"a",), False),
    ],
)
async def test_a_write_of_design_documents_needs_the_right_index(
    rights: tuple[str, ...], keys: tuple[bytes, ...], is_allowed: bool
) -> None:
    async with logged_in(*(Grant(Right(right), "b") for right in rights)) as (server, peer):
        await peer.open()
        bundle = Bundle.of_one_run(P0, sets(*keys))
        await peer.send(Mutate(bundle, opaque=peer.opaque()))
        if is_allowed:
            assert not (await peer.receive(MutateReply)).failures
        else:
            assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED
        assert server.catalog.bucket("b").partitions[0].high_seq == len(keys) * is_allowed


async def test_a_user_with_the_right_to_write_may_not_read() -> None:
    async with logged_in(writing()) as (_, peer):
        await peer.open()
        assert not (await peer.mutate(sets(b"k"))).status
        for request in (
            Get((b"k",), partition=P0, opaque=peer.opaque()),
            Lease(LeaseAction.ACQUIRE, 0, 1, "o", (), opaque=peer.opaque()),
        ):
            await peer.send(request)
            assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED
        assert (await peer.ask()).status == Status.NOT_ALLOWED
        assert (await peer.ask(with_answers=True)).status == Status.NOT_ALLOWED


async def test_a_refusal_does_not_say_whether_the_bucket_exists() -> None:
    async with logged_in(Grant(Right.READ, "c")) as (_, peer):
        await peer.send()
        await peer.receive(HelloReply)
        sentences = set()
        for name in ("b", "d"):
            await peer.send(Open(name, opaque=peer.opaque()))
            refusal = await peer.receive(Refusal)
            assert refusal.status == Status.NOT_ALLOWED
            sentences.add(refusal.sentence.replace(f"bucket {name}", "bucket X"))
        assert len(sentences) == 1
        await peer.send(ListBuckets(opaque=peer.opaque()))
        assert not (await peer.receive(ListBucketsReply)).buckets


async def test_the_server_ignores_replica_reports_of_a_user_without_the_right() -> None:
    async with logged_in(reading(), writing()) as (server, peer):
        await peer.open()
        await peer.mutate(sets(b"k"))
        await peer.send(ReplicaAck(((P0, HistoryId(1), SeqNo(1), SeqNo(1)),)))
        # The report has no answer. The next request is answered as usual.
        await peer.send(Get((b"k",), partition=P0, opaque=peer.opaque()))
        await peer.receive(GetReply)
        partition = server.catalog.bucket("b").partitions[0]
        assert not len(partition.replicas)


async def test_revoking_the_right_to_read_ends_the_users_streams(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with logged_in(reading(), writing()) as (server, peer):
        await peer.open()
        await peer.mutate(sets(b"k"))
        assert not (await peer.ask()).status
        await peer.send(Go())
        await peer.receive(PartitionStart)
        began = trio.current_time()
        await revoke(server, reading())
        assert (await peer.receive(StreamEnd)).status == Status.RIGHT_REVOKED
        assert trio.current_time() - began < 1
        # The connection goes on with its other right.
        assert not (await peer.mutate(sets(b"k2"))).status
        await revoke(server, writing())
        await peer.send(Mutate(Bundle.of_one_run(P0, sets(b"k3")), opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED


async def test_revoking_the_right_to_read_ends_many_streams_in_steps() -> None:
    """Requests that need the right are refused from the first step on."""
    on_wide = Grant(Right.READ, "wide")
    async with logged_in(on_wide) as (server, peer):
        await server.catalog.create_bucket("wide", 3 * STEP_STREAMS, 8 * 1024 * 1024)
        await peer.open("wide")
        for number in range(3 * STEP_STREAMS):
            partition, opaque = PartitionId(number), peer.opaque()
            state = PartitionState.ACTIVE
            await peer.send(Stream(state, NOTHING_YET, partition=partition, opaque=opaque))
            await peer.receive(StreamReply)
        (connection,) = server.connections.connections
        server.users.users = server.users.users.revoking(USER, (on_wide,))
        steps = server.connections._apply_rights()
        next(steps)
        assert len(connection.session.streams) == 2 * STEP_STREAMS
        await peer.send(Get((b"k",), partition=P0, opaque=peer.opaque()))
        while not isinstance(answer := await peer.receive(Message), Refusal):
            assert isinstance(answer, StreamEnd)
        assert answer.status == Status.NOT_ALLOWED
        assert [len(connection.session.streams) for _ in steps] == [STEP_STREAMS, 0]
        assert not list(server.connections._apply_rights()), "nothing changed since"


async def test_the_rights_of_many_connections_are_checked_in_slices_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The streams of a connection end when its turn comes. Its requests are refused before that."""
    monkeypatch.setattr(net_server, "SLICE_S", -1.0)
    server = make_server()
    async with connected(server) as first_peer, connected(server) as peer:
        # Before there are users, nobody has to log in.
        for reader in (first_peer, peer):
            await reader.open()
            assert not (await reader.ask()).status
        first, second = server.connections.connections
        for connection in (first, second):
            connection.context.access.user_name = USER
        bob = User(USER, None, (reading(),))
        await server.users.apply_change(lambda users: users.with_user(ADMIN).with_user(bob))
        server.users.users = server.users.users.revoking(USER, (reading(),))
        steps = server.connections._apply_rights()
        # A slice of time may end before the first connection.
        next(steps)
        next(steps)
        assert (len(first.session.streams), len(second.session.streams)) == (0, 1)
        await peer.send(Get((b"k",), partition=P0, opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED
        assert len(second.session.streams) == 1
        assert not list(steps)
        assert not second.session.streams
        assert (await peer.receive(StreamEnd)).status == Status.RIGHT_REVOKED


async def test_a_waiting_request_needs_its_right_when_its_turn_comes() -> None:
    operating, notes = Grant(Right.OPERATE, EVERYTHING), AuditNotes()
    async with logged_in(operating) as (server, peer):
        (connection,) = server.connections.connections
        connection.context.access._audit_log = notes
        await peer.send()
        await peer.receive(HelloReply)
        async with server.catalog._lock:
            for name in ("c", "d"):
                await peer.send(CreateBucket(name, 1, opaque=peer.opaque()))
            await trio.testing.wait_all_tasks_blocked()
            await revoke(server, operating)
        # The first request had begun. The second one had not.
        await peer.receive(BucketDone)
        assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED
        assert [bucket.name for bucket in server.catalog.buckets] == ["b", "c"]
    noted = [(fields["bucket"], fields["allowed"]) for _, fields in notes.notes]
    assert noted == [("c", True), ("d", True), ("d", False)]


async def test_a_waiting_request_is_logged_once_if_its_right_stays() -> None:
    operating, notes = Grant(Right.OPERATE, EVERYTHING), AuditNotes()
    async with logged_in(operating) as (server, peer):
        (connection,) = server.connections.connections
        connection.context.access._audit_log = notes
        await peer.send()
        await peer.receive(HelloReply)
        async with server.catalog._lock:
            for name in ("c", "d"):
                await peer.send(CreateBucket(name, 1, opaque=peer.opaque()))
            await trio.testing.wait_all_tasks_blocked()
            await server.users.apply_change(lambda users: users.granting(USER, (reading(),)))
        for _ in range(2):
            await peer.receive(BucketDone)
    assert [fields["bucket"] for _, fields in notes.notes] == ["c", "d"]


async def test_revoking_another_right_does_not_end_streams() -> None:
    async with logged_in(reading(), writing()) as (server, peer):
        await peer.open()
        assert not (await peer.ask()).status
        await peer.send(Go())
        await revoke(server, writing())
        (connection,) = server.connections.connections
        assert list(connection.session.streams) == [P0]
        await peer.send(Get((b"k",), partition=P0, opaque=peer.opaque()))
        await peer.receive(GetReply)
        assert not any(isinstance(message, StreamEnd) for message in peer.received)


async def test_a_right_that_is_granted_counts_at_once() -> None:
    async with logged_in(reading()) as (server, peer):
        await peer.open()
        await server.users.apply_change(lambda users: users.granting(USER, (writing(),)))
        assert not (await peer.mutate(sets(b"k"))).status


async def test_the_connections_of_a_removed_user_end() -> None:
    async with logged_in(reading()) as (server, peer):
        await peer.open()
        await server.users.apply_change(lambda users: users.without_user(USER))
        error = await peer.receive(Error)
        assert error.status == Status.NOT_ALLOWED
        assert await peer.wait_for_end()


async def test_a_change_of_the_password_does_not_end_connections() -> None:
    async with logged_in(reading()) as (server, peer):
        await peer.open()
        await server.users.apply_change(lambda users: users.with_verifier(USER, None))
        await peer.send(Get((b"k",), partition=P0, opaque=peer.opaque()))
        await peer.receive(GetReply)


# The requests about users.


async def test_a_user_with_the_right_secure_changes_and_lists_users() -> None:
    async with logged_in(Grant(Right.SECURE, EVERYTHING)) as (server, peer):
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(ChangeUsers(AddUser("eve").to_json(), opaque=peer.opaque()))
        reply = await peer.receive(UsersReply)
        assert (reply.revision, reply.document) == (3, "")
        assert server.users.users.get("eve") is not None
        await peer.send(ListUsers(opaque=peer.opaque()))
        listing = UserListing.from_json((await peer.receive(UsersReply)).document)
        assert listing == server.users.users.listing()
        for change, sentence in (
            ("{}", "not a change of users"),
            (AddUser("eve").to_json(), "there is a user eve already"),
            (RemoveUser("joe").to_json(), "there is no user joe"),
        ):
            await peer.send(ChangeUsers(change, opaque=peer.opaque()))
            refusal = await peer.receive(Refusal)
            assert refusal.status == Status.BAD_ARGUMENT
            assert sentence in refusal.sentence
        assert server.users.users.revision == 3


async def test_a_user_may_revoke_its_own_right_to_change_users() -> None:
    grant = Grant(Right.SECURE, EVERYTHING)
    async with logged_in(grant) as (_, peer):
        await peer.send()
        await peer.receive(HelloReply)
        await peer.send(ChangeUsers(RevokeRights(USER, (grant,)).to_json(), opaque=peer.opaque()))
        await peer.receive(UsersReply)
        await peer.send(ListUsers(opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.NOT_ALLOWED


async def test_the_first_user_cannot_be_added_over_the_network() -> None:
    async with connected(make_server()) as peer:
        await peer.send()
        await peer.receive(HelloReply)
        change = AddUser(USER, None, (Grant(Right.SECURE, EVERYTHING),))
        await peer.send(ChangeUsers(change.to_json(), opaque=peer.opaque()))
        refusal = await peer.receive(Refusal)
        assert refusal.status == Status.BAD_ARGUMENT
        assert "upr-server init" in refusal.sentence


async def test_a_node_receives_the_users_that_it_does_not_have() -> None:
    """The audit log has an entry for each answer with users, as it contains their verifiers."""
    log = AuditNotes()
    async with logged_in(Grant(Right.REPLICATE, EVERYTHING)) as (server, peer):
        (connection,) = server.connections.connections
        connection.context.access._audit_log = log
        await peer.send()
        await peer.receive(HelloReply)
        users = server.users.users
        for revision, digest in ((0, b""), (users.revision, bytes(32)), (1, users.digest)):
            await peer.send(GetUsers(revision, digest, opaque=peer.opaque()))
            assert Users.from_json((await peer.receive(UsersReply)).document) == users
        await peer.send(GetUsers(users.revision, users.digest, opaque=peer.opaque()))
        reply = await peer.receive(UsersReply)
        assert (reply.revision, reply.document) == (users.revision, "")
    note = {"request": "GetUsers", "user": USER, "peer": "memory", "bucket": "", "detail": ""}
    assert log.notes == [("request", {**note, "allowed": True})] * 3


# The audit log.


async def test_the_audit_log_has_users_their_requests_and_no_secrets(tmp_path: Path) -> None:
    audit_log = AuditLog(tmp_path / "audit.jsonl", lambda: 0.0)
    grants = (Grant(Right.OPERATE, "c"), Grant(Right.SECURE, EVERYTHING))
    async with logged_in(*grants) as (server, peer):
        (connection,) = server.connections.connections
        connection.context.access._audit_log = audit_log
        audit_log.start()
        await peer.send()
        await peer.receive(HelloReply)
        verifier = Verifier(b"the salt is here", 4096, b"k" * 32, b"v" * 32)
        change = AddUser("eve", verifier)
        await peer.send(
            CreateBucket("c", 1, opaque=peer.opaque()),
            DeleteBucket("b", opaque=peer.opaque()),
            ListBuckets(opaque=peer.opaque()),
            ChangeUsers(change.to_json(), opaque=peer.opaque()),
        )
        await peer.receive(UsersReply)
        audit_log.stop()
    text = (tmp_path / "audit.jsonl").read_text()
    audit_lines = [
        (line["user"], line["peer"], line["request"], line["bucket"], line["allowed"])
        for line in map(json.loads, text.splitlines())
        if line["event"] == "request"
    ]
    assert audit_lines == [
        (USER, "memory", "CreateBucket", "c", True),
        (USER, "memory", "DeleteBucket", "b", False),
        (USER, "memory", "ChangeUsers", "", True),
    ]
    assert "AddUser(name='eve'" in text
    for secret in ("the salt is here", "kkkk", "vvvv"):
        assert secret not in text


def test_the_audit_log_has_only_a_short_text_of_a_refused_request() -> None:
    """Otherwise a user without rights could fill the disk, and keep later entries out."""
    log = AuditNotes()
    grants = tuple(Grant(Right.READ, f"bucket-{number}" * 5) for number in range(40))
    change = GrantRights("eve", grants).to_json()
    for access in (access_of(), access_of(Grant(Right.SECURE, EVERYTHING))):
        access._audit_log = log
        for message in (
            ChangeUsers(change, opaque=1),
            ChangeUsers("x" * 10_000, opaque=1),
            Join("b" * 10_000, "c" * 10_000, opaque=1),
        ):
            is_allowed(access, message)
        access.note_log_in("u" * 1_000, "SCRAM", is_allowed=False)
    notes = [fields for _, fields in log.notes]
    refused, allowed = notes[:4], notes[4:]
    assert refused[0]["detail"] == "GrantRights eve"
    assert str(refused[1]["detail"]).startswith("not a change of users")
    assert str(allowed[0]["detail"]).count("bucket-39") == 5
    for fields in (*refused, *allowed[1:]):
        assert all(len(text) <= 501 for text in fields.values() if isinstance(text, str))


# Events.


async def test_a_user_without_rights_may_not_ask_for_events() -> None:
    async with logged_in(reading()) as (server, peer):
        # The request is allowed, but the server of these tests has no event bus.
        await peer.send(NextEvents("c", opaque=peer.opaque()))
        assert (await peer.receive(Refusal)).status == Status.UNSUPPORTED
        await revoke(server, reading())
        await peer.send(NextEvents("c", opaque=peer.opaque()))
        refusal = await peer.receive(Refusal)
        assert refusal.status == Status.NOT_ALLOWED
        assert "on any bucket" in refusal.sentence


async def test_each_user_receives_the_events_of_the_buckets_that_it_may_use() -> None:
    """Both users name their consumer the same, and each receives its own events."""
    verifier = new_verifier("pencil", b"sixteen bytes...", 4096)
    users = [
        User(name, verifier, (Grant(Right.READ, bucket),))
        for name, bucket in (("bob", "b"), ("eve", "c"))
    ]
    config = ServerConfig(
        listen="127.0.0.1:0", buckets=(BucketConfig("b", 1), BucketConfig("c", 1))
    )
    async with running_server(config, SimulatedStore()) as server, AsyncExitStack() as stack:
        server.users.users = Users(1, {user.name: user for user in (ADMIN, *users)})
        feeds = []
        for user in users:
            security = Security(credentials=Credentials(user.name, "pencil"))
            address = Address.parse(server.url(), security)
            feed = await stack.enter_async_context(follow_events(address, consumer="same"))
            assert isinstance(await anext(feed), LookAtEverything)
            feeds.append(feed)
        with trio.fail_after(20):
            for bucket in ("c", "b", "c", "b"):
                put(server.catalog.bucket(bucket).partitions[0], b"k")
                event = await anext(feeds[bucket == "c"])
                assert isinstance(event, BucketEvent)
                assert event.bucket == bucket
            # Bob received no events of c before, so he has to look at everything now.
            await server.users.apply_change(
                lambda users: users.granting("bob", (Grant(Right.READ, "c"),))
            )
            assert isinstance(await anext(feeds[0]), LookAtEverything)
            put(server.catalog.bucket("c").partitions[0], b"k")
            event = await anext(feeds[0])
            assert isinstance(event, BucketEvent)
            assert event.bucket == "c"
