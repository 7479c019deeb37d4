"""The users of a cluster, on one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.grants import BUCKETS, GRANTS, users_with
from upr_protocol.users import (
    EVERYTHING,
    NO_RIGHTS,
    Grant,
    Right,
    User,
    UserRole,
    Users,
    UsersError,
    Verifier,
)
from upr_server.storage.calls import LoadUsers, SaveUsers, StoreCall
from upr_server.storage.errors import CorruptionError, DataDirectoryError, DiskFullError
from upr_server.storage.processes import open_store
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore
from upr_server.storage.users_file import UsersFile
from upr_server.user_store import RIGHTS_MAX, UserStore

ADMIN = User(
    "ada",
    Verifier(b"s" * 16, 4096, b"k" * 32, b"v" * 32),
    (Grant(Right.SECURE, EVERYTHING),),
)


class FullStore(SimulatedStore):
    """A store that has no room for users while `is_full`."""

    is_full = True

    async def wait(self, call: StoreCall[Any]) -> None:
        await super().wait(call)
        if self.is_full and isinstance(call, SaveUsers):
            raise DiskFullError("the disk is full")


class LateAnswers(SimulatedStore):
    """A store like one in another process: it carries out a call at once, and answers later."""

    async def execute(self, call: StoreCall[Any]) -> Any:
        answer = await super().execute(call)
        await trio.sleep(1)
        return answer


def adding(name: str) -> Any:
    return lambda users: users.with_user(User(name))


def noting(store: UserStore, changes: list[Users]) -> Callable[[], Iterator[None]]:
    def note() -> Iterator[None]:
        changes.append(store.users)
        yield

    return note


async def store_with_admin(directory: SimulatedDirectory | None = None) -> UserStore:
    store = UserStore(SimulatedStore(directory))
    await store.apply_change(lambda users: users.with_user(ADMIN))
    return store


async def test_a_change_is_completed_though_its_caller_was_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Memory and disk have the change, and all its steps are done."""
    directory = SimulatedDirectory()
    store = UserStore(LateAnswers(directory))
    steps: list[int] = []

    def end_in_steps() -> Iterator[None]:
        for step in range(3):
            steps.append(step)
            yield

    store.call_on_change(end_in_steps)
    with trio.move_on_after(0.5):
        await store.apply_change(lambda users: users.with_user(ADMIN))
    assert Users.from_json(directory.users.data) == store.users
    assert not store.users.is_open
    assert steps == [0, 1, 2]


async def test_a_change_is_there_after_a_restart() -> None:
    directory = SimulatedDirectory()
    store = await store_with_admin(directory)
    await store.apply_change(adding("bob"))
    restarted = UserStore(SimulatedStore(directory))
    assert restarted.users.is_open
    await restarted.load()
    assert restarted.users == store.users
    assert restarted.users.revision == 2


async def test_without_a_file_there_are_no_users() -> None:
    store = UserStore(SimulatedStore())
    await store.load()
    assert store.users.is_open


async def test_a_server_does_not_start_with_damaged_users() -> None:
    directory = SimulatedDirectory()
    await store_with_admin(directory)
    directory.users.data = directory.users.data[:-1]
    with pytest.raises(CorruptionError):
        await UserStore(SimulatedStore(directory)).load()


async def test_all_changes_at_the_same_moment_are_applied() -> None:
    store = await store_with_admin()
    async with trio.open_nursery() as nursery:
        for name in ("bob", "eve", "joe"):
            nursery.start_soon(store.apply_change, adding(name))
    assert list(store.users.users) == ["ada", "bob", "eve", "joe"]
    assert store.users.revision == 4


async def test_a_change_that_is_refused_or_not_stored_changes_nothing() -> None:
    disk = FullStore()
    store = UserStore(disk)
    changes: list[Users] = []
    store.call_on_change(noting(store, changes))
    with pytest.raises(UsersError):
        await store.apply_change(adding("bob"))
    with pytest.raises(DiskFullError):
        await store.apply_change(lambda users: users.with_user(ADMIN))
    assert store.users == Users()
    assert not disk.directory.users.data
    disk.is_full = False
    await store.apply_change(lambda users: users.with_user(ADMIN))
    assert changes == [store.users]


