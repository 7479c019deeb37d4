"""What grants allow together, of a user and of its roles, against naive models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.grants import (
    BUCKETS,
    GRANTS,
    KEYS,
    OF_KEYS,
    PREFIXES,
    allows_all,
    allows_key,
    users_with,
)
from upr_protocol.users import (
    BucketRights,
    Grant,
    Right,
    first_key_outside,
)


def allowed(rights: BucketRights, right: Right, key: bytes) -> bool:
    prefixes = {Right.READ: rights.read_prefixes, Right.WRITE: rights.write_prefixes}[right]
    return right in rights.on_all_keys or first_key_outside([key], prefixes) is None


@given(GRANTS, st.lists(GRANTS, max_size=3), st.lists(KEYS, max_size=8))
def test_grants_of_a_user_and_of_its_roles_allow_what_each_does(
    own: tuple[Grant, ...], of_roles: list[tuple[Grant, ...]], keys: list[bytes]
) -> None:
    for grant in (*own, *(grant for grants in of_roles for grant in grants)):
        if grant.right is not Right.SECURE:
            grant.check()
    users = users_with(own, of_roles)
    together = (*own, *(grant for grants in of_roles for grant in grants))
    assert users.grants_of("bob") == together
    for bucket in BUCKETS:
        rights = users.rights_of("bob", bucket)
        assert rights.on_all_keys == {
            right for right in Right if allows_all(together, right, bucket)
        }
        if bucket:
            for right in OF_KEYS:
                for key in keys:
                    expected = allows_key(together, right, bucket, key)
                    assert allowed(rights, right, key) == expected, (bucket, right, key)
        assert rights.on_all_keys <= rights.on_some_keys
        for right, prefixes in zip(
            OF_KEYS, (rights.read_prefixes, rights.write_prefixes), strict=True
        ):
            assert not (prefixes and right in rights.on_all_keys)
            assert (right in rights.on_some_keys) == bool(prefixes or right in rights.on_all_keys)
            assert list(prefixes) == sorted(set(prefixes))


@given(st.lists(KEYS, max_size=20), st.lists(PREFIXES, max_size=8))
def test_the_first_key_outside_some_prefixes(keys: list[bytes], prefixes: list[bytes]) -> None:
    grants = tuple(Grant(Right.READ, "b", prefix) for prefix in prefixes)
    rights = BucketRights.of(grants, "b")
    outside = (key for key in keys if not allows_key(grants, Right.READ, "b", key))
    assert first_key_outside(keys, rights.read_prefixes) == next(outside, None)


def test_a_prefix_within_another_one_counts_for_nothing() -> None:
    grants = tuple(Grant(Right.READ, "b", prefix) for prefix in (b"ab", b"a", b"b/", b"abc"))
    assert BucketRights.of(grants, "b").read_prefixes == (b"a", b"b/")


def test_without_a_prefix_no_key_is_allowed() -> None:
    assert first_key_outside([b"k"], ()) == b"k"
    assert first_key_outside([], ()) is None
    # What is no key begins with nothing.
    assert first_key_outside([b""], (b"k",)) == b""
