"""Users: their rights, changes of them, and their JSON."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.client.core.calls import get_users
from upr_protocol.users import (
    EVERYTHING,
    GRANTS_MAX,
    ROLES_MAX,
    ROLES_OF_USER_MAX,
    SERVER,
    USERS_MAX,
    AddRole,
    AddUser,
    AnyUserChange,
    AssignRoles,
    Grant,
    GrantRights,
    GrantToRole,
    Limits,
    RemoveRole,
    RemoveUser,
    RevokeFromRole,
    RevokeRights,
    Right,
    SetLimits,
    SetPassword,
    User,
    UserChange,
    UserListing,
    UserRole,
    Users,
    UsersError,
    Verifier,
    WithdrawRoles,
    normalised,
    user_change_from_json,
)
from upr_protocol.users.users import OWNER_GRANTS, STEP_GRANTS
from upr_protocol.wire import UsersReply

VERIFIER = Verifier(b"s" * 16, 4096, b"k" * 32, b"v" * 32)
ADMIN = User("ada", VERIFIER, (Grant(Right.SECURE, EVERYTHING),))
NAMES = st.text("ab", min_size=1, max_size=6)

Change = Callable[[Users], Users]


def with_reader(*patterns: str) -> Users:
    users = Users().with_user(ADMIN).with_user(User("bob"))
    return users.granting("bob", tuple(Grant(Right.READ, pattern) for pattern in patterns))


def with_roles() -> Users:
    """Bob, who may read `a`; and Cleo, who may read and write it by two roles."""
    users = with_reader("a").with_user(User("cleo"))
    for name, right in (("readers", Right.READ), ("writers", Right.WRITE)):
        users = users.with_role(UserRole(name, (Grant(right, "a"),)))
    return users.assigning("cleo", ("readers", "writers"))


@given(st.text("ab*", min_size=1, max_size=8), NAMES)
def test_a_pattern_matches_as_a_shell_would(pattern: str, bucket: str) -> None:
    assert Grant(Right.READ, pattern).matches(bucket) == fnmatchcase(bucket, pattern)


def test_a_pattern_of_many_asterisks_costs_little() -> None:
    """A matcher that tries all ways to divide the text would not end."""
    assert not Grant(Right.READ, "a*" * 45 + "b").matches("a" * 100)


def test_only_a_single_asterisk_matches_the_server() -> None:
    assert Grant(Right.OPERATE, "*").matches(SERVER)
    assert not Grant(Right.OPERATE, "**").matches(SERVER)
    assert not Grant(Right.OPERATE, "a*").matches(SERVER)


def test_without_users_everybody_may_do_everything() -> None:
    for right in Right:
        assert Users().allows(None, right, "orders")
        assert Users().allows("bob", right, SERVER)


def test_what_no_grant_allows_is_refused() -> None:
    users = with_reader("orders-*")
    assert users.allows("bob", Right.READ, "orders-eu")
    assert not users.allows("bob", Right.READ, "orders")
    assert not users.allows("bob", Right.READ, SERVER)
    assert not users.allows("bob", Right.WRITE, "orders-eu")
    # A client that has not logged in, and a user who does not exist, have no right.
    assert not users.allows(None, Right.READ, "orders-eu")
    assert not users.allows("eve", Right.READ, "orders-eu")
    # A user who may change users may not read for that reason.
    assert not users.allows("ada", Right.READ, "orders-eu")


def test_each_change_makes_the_next_revision() -> None:
    users = with_reader("a")
    assert users.revision == 3
    users = users.revoking("bob", (Grant(Right.READ, "a"),))
    assert (users.revision, users.users["bob"].grants) == (4, ())
    users = users.with_verifier("bob", VERIFIER)
    assert users.users["bob"].verifier == VERIFIER
    users = users.without_user("bob")
    assert (users.revision, list(users.users)) == (6, ["ada"])


def test_grants_are_sorted_and_counted_once() -> None:
    users = with_reader("b", "a", "b")
    assert [grant.pattern for grant in users.users["bob"].grants] == ["a", "b"]
    assert users.granting("bob", (Grant(Right.READ, "a"),)).users == users.users


@pytest.mark.parametrize(
    "change",
    [
        lambda users: users.without_user("ada"),
        lambda users: users.revoking("ada", (Grant(Right.SECURE, EVERYTHING),)),
    ],
    ids=["remove", "revoke"],
)
def test_the_last_user_who_may_change_users_cannot_lose_that_right(change: Change) -> None:
    users = with_reader("a")
    with pytest.raises(UsersError, match="nobody could change users"):
        change(users)
    second = users.granting("bob", (Grant(Right.SECURE, EVERYTHING),))
    assert change(second).revision == second.revision + 1


def test_a_change_checks_only_the_user_that_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    users = with_reader("a")
    checked: list[str] = []
    monkeypatch.setattr(User, "check", lambda user: checked.append(user.name))
    users.granting("bob", (Grant(Right.READ, "b"),)).with_user(User("eve")).without_user("eve")
    assert checked == ["bob", "eve"]
    Users.from_json(users.to_json())
    assert checked[2:] == list(users.users)


def test_an_older_document_of_users_from_another_node_is_ignored() -> None:
    users = with_reader("a")
    call = get_users(users.revision, users.digest)
    assert call.result(UsersReply(users.revision - 1, "older")) == ""
    assert call.result(UsersReply(users.revision, "others")) == "others"


def many_grants(owner: int) -> tuple[Grant, ...]:
    return tuple(Grant(Right.READ, f"bucket-{owner}-{index}") for index in range(GRANTS_MAX))


def test_many_users_and_roles_are_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    users = with_reader("a")
    many = {f"user-{n}": User(f"user-{n}", None, many_grants(n)) for n in range(20)}
    few = {f"few-{n}": User(f"few-{n}") for n in range(200)}
    roles = {f"role-{n}": UserRole(f"role-{n}", many_grants(n)) for n in range(20)}
    users = msgspec.structs.replace(users, users={**users.users, **many, **few}, roles=roles)
    document = users.to_json()
    checked: list[Grant] = []
    original = Grant.check

    def check_grant(grant: Grant) -> None:
        checked.append(grant)
        original(grant)

    monkeypatch.setattr(Grant, "check", check_grant)
    checked_in_steps = [0]
    checked_in_steps.extend(len(checked) for _ in Users.from_json_in_steps(document))
    checked_in_steps.append(len(checked))
    assert len(checked) >= 40 * GRANTS_MAX
    largest = max(after - before for before, after in itertools.pairwise(checked_in_steps))
    assert largest < STEP_GRANTS + GRANTS_MAX
    # Users without a grant count, too.
    assert len(checked_in_steps) > 2 + (20 * GRANTS_MAX * 3 + 400 * OWNER_GRANTS) / (
        STEP_GRANTS + GRANTS_MAX + OWNER_GRANTS
    )
    assert Users.from_json(document) == users


def test_a_first_user_who_may_not_change_users_is_refused() -> None:
    with pytest.raises(UsersError, match="nobody could change users"):
        Users().with_user(User("bob"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda users: users.with_user(User("bob")), "there is a user bob already"),
        (lambda users: users.with_user(User("")), "is empty"),
        (lambda users: users.with_user(User("a\nb")), "control character"),
        (lambda users: users.with_user(User("ad\u200ba")), "format character"),
        (lambda users: users.with_user(User("\u202eada")), "format character"),
        (lambda users: users.with_user(User("a\u2028b")), "an end of a line"),
        (lambda users: users.with_user(User("a\u2029b")), "an end of a line"),
        (lambda users: users.with_user(User("ﬁ")), "not in the form NFKC"),
        (lambda users: users.with_user(User("b" * 129)), "1 to 128 bytes"),
        (lambda users: users.with_verifier("eve", None), "there is no user eve"),
        (lambda users: users.without_user("eve"), "there is no user eve"),
        (lambda users: users.granting("eve", ()), "there is no user eve"),
        (lambda users: users.granting("bob", (Grant(Right.READ, ""),)), "write * for every"),
        (lambda users: users.granting("bob", (Grant(Right.READ, "b" * 101),)), "1 to 100 bytes"),
        *(
            (
                lambda users, pattern=pattern: users.granting("bob", (Grant(Right.READ, pattern),)),
                "no control or format characters",
            )
            for pattern in ("a\n", "\u200b*", "\u202ea", "\u2028", "\u2029", "\udcff", "\ud800*")
        ),
        (lambda users: users.granting("bob", (Grant(Right.SECURE, "a"),)), "grant it on *"),
        (
            lambda users: users.granting("bob", (Grant(Right.OPERATE, "a", b"k"),)),
            "only read and write can be granted on some",
        ),
        (
            lambda users: users.granting("bob", (Grant(Right.READ, "a", b"k" * 251),)),
            "at most 250 bytes",
        ),
        (
            lambda users: users.granting("bob", (Grant(Right.READ, "a", b"_design/x"),)),
            "design documents belong to the whole bucket",
        ),
        (
            lambda users: users.revoking("bob", (Grant(Right.READ, "a", b"k"),)),
            "user bob has no grant of read on a, keys 'k'…",
        ),
        (lambda users: users.assigning("bob", ("editors",)), "there is no role editors"),
        (lambda users: users.assigning("joe", ("readers",)), "there is no user joe"),
        (
            lambda users: users.withdrawing("bob", ("readers",)),
            "does not have the role readers",
        ),
        (lambda users: users.with_role(UserRole("readers")), "there is a role readers already"),
        (lambda users: users.with_role(UserRole("")), "a role's name is empty"),
        (lambda users: users.with_role(UserRole("a\u200db")), "format character"),
        (lambda users: users.with_role(UserRole("ﬁ")), "not in the form NFKC"),
        (lambda users: users.with_role(UserRole("r" * 129)), "a role's name has 1 to 128 bytes"),
        (lambda users: users.granting_to_role("editors", ()), "there is no role editors"),
        (
            lambda users: users.granting_to_role("readers", (Grant(Right.READ, ""),)),
            "write * for every",
        ),
        (
            lambda users: users.granting_to_role(
                "readers", tuple(Grant(Right.READ, f"b{number}") for number in range(GRANTS_MAX))
            ),
            "role readers would have 65 grants",
        ),
        (
            lambda users: users.revoking_from_role("readers", (Grant(Right.READ, "b"),)),
            "role readers has no grant of read on b",
        ),
        (lambda users: users.without_role("editors"), "there is no role editors"),
        (
            lambda users: users.revoking("bob", (Grant(Right.WRITE, "a"),)),
            "user bob has no grant of write on a;",
        ),
        (
            lambda users: users.granting(
                "bob", tuple(Grant(Right.READ, f"b{number}") for number in range(GRANTS_MAX))
            ),
            "use patterns",
        ),
        (
            lambda users: users.with_verifier("bob", Verifier(b"", 4096, b"k" * 32, b"v" * 32)),
            "a salt has",
        ),
        (
            lambda users: users.with_verifier("bob", Verifier(b"s" * 16, 1, b"k" * 32, b"v" * 32)),
            "iterations",
        ),
        (
            lambda users: users.with_verifier("bob", Verifier(b"s" * 16, 4096, b"k", b"v" * 32)),
            "32 bytes each",
        ),
    ],
)
def test_an_impossible_change_is_refused_with_the_reason(change: Change, message: str) -> None:
    with pytest.raises(UsersError, match=re.escape(message)):
        change(with_roles())


def test_roles_over_a_limit_are_refused() -> None:
    users = with_reader("a")
    names = [f"role{number}" for number in range(ROLES_MAX)]
    for name in names:
        users = users.with_role(UserRole(name))
    with pytest.raises(UsersError, match="at most 100 roles"):
        users.with_role(UserRole("one-more"))
    users = users.assigning("bob", tuple(names[:ROLES_OF_USER_MAX]))
    with pytest.raises(UsersError, match="user bob would have 9 roles"):
        users.assigning("bob", (names[ROLES_OF_USER_MAX],))


@pytest.mark.parametrize(
    "change",
    [
        lambda users: users.withdrawing("ada", ("admins",)),
        lambda users: users.without_role("admins"),
        lambda users: users.revoking_from_role("admins", (Grant(Right.SECURE, EVERYTHING),)),
        lambda users: users.without_user("ada"),
    ],
    ids=["withdraw", "remove the role", "revoke", "remove the user"],
)
def test_the_last_user_who_may_change_users_by_a_role_cannot_lose_that_right(
    change: Change,
) -> None:
    own = (Grant(Right.SECURE, EVERYTHING),)
    users = with_roles().with_role(UserRole("admins", own)).assigning("ada", ("admins",))
    users = users.revoking("ada", own)
    assert users.allows("ada", Right.SECURE, SERVER)
    with pytest.raises(UsersError, match="nobody could change users"):
        change(users)
    change(users.granting("bob", own))


def test_a_user_has_the_rights_of_its_roles_until_they_are_taken_away() -> None:
    users = with_roles()
    assert users.rights_of("cleo", "a").on_all_keys == {Right.READ, Right.WRITE}
    assert users.withdrawing("cleo", ("writers",)).rights_of("cleo", "a").on_all_keys == {
        Right.READ
    }
    fewer = users.revoking_from_role("readers", GRANTS)
    assert fewer.rights_of("cleo", "a").on_all_keys == {Right.WRITE}
    without = users.without_role("readers")
    assert without.rights_of("cleo", "a").on_all_keys == {Right.WRITE}
    assert without.users["cleo"].roles == ("writers",)
    # Bob has this right himself, so he keeps it.
    assert without.rights_of("bob", "a").on_all_keys == {Right.READ}


def test_the_json_of_users_without_roles_does_not_mention_roles() -> None:
    """Nodes of an earlier version, which have no roles, can read it."""
    text = with_reader("a").to_json()
    assert "roles" not in text
    assert "prefix" not in text
    assert "roles" not in with_reader("a").listing().to_json()


def test_a_user_over_the_limit_is_refused() -> None:
    names = [f"user{number}" for number in range(USERS_MAX - 1)]
    users = Users(1, {ADMIN.name: ADMIN, **{name: User(name) for name in names}})
    users.check()
    with pytest.raises(UsersError, match="at most"):
        users.with_user(User("one-more"))


def test_a_revision_is_at_most_the_largest_integer_that_json_readers_keep() -> None:
    users = Users(2**53 - 2, {ADMIN.name: ADMIN}).with_user(User("bob"))
    assert Users.from_json(users.to_json()).revision == 2**53 - 1
    with pytest.raises(UsersError, match="a revision is 0 to 9007199254740991"):
        users.without_user("bob")


def test_users_are_equal_after_encoding_and_decoding() -> None:
    users = with_reader("a", "b*")
    assert Users.from_json(users.to_json()) == users
    assert Users.from_json(Users().to_json()) == Users()


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[]",
        "{",
        '{"revision":1}',
        '{"revision":-1,"users":{}}',
        '{"revision":9007199254740992,"users":{}}',
        '{"revision":1,"more":1}',
        '{"revision":0,"users":{"bob":{"name":"bob"}}}',
        '{"revision":1,"users":{"eve":{"name":"bob"}}}',
        '{"revision":1,"users":{"":{"name":"","grants":[{"right":"secure","pattern":"*"}]}}}',
        '{"revision":1,"users":{"bob":{"name":"bob","grants":[{"right":"fly","pattern":"*"}]}}}',
        with_roles().to_json().replace('"readers":{', '"others":{'),
        with_roles().to_json().replace('"roles":["readers",', '"roles":["others",'),
        "[" * 100_000,
    ],
)
def test_a_document_that_does_not_describe_users_is_refused(document: str) -> None:
    with pytest.raises(UsersError):
        Users.from_json(document)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    with suppress(UsersError):
        users = Users.from_json(data)
        assert Users.from_json(users.to_json()) == users


def test_the_repr_of_a_user_shows_no_secret() -> None:
    assert repr(VERIFIER) in repr(ADMIN)
    for secret in ("ssss", "kkkk", "vvvv"):
        assert secret not in repr(ADMIN)


def test_texts_are_normalised_and_control_characters_refused() -> None:
    assert normalised("ﬁ\u00a0x", "a password") == "fi x"
    for text in ("", "a\0", "\x7f", "\ue000", "\ud800"):
        with pytest.raises(UsersError) as refusal:
            normalised(text, "a password")
        assert not text or text not in str(refusal.value)


def test_a_password_may_contain_format_characters() -> None:
    assert normalised("a\u200db", "a password") == "a\u200db"


def test_a_name_with_a_character_that_is_not_assigned_here_is_accepted() -> None:
    # A node with a newer Python may have created the user. Its Unicode has more characters.
    users = msgspec.structs.replace(
        with_reader("a"), users={ADMIN.name: ADMIN, "\u0378": User("\u0378")}
    )
    assert Users.from_json(users.to_json()) == users


GRANTS = (Grant(Right.READ, "a"),)
BOTH = ("readers", "writers")
LIMITS = Limits(connections=1, streams=2, leases=3, bytes_in=2**20, bytes_out=2**21)


CHANGES: Final[list[tuple[AnyUserChange, User | None]]] = [
    (AddUser("eve", VERIFIER, GRANTS), User("eve", VERIFIER, GRANTS)),
    (SetPassword("bob", VERIFIER), User("bob", VERIFIER, GRANTS)),
    (SetPassword("bob"), User("bob", None, GRANTS)),
    (GrantRights("bob", (Grant(Right.WRITE, "b"),)), None),
    (RevokeRights("bob", GRANTS), User("bob")),
    (SetLimits("bob", LIMITS), User("bob", None, GRANTS, LIMITS)),
    (AssignRoles("bob", ("writers", "readers")), User("bob", None, GRANTS, roles=BOTH)),
    (WithdrawRoles("cleo", ("readers",)), User("cleo", roles=("writers",))),
    (RemoveUser("bob"), None),
    (AddRole("editors"), None),
    (GrantToRole("readers", (Grant(Right.READ, "b", b"a/"),)), None),
    (RevokeFromRole("readers", GRANTS), None),
    (RemoveRole("readers"), User("cleo", roles=("writers",))),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_a_change_is_equal_after_json_and_is_applied(
    change: AnyUserChange, expected: User | None
) -> None:
    users = with_roles()
    decoded_change = user_change_from_json(change.to_json())
    assert decoded_change == change
    changed = decoded_change.apply(users)
    assert changed.revision == users.revision + 1
    changed.check()
    assert Users.from_json(changed.to_json()) == changed
    if expected is not None:
        assert changed.users[expected.name] == expected
    assert changed.digest != users.digest


def test_a_change_of_every_kind_is_tried() -> None:
    assert {type(change) for change, _ in CHANGES} == set(UserChange.__subclasses__())


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{}",
        '{"type":"Fly","name":"bob"}',
        '{"type":"RemoveUser"}',
        "[" * 100_000,
        '{"type":"SetPassword","name":"bob","verifier":{"salt":"?"}}',
    ],
)
def test_a_document_that_is_no_change_is_refused(document: str) -> None:
    with pytest.raises(UsersError, match="not a change of users"):
        user_change_from_json(document)


def test_a_listing_contains_no_verifier() -> None:
    listing = with_reader("a").listing()
    text = listing.to_json()
    assert UserListing.from_json(text) == listing
    assert "salt" not in text
    assert [(user.name, user.has_password) for user in listing.users] == [
        ("ada", True),
        ("bob", False),
    ]
    with_some = with_roles().listing()
    assert UserListing.from_json(with_some.to_json()) == with_some
    assert [role.name for role in with_some.roles] == ["readers", "writers"]
    assert with_some.users[-1].roles == ("readers", "writers")
    with pytest.raises(UsersError):
        UserListing.from_json("{}")


def test_users_that_do_not_fit_one_frame_are_refused() -> None:
    grants = tuple(Grant(Right.READ, f"{number:0100}") for number in range(GRANTS_MAX))
    names = [f"user{number}" for number in range(USERS_MAX - 1)]
    users = Users(1, {ADMIN.name: ADMIN, **{name: User(name, None, grants) for name in names}})
    with pytest.raises(UsersError, match="1,048,576 are possible"):
        users.check()
