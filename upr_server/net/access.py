"""What the client of a connection may do: one table for every message that a client may send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import filterfalse
from typing import Any, Final

from upr_protocol.bucket_event import ALL_KINDS, BucketEvent, EventKind
from upr_protocol.errors import ServerError, Status, quoted_key
from upr_protocol.ids import DESIGN_PREFIX, NO_WRITER, WRITER_BYTES
from upr_protocol.partition_map import PartitionMap, PartitionMapError
from upr_protocol.users import (
    EVERY_RIGHT,
    NO_RIGHTS,
    SERVER,
    BucketRights,
    Grant,
    Right,
    UsersError,
    first_key_outside,
    user_change_from_json,
)
from upr_protocol.wire import (
    Ack,
    Await,
    Barrier,
    ChangeUsers,
    Close,
    CloseStream,
    ContinueLogIn,
    CreateBucket,
    DeleteBucket,
    Error,
    Get,
    GetMap,
    GetUsers,
    Go,
    Hello,
    Join,
    Lease,
    ListBuckets,
    ListUsers,
    Message,
    Mutate,
    NextEvents,
    Noop,
    Open,
    ReplicaAck,
    Seqnos,
    SeqnosAt,
    SetMap,
    StartLogIn,
    Stats,
    Stream,
)
from upr_server.runtime import AuditLog
from upr_server.user_store import UserStore

Rights = frozenset[Right]

SLICE_BUCKETS: Final = 8
"""Buckets that are looked at before others have their turn: at some 250 µs each for a user with
many grants in many roles, 2 ms."""

KEY_BYTES_SHOWN: Final = 40
"""Bytes of a key that a refusal shows."""

AUDITED_CHARACTERS_MAX: Final = 500
"""Characters of a text in the audit log that a client without rights chose: it must not be able to
fill the disk with few requests."""

READ: Final = frozenset({Right.READ})
WRITE: Final = frozenset({Right.WRITE})
INDEX: Final = frozenset({Right.INDEX})
CHANGE: Final = WRITE | INDEX
"""Design documents need the one, all other keys the other; see `check_changed_keys`."""
REPLICATE: Final = frozenset({Right.REPLICATE})
OPERATE: Final = frozenset({Right.OPERATE})
SECURE: Final = frozenset({Right.SECURE})
USE: Final = EVERY_RIGHT - {Right.SECURE}
"""A client with any of these on a bucket may know that it is there, and how far it has come."""

ANY_BUCKET: Final = "*"
"""Stands for any bucket where a bucket's name is expected. No bucket has this name."""