async def test_a_change_is_stored_though_its_caller_was_cancelled() -> None:
    directory = SimulatedDirectory()
    store = await store_with_admin(directory)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.apply_change, adding("bob"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    restarted = UserStore(SimulatedStore(directory))
    await restarted.load()
    assert restarted.users == store.users


async def test_the_callback_is_called_after_each_change() -> None:
    store = await store_with_admin()
    changes: list[Users] = []
    store.call_on_change(noting(store, changes))
    await store.apply_change(adding("bob"))
    await store.adopt_users(store.users.with_user(User("eve")))
    assert [users.revision for users in changes] == [2, 3]


async def test_users_of_a_higher_revision_are_adopted() -> None:
    store = await store_with_admin()
    newer = store.users.with_user(User("bob"))
    assert await store.adopt_users(newer)
    assert not await store.adopt_users(newer)
    assert not await store.adopt_users(Users())
    assert store.users == newer


async def test_nodes_choose_the_same_of_two_changes_at_the_same_moment() -> None:
    first, second = await store_with_admin(), await store_with_admin()
    await first.apply_change(adding("bob"))
    await second.apply_change(adding("eve"))
    bobs, eves = first.users, second.users
    adopted = [await first.adopt_users(eves), await second.adopt_users(bobs)]
    assert sorted(adopted) == [False, True]
    assert first.users == second.users


async def test_other_users_of_the_machine_cannot_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data" / "users"
    async with open_store(tmp_path / "data") as store:
        assert await store.ask(LoadUsers()) == b""
        # A crash may leave this file, which others may read.
        path.with_name(".users").write_bytes(b"half")
        await store.ask(SaveUsers(b"{} \0\xff"))
        assert await store.ask(LoadUsers()) == b"{} \0\xff"
    assert path.stat().st_mode & 0o777 == 0o600
    assert UsersFile(tmp_path / "data").load() == b"{} \0\xff"


def test_a_deleted_file_of_users_is_an_error(tmp_path: Path) -> None:
    file = UsersFile(tmp_path)
    file.save(b"{}")
    (tmp_path / "users").unlink()
    with pytest.raises(
        DataDirectoryError, match="users was deleted, or `upr-server init` did not finish"
    ):
        file.load()
    # A data directory from before there was `had-users` gets one when it is read.
    file.save(b"{}")
    (tmp_path / "had-users").unlink()
    assert file.load() == b"{}"
    (tmp_path / "users").unlink()
    with pytest.raises(DataDirectoryError, match="had-users, too"):
        file.load()
    (tmp_path / "had-users").unlink()
    assert file.load() == b""


async def test_a_server_whose_file_of_users_was_deleted_does_not_start(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await UserStore(store).apply_change(lambda users: users.with_user(ADMIN))
        (tmp_path / "users").unlink()
        with pytest.raises(DataDirectoryError, match="users was deleted"):
            await UserStore(store).load()


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = UsersFile(tmp_path)
    file.save(b"{}")
    (tmp_path / "users").chmod(0o640)
    with pytest.raises(DataDirectoryError, match="run chmod 600"):
        file.load()


def test_a_directory_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    file = UsersFile(tmp_path)
    with pytest.raises(DataDirectoryError, match="cannot be read"):
        file.load()
    with pytest.raises(DataDirectoryError, match="cannot be written"):
        file.save(b"{}")


@pytest.mark.parametrize("flipped", range(6))
def test_damage_is_noticed(tmp_path: Path, flipped: int) -> None:
    file = UsersFile(tmp_path)
    file.save(b"{}")
    data = bytearray((tmp_path / "users").read_bytes())
    data[flipped] ^= 1
    (tmp_path / "users").write_bytes(data)
    with pytest.raises(CorruptionError, match="users is damaged; copy it from a backup"):
        file.load()
    # The user does what the sentence says.
    (tmp_path / "users").rename(tmp_path / "users.damaged")
    assert file.is_missing()
    file.save(b"{}")
    assert file.load() == b"{}"


async def test_the_first_change_draws_a_secret_that_later_changes_keep() -> None:
    store = UserStore(SimulatedStore())
    first = await store.apply_change(lambda users: users.with_user(ADMIN))
    second = await store.apply_change(lambda users: users.with_user(User("bob")))
    assert len(first.secret) == 32
    assert second.secret == first.secret
    assert Users.from_json(second.to_json()) == second
    # Logs and listings do not show the secret.
    assert str(first.secret) not in repr(second)
    assert "secret" not in second.listing().to_json()
    assert (
        await UserStore(SimulatedStore()).apply_change(lambda users: users.with_user(ADMIN))
    ) != first


async def test_rights_are_cached_until_the_users_change() -> None:
    store = await store_with_admin()
    await store.apply_change(adding("bob"))
    right = Grant(Right.READ, "b")
    for name in ("ada", "bob", None):
        assert store.rights_of(name, "b") == store.users.rights_of(name, "b")
    assert store.rights_of("bob", "b") is store.rights_of("bob", "b")
    assert store.rights_of("bob", "b") == NO_RIGHTS
    await store.apply_change(lambda users: users.granting("bob", (right,)))
    assert store.rights_of("bob", "b").on_all_keys == {Right.READ}
    for number in range(RIGHTS_MAX + 10):
        assert store.rights_of("bob", f"b{number}") == NO_RIGHTS
    assert len(store._rights) <= RIGHTS_MAX
    assert store.rights_of("bob", "b1") is store.rights_of("bob", "b2"), "equal ones are kept once"
    await store.adopt_users(store.users.without_user("bob"))
    assert not store._equal_rights
    assert store.rights_of("bob", "b") == NO_RIGHTS


@given(GRANTS, st.lists(GRANTS, max_size=3))
def test_cached_rights_equal_the_rights_of_the_users(
    own: tuple[Grant, ...], of_roles: list[tuple[Grant, ...]]
) -> None:
    store = UserStore(SimulatedStore())
    store.users = users_with(own, of_roles)
    for _ in range(2):
        for bucket in BUCKETS:
            assert store.rights_of("bob", bucket) == store.users.rights_of("bob", bucket)


async def test_cached_rights_take_bounded_memory() -> None:
    """A user with rights on many patterns may ask for buckets that match any of them."""
    store = await store_with_admin()
    letters = "abcdefghijklmn"
    grants = tuple(Grant(Right.READ, f"*{letter}*", letter.encode()) for letter in letters)
    await store.apply_change(lambda users: users.with_user(User("bob", None, grants)))
    for number in range(RIGHTS_MAX + 10):
        name = "".join(letter for bit, letter in enumerate(letters) if number >> bit & 1)
        assert store.rights_of("bob", name or "x").read_prefixes == tuple(
            letter.encode() for letter in name
        )
    assert len(store._equal_rights) <= len(store._rights) < RIGHTS_MAX


async def test_other_tasks_run_between_the_steps_of_a_change() -> None:
    store = await store_with_admin()
    turns: list[str] = []

    def steps() -> Iterator[None]:
        for _ in range(10):
            turns.append("step")
            yield

    async def beside() -> None:
        while turns.count("step") < 10:
            turns.append("beside")
            await trio.lowlevel.checkpoint()

    store.call_on_change(steps)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside)
        await store.apply_change(adding("bob"))
    # Of tasks that can run at the same time, Trio runs each once, in any order.
    assert "step step step" not in " ".join(turns)


async def test_rights_through_a_role_are_cached_until_the_users_change() -> None:
    store = await store_with_admin()
    await store.apply_change(adding("bob"))
    await store.apply_change(lambda users: users.with_role(UserRole("readers")))
    await store.apply_change(lambda users: users.assigning("bob", ("readers",)))
    assert store.rights_of("bob", "b") == NO_RIGHTS
    grants = (Grant(Right.READ, "b"),)
    await store.apply_change(lambda users: users.granting_to_role("readers", grants))
    assert store.rights_of("bob", "b").on_all_keys == {Right.READ}
    for number in range(RIGHTS_MAX + 10):
        assert store.rights_of("bob", f"b{number}") == NO_RIGHTS
    assert len(store._rights_of_roles) <= RIGHTS_MAX
    await store.apply_change(lambda users: users.revoking_from_role("readers", grants))
    assert store.rights_of("bob", "b") == NO_RIGHTS


@pytest.mark.parametrize("target", ["missing", "users"])
def test_a_broken_link_is_refused_and_not_taken_for_a_missing_file(
    tmp_path: Path, target: str
) -> None:
    file = UsersFile(tmp_path)
    assert file.load() == b""
    (tmp_path / "users").symlink_to(tmp_path / target)
    with pytest.raises(DataDirectoryError, match="users cannot be read: "):
        file.load()