class Access:
    """What the client of one connection may do.

    Args:
        users: The users of the cluster.
        peer: The client's address.
        audit_log: Where it is noted what the client asks for; None for nowhere.

    Attributes:
        user_name: The user who logged in; None before that.
    """

    __slots__ = (
        "_audit_log",
        "_bucket_name",
        "_generation",
        "_has_lost_a_right",
        "_last_writer",
        "_peer",
        "_rights",
        "_users",
        "user_name",
    )

    def __init__(self, users: UserStore, peer: str = "", audit_log: AuditLog | None = None) -> None:
        self.user_name: str | None = None
        self._rights = NO_RIGHTS
        self._generation = users.generation
        """That of the users for whom the rights were looked up."""
        self._has_lost_a_right = False
        self._bucket_name = SERVER
        self._last_writer = b"", b""
        self._users = users
        self._peer = peer
        self._audit_log = audit_log

    @property
    def rights(self) -> BucketRights:
        """What the client may do with the bucket that it opened. O(1), but O(grants) when the users
        have changed: with the first message after a change the client has the new rights, also
        while those of other clients are still being looked up."""
        if self._generation != self._users.generation:
            self._refresh()
        return self._rights

    @property
    def is_lost(self) -> bool:
        """Whether the users say that nobody like the client is connected: its user was removed, or
        it never logged in."""
        users = self._users.users
        return not users.is_open and (self.user_name is None or users.get(self.user_name) is None)

    def set_bucket(self, name: str) -> None:
        """Notes the bucket that the client opens, and works out its rights there. O(grants)."""
        self._bucket_name = name
        self._refresh()

    def loses_rights(self) -> bool:
        """Whether the client has lost a right on its bucket, or its user, since this was asked
        last. O(1) where others have the same rights; otherwise O(grants)."""
        if self._generation != self._users.generation:
            self._refresh()
        has_lost_a_right, self._has_lost_a_right = self._has_lost_a_right, False
        return has_lost_a_right or self.is_lost

    def _refresh(self) -> None:
        rights_before = self._rights.on_all_keys
        self._rights = self.rights_on(self._bucket_name)
        self._generation = self._users.generation
        # Not only for the caller: a message may ask for the rights before `loses_rights` does.
        self._has_lost_a_right |= not self._rights.on_all_keys >= rights_before

    def rights_on(self, bucket: str) -> BucketRights:
        """What the client may do with a bucket, or with the server. O(grants)."""
        return self._users.rights_of(self.user_name, bucket)

    def may_use(self, bucket: str) -> bool:
        """Whether the client may know of a bucket. O(grants)."""
        return not USE.isdisjoint(self.rights_on(bucket).on_some_keys)

    @property
    def grants(self) -> tuple[Grant, ...]:
        """What the client's user was granted, also by roles; none where there are no users.
        O(grants)."""
        return self._users.users.grants_of(self.user_name)

    def visible_part(self, event: BucketEvent) -> BucketEvent | None:
        """What the client may know of an event; None for nothing. Design documents belong to the
        whole bucket, and so do their names. O(grants)."""
        if not USE.isdisjoint(self.rights_on(event.bucket).on_all_keys):
            return event
        return event.only(ALL_KINDS & ~EventKind.DESIGN) if self.may_use(event.bucket) else None

    def check_uses_any(self, message: Message) -> None:
        """Checks that there is some bucket that the client may know of. O(grants).

        Raises:
            ServerError: `NOT_ALLOWED`: there is none.
        """
        users = self._users.users
        grants = users.grants_of(self.user_name)
        if not users.is_open and not any(grant.right in USE for grant in grants):
            raise self._refusal(message, USE, ANY_BUCKET)

    def own_writer(self, writer: bytes) -> bytes:
        """A writer's ID as the partitions know it: writers of two users are two, whatever they call
        themselves. Otherwise a client that knows the ID of another's writer, which may be a hash of
        a name, would get that writer's answers, and could make its batches count as repeated. O(1).

        Args:
            writer: 16 bytes; zeros for none, which stay so.
        """
        if self.user_name is None or writer == NO_WRITER:
            return writer
        client_writer, own_writer = self._last_writer
        if writer != client_writer:
            data = self.user_name.encode() + writer
            own_writer = blake2b(data, digest_size=len(writer), person=b"upr writer").digest()
            # A connection has nearly always one.
            self._last_writer = writer, own_writer
        return own_writer

    def own_writers(self, writers: bytes) -> bytes:
        """`own_writer` of several IDs, one behind the other; zeros stand for no writer, and stay
        zeros. O(writers), O(1) where nobody logged in."""
        if self.user_name is None:
            return writers
        each_writer = (
            writers[start : start + WRITER_BYTES] for start in range(0, len(writers), WRITER_BYTES)
        )
        return b"".join(map(self.own_writer, each_writer))

    def note_log_in(self, name: str, mechanism: str, *, is_allowed: bool) -> None:
        """Notes in the audit log that the client logged in, or tried to."""
        if self._audit_log is not None:
            self._audit_log.note(
                "log-in",
                user=_shorten(name),
                peer=self._peer,
                mechanism=mechanism,
                allowed=is_allowed,
            )

    def note_limited(self, host: str) -> None:
        """Notes in the audit log that nothing from a host is tried, as too many log-ins failed."""
        if self._audit_log is not None:
            self._audit_log.note("log-in limited", host=host)

    def note_told_users(self, message: GetUsers) -> None:
        """Notes in the audit log that the client gets the users with their verifiers."""
        self._note(message, SERVER, is_allowed=True)

    def _note(self, message: Message, bucket: str, *, is_allowed: bool) -> None:
        if self._audit_log is not None:
            self._audit_log.note(
                "request",
                user=self.user_name,
                peer=self._peer,
                request=type(message).__name__,
                bucket=_shorten(bucket),
                allowed=is_allowed,
                detail=_detail(message, is_allowed=is_allowed),
            )

    def check_message(self, message: Message, *, is_noted: bool = False) -> None:
        """Checks what the client asks for. O(1), for messages about the bucket that it opened. What
        is refused, and what changes more than keys, is noted in the audit log.

        Args:
            message: What it asks for.
            is_noted: Whether it was allowed before, and that is noted.

        Raises:
            ServerError: `NOT_ALLOWED`: the client may not do it.
        """
        needed_rights = NEEDED[type(message)]
        if isinstance(message, Stream) and message.with_answers:
            needed_rights = REPLICATE
        if isinstance(needed_rights, frozenset):
            # These are nearly all the messages that there are.
            if not self._has(needed_rights, self.rights, message):
                raise self._refusal(message, needed_rights, self._bucket_name)
            if type(message) in AUDITED and not is_noted:
                self._note(message, self._bucket_name, is_allowed=True)
        elif needed_rights is not None:
            rights, bucket = needed_rights(message)
            if bucket is not None and not self._has(rights, self.rights_on(bucket), message):
                raise self._refusal(message, rights, bucket)
            if type(message) in AUDITED and not is_noted:
                self._note(message, bucket or SERVER, is_allowed=True)

    @staticmethod
    def _has(needed_rights: Rights, rights: BucketRights, message: Message) -> bool:
        return not needed_rights.isdisjoint(rights.on_all_keys) or (
            type(message) in OF_SOME_KEYS and not needed_rights.isdisjoint(rights.on_some_keys)
        )

    @property
    def may_change_all_keys(self) -> bool:
        """Whether the client may change every key of its bucket, design documents too."""
        if self._generation != self._users.generation:
            self._refresh()
        return self._rights.on_all_keys >= CHANGE

    def check_read_keys(self, message: Get) -> None:
        """Checks the keys that a client asks for. O(keys), for a client that may not read all of
        the bucket.

        Raises:
            ServerError: `NOT_ALLOWED`: the client may not read one of them.
        """
        if Right.READ not in self.rights.on_all_keys:
            forbidden_key = first_key_outside(message.keys, self.rights.read_prefixes)
            if forbidden_key is not None:
                raise self._refusal(message, READ, self._bucket_name, forbidden_key)

    def check_changed_keys(self, message: Mutate) -> None:
        """Checks the keys of a bundle, whose columns are in order: design documents define indexes.
        O(bytes of the keys), for a client that may not change every key.

        Raises:
            ServerError: `NOT_ALLOWED`: the client may not change one of them.
        """
        if self.may_change_all_keys:
            return
        chunk, bucket_rights = message.bundle.chunk, self.rights.on_all_keys
        if Right.WRITE in bucket_rights:
            # Nearly all bundles have no such bytes anywhere.
            may_have_designs = DESIGN_PREFIX in chunk.key_bytes.tobytes()
            forbidden_key = (
                next(filter(_is_design, chunk.keys()), None) if may_have_designs else None
            )
        else:
            keys: Iterable[bytes] = chunk.keys()
            if Right.INDEX in bucket_rights:
                keys = filterfalse(_is_design, keys)
            forbidden_key = first_key_outside(keys, self.rights.write_prefixes)
        if forbidden_key is not None:
            needed_rights = INDEX if _is_design(forbidden_key) else WRITE
            raise self._refusal(message, needed_rights, self._bucket_name, forbidden_key)

    def _refusal(
        self, message: Message, needed_rights: Rights, bucket: str, key: bytes | None = None
    ) -> ServerError:
        self._note(message, bucket, is_allowed=False)
        names = " or ".join(right.value for right in Right if right in needed_rights)
        requester = (
            "somebody who did not log in" if self.user_name is None else f"user {self.user_name}"
        )
        where = f"bucket {bucket}" if bucket else "the server itself (*)"
        if bucket == ANY_BUCKET:
            where = "any bucket"
        elif key is not None:
            where = f"key {quoted_key(key[:KEY_BYTES_SHOWN])} of {where}"
        elif not needed_rights.isdisjoint(self.rights_on(bucket).on_some_keys):
            where = f"the whole {where}"
        return ServerError(
            Status.NOT_ALLOWED,
            f"{requester} may not do this: {type(message).__name__} needs the right {names} on "
            f"{where}",
        )


def _is_design(key: bytes) -> bool:
    return key.startswith(DESIGN_PREFIX)


def _shorten(text: str) -> str:
    """The text, or its beginning if it is long."""
    if len(text) <= AUDITED_CHARACTERS_MAX:
        return text
    return text[:AUDITED_CHARACTERS_MAX] + "…"


def _detail(message: Message, *, is_allowed: bool) -> str:
    """What the audit log tells of a request beside its bucket: nothing secret. A change of users
    that is allowed is told whole: long grants must not hide those behind them."""
    if isinstance(message, ChangeUsers):
        try:
            change = user_change_from_json(message.change)
        except UsersError as error:
            return _shorten(str(error))
        return repr(change) if is_allowed else _shorten(f"{type(change).__name__} {change.name}")
    return _shorten(message.address) if isinstance(message, Join) else ""


def _of_map(message: SetMap) -> tuple[Rights, str]:
    try:
        return OPERATE, PartitionMap.bucket_of(message.document)
    except PartitionMapError as error:
        raise ServerError(Status.BAD_ARGUMENT, str(error)) from error


OF_SOME_KEYS: Final = frozenset({Open, GetMap, Get, Mutate, Seqnos, SeqnosAt, Await})
"""For these a right on some keys of the bucket is enough. A client with one may know how far the
bucket has come; the keys of `Get` and `Mutate` are looked at, too. All others are about all
keys."""

Need = Rights | Callable[[Any], tuple[Rights, str | None]] | None
"""Rights on the bucket that the client opened, of which one is enough; or a function of the message
that gives such rights, and the name of the bucket, or `SERVER`. None in the place of either for a
message that needs no right."""

NEEDED: Final[Mapping[type[Message], Need]] = {
    # These say nothing about a bucket, and change nothing.
    Hello: None,
    StartLogIn: None,
    ContinueLogIn: None,
    Noop: None,
    Close: None,
    Error: None,
    # These concern streams that were opened before: without one they do nothing.
    Go: None,
    Ack: None,
    Barrier: None,
    CloseStream: None,
    # These answer with what the client may know. `NextEvents`, which takes room in the server, is
    # refused by `check_uses_any` when that is nothing.
    ListBuckets: None,
    NextEvents: None,
    # These name what they are about.
    Open: lambda message: (USE, message.bucket),
    CreateBucket: lambda message: (OPERATE, message.name),
    DeleteBucket: lambda message: (OPERATE, message.name),
    Stats: lambda message: (OPERATE, message.bucket),
    # Without a bucket it asks for the node's name, which every map tells.
    GetMap: lambda message: (USE, message.bucket or None),
    SetMap: _of_map,
    # A client that names the node of the map decides what is in the map.
    Join: lambda message: (OPERATE, message.bucket),
    # These are about the whole cluster.
    ListUsers: lambda _: (SECURE, SERVER),
    ChangeUsers: lambda _: (SECURE, SERVER),
    GetUsers: lambda _: (REPLICATE, SERVER),
    # These are about the bucket that the client opened.
    Stream: READ,
    ReplicaAck: REPLICATE,
    Mutate: CHANGE,
    Get: READ,
    Lease: READ,
    Seqnos: USE,
    SeqnosAt: USE,
    Await: USE,
}
"""For every message that a client may send, what it needs."""

AUDITED: Final = frozenset({CreateBucket, DeleteBucket, SetMap, Join, Lease, ChangeUsers})
"""What the audit log has of what is allowed. To note every request would cost more than most of
them do."""
