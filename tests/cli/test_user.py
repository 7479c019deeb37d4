"""`upr-server init` and `upr user`: who may log in, and what each may do."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import Run, Start
from tests.cli.processes import Server, start_server
from upr_protocol.cli import passwords
from upr_protocol.users import Users
from upr_server.cli import main as server_main
from upr_server.storage.users_file import UsersFile

PASSWORD = "correct horse"
Init = Callable[..., Result]
Typing = Callable[..., None]


def secret_file(path: Path, text: str = PASSWORD) -> str:
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose first user is ada."""
    folder = tmp_path_factory.mktemp("secured")
    password = secret_file(folder / "ada.password")
    data = str(folder / "data")
    result = CliRunner().invoke(
        server_main, ["init", "--data-dir", data, "--user", "ada", "--password-file", password]
    )
    assert result.exit_code == 0, result.output
    with start_server("127.0.0.1:0", "--data-dir", data) as started:
        yield started


@pytest.fixture
def as_ada(monkeypatch: pytest.MonkeyPatch, secured: Server, run: Run) -> Run:
    """Runs `upr` as ada, at the server."""
    become(monkeypatch, "ada")
    monkeypatch.setenv("UPR_URL", secured.url)
    return run


def become(monkeypatch: pytest.MonkeyPatch, name: str, password: str = PASSWORD) -> None:
    monkeypatch.setenv("UPR_USER", name)
    monkeypatch.setenv("UPR_PASSWORD", password)


@pytest.fixture
def init(tmp_path: Path) -> Init:
    """Runs `upr-server init` in this process, on a new data directory."""

    def init(*arguments: str, code: int = 0) -> Result:
        command = ["init", "--data-dir", str(tmp_path / "data"), *arguments]
        result = CliRunner().invoke(server_main, command)
        assert result.exit_code == code, result.output
        return result

    return init


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Typing:
    """Has these lines typed at the terminal, one after the other: `typing("a", "a")`."""

    def begin(*lines: str) -> None:
        typed = iter(lines)
        monkeypatch.setattr(passwords, "read_hidden", lambda _prompt: next(typed))

    return begin


def users_in(folder: Path) -> Users:
    return Users.from_json(UsersFile(folder / "data").load())


# upr-server init


def test_init_makes_the_first_user_who_may_do_everything(
    init: Init, tmp_path: Path, typing: Typing
) -> None:
    typing(PASSWORD, "mistyped", PASSWORD, PASSWORD)
    assert init("--user", "ada").stderr == "The two differ.\n"
    users = users_in(tmp_path)
    assert len(users.secret) == 32
    (user,) = users.users.values()
    assert user.verifier is not None
    assert {grant.pattern for grant in user.grants} == {"*"}
    assert len(user.grants) == 6
    mode = (tmp_path / "data" / "users").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_init_makes_a_user_with_a_certificate_only(init: Init, tmp_path: Path) -> None:
    init("--user", "ada", "--certificate-only")
    (user,) = users_in(tmp_path).users.values()
    assert user.verifier is None


def test_init_refuses_a_directory_that_has_users(init: Init, tmp_path: Path) -> None:
    init("--user", "ada", "--certificate-only")
    again = init("--user", "eve", "--certificate-only", code=1)
    assert "has users already" in again.stderr
    assert list(users_in(tmp_path).users) == ["ada"]


def test_init_gives_users_to_a_directory_that_lost_them(init: Init, tmp_path: Path) -> None:
    init("--user", "ada", "--certificate-only")
    (tmp_path / "data" / "users").unlink()
    init("--user", "eve", "--certificate-only")
    assert list(users_in(tmp_path).users) == ["eve"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name the first user with --user"),
        (("--user", "a", "--tls-ca", "x"), "go with --from"),
        (("--from", "upr://127.0.0.1:1", "--certificate-only"), "goes without --from"),
        (("--from", "upr://127.0.0.1:1", "--password-file", "x"), "goes with --user"),
        (("--user", "a", "--certificate-only", "--password-file", "x"), "give either"),
    ],
)
def test_init_says_how_it_is_used(init: Init, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in init(*arguments, code=2).stderr


def test_init_refuses_a_bad_name_and_a_node_that_is_not_there(init: Init, tmp_path: Path) -> None:
    assert "control character" in init("--user", "a\nb", "--certificate-only", code=1).stderr
    init("--from", "upr://127.0.0.1:1", code=1)
    assert not (tmp_path / "data" / "users").exists()


def test_another_node_gets_the_users_of_the_first(
    init: Init, as_ada: Run, secured: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = secret_file(tmp_path / "node.password")
    as_ada("user", "add", "node2", "--new-password-file", password)
    log_in = ("--from", secured.url, "--user", "node2", "--password-file", password)
    refusal = init(*log_in, code=1)
    assert "upr user grant" in refusal.stderr
    as_ada("user", "grant", "node2", "replicate", "*")
    # As for `upr`, the password may also come from the environment.
    become(monkeypatch, "node2")
    init(*log_in[:4])
    become(monkeypatch, "ada")
    users = users_in(tmp_path)
    assert {"ada", "node2"} <= set(users.users)
    as_ada("user", "remove", "node2")


def test_a_node_without_users_gives_none(init: Init, server: Server) -> None:
    assert "has no users" in init("--from", server.url, code=1).stderr


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt, 130, ""),
        (EOFError, 2, "no password was typed"),
        (OSError, 2, "there is no terminal to ask for it: name a file with --"),
    ],
)
def test_a_prompt_that_gets_no_password(
    init: Init,
    as_ada: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    code: int,
    sentence: str,
) -> None:
    def fail(_prompt: str) -> str:
        raise error

    monkeypatch.setattr(passwords, "read_hidden", fail)
    for ended in (init("--user", "ada", code=code), as_ada("user", "add", "bob", code=code)):
        assert sentence in ended.stderr
        assert "Abort" not in ended.stderr


# upr user


def test_a_user_is_made_may_do_what_is_granted_and_is_removed(
    as_ada: Run, secured: Server, monkeypatch: pytest.MonkeyPatch, typing: Typing
) -> None:
    run, bucket = as_ada, f"{secured.url}planes"
    run("bucket", "create", bucket, "--partitions", "1")
    typing(PASSWORD, PASSWORD)
    output = run("user", "add", "bob")
    assert "added user bob" in output.stdout
    become(monkeypatch, "bob")
    refusal = run("get", bucket, "k", code=3)
    assert "user bob may not do this" in refusal.stderr
    assert "upr user grant" in refusal.stderr
    become(monkeypatch, "ada")
    run("user", "grant", "bob", "read,write", "plan*")
    become(monkeypatch, "bob")
    run("set", bucket, "k", "v")
    assert run("get", bucket, "k").stdout.rstrip("\n") == "v"
    run("bucket", "delete", bucket, "--yes", code=3)
    run("user", "list", code=3)
    assert run("bucket", "list").stdout.split()[3] == "planes"
    become(monkeypatch, "ada")
    run("user", "revoke", "bob", "write", "plan*")
    run("user", "limit", "bob", "--streams", "1")
    assert "at least 1,048,576" in run("user", "limit", "bob", "--bytes-in", "5", code=2).stderr
    limited = run("user", "limit", "bob", "--connections", "5", "--bytes-in", "2000000")
    assert limited.stdout == "the limits of bob: connections=5 bytes_in=2000000\n"
    rows = [json.loads(line) for line in run("user", "list", "--json").stdout.splitlines()]
    row = {"user": "bob", "logs_in_with": "password", "right": "read", "buckets": "plan*"}
    row |= {"prefix": "", "role": "", "limits": "connections=5 bytes_in=2000000"}
    assert [row for row in rows if row["user"] == "bob"] == [row]
    become(monkeypatch, "bob")
    run("set", bucket, "k", "v2", code=3)
    become(monkeypatch, "ada")
    run("user", "remove", "bob")
    become(monkeypatch, "bob")
    run("get", bucket, "k", code=3)


def test_a_user_may_read_and_write_some_keys(
    as_ada: Run, secured: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, bucket = as_ada, f"{secured.url}shared"
    run("bucket", "create", bucket, "--partitions", "4")
    run("user", "add", "kim", "--new-password-file", secret_file(tmp_path / "kim.password"))
    on_some = ("kim", "read,write", "shared", "--prefix", "kim/")
    assert run("user", "grant", *on_some).stdout == (
        "granted to kim: read on shared, keys 'kim/'…; write on shared, keys 'kim/'…\n"
    )
    run("set", bucket, "ann/1", "secret")
    become(monkeypatch, "kim")
    run("set", bucket, "kim/1", "v")
    assert run("get", bucket, "kim/1").stdout == "v\n"
    run("increment", bucket, "kim/n")
    for command in (("set", "ann/1", "v"), ("increment", "ann/n"), ("get", "ann/1")):
        refusal = run(command[0], bucket, *command[1:], code=3)
        assert "on key 'ann/" in refusal.stderr
        assert "secret" not in refusal.output
    assert "on the whole bucket shared" in run("tail", bucket, code=3).stderr
    become(monkeypatch, "ada")
    rows = [json.loads(line) for line in run("user", "list", "--json").stdout.splitlines()]
    assert [(row["right"], row["prefix"]) for row in rows if row["user"] == "kim"] == [
        ("read", "kim/"),
        ("write", "kim/"),
    ]
    assert (
        "same pattern and prefix" in run("user", "revoke", "kim", "write", "shared", code=3).stderr
    )
    run("user", "revoke", *on_some)
    become(monkeypatch, "kim")
    run("get", bucket, "kim/1", code=3)
    become(monkeypatch, "ada")
    run("user", "remove", "kim")


def test_roles_are_made_given_and_removed(
    as_ada: Run, secured: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, bucket = as_ada, f"{secured.url}orders"
    run("bucket", "create", bucket, "--partitions", "1")
    run("user", "add", "lea", "--new-password-file", secret_file(tmp_path / "lea.password"))
    assert "added role editors" in run("role", "add", "editors").stdout
    run("role", "add", "empty")
    assert run("user", "assign", "lea", "editors, empty").stdout == (
        "lea has the roles editors,empty, too\n"
    )
    become(monkeypatch, "lea")
    run("get", bucket, "k", code=3)
    become(monkeypatch, "ada")
    assert run("role", "grant", "editors", "read,write", "order*").stdout == (
        "granted to the role editors: read on order*; write on order*\n"
    )
    run("role", "grant", "editors", "read", "*", "--prefix", "public/")
    become(monkeypatch, "lea")
    run("set", bucket, "k", "v")
    run("role", "list", code=3)
    become(monkeypatch, "ada")
    rows = [json.loads(line) for line in run("role", "list", "--json").stdout.splitlines()]
    assert rows == [
        {"role": "editors", "right": "read", "buckets": "*", "prefix": "public/"},
        {"role": "editors", "right": "read", "buckets": "order*", "prefix": ""},
        {"role": "editors", "right": "write", "buckets": "order*", "prefix": ""},
        {"role": "empty", "right": "", "buckets": "", "prefix": ""},
    ]
    rows = [json.loads(line) for line in run("user", "list", "--json").stdout.splitlines()]
    assert [
        (row["role"], row["right"], row["buckets"]) for row in rows if row["user"] == "lea"
    ] == [
        ("editors", "read", "*"),
        ("editors", "read", "order*"),
        ("editors", "write", "order*"),
        ("empty", "", ""),
    ]
    run("role", "revoke", "editors", "write", "order*")
    become(monkeypatch, "lea")
    run("set", bucket, "k", "v", code=3)
    run("get", bucket, "k")
    become(monkeypatch, "ada")
    run("user", "withdraw", "lea", "editors")
    assert "does not have the role" in run("user", "withdraw", "lea", "editors", code=3).stderr
    run("user", "assign", "lea", "editors")
    run("role", "remove", "editors")
    become(monkeypatch, "lea")
    run("get", bucket, "k", code=3)
    become(monkeypatch, "ada")
    run("role", "remove", "empty")
    run("user", "remove", "lea")


def test_a_new_password_replaces_the_old_one(
    as_ada: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typing: Typing
) -> None:
    typing("old", "old")
    as_ada("user", "add", "eve")
    as_ada("user", "password", "eve", "--new-password-file", secret_file(tmp_path / "p", "new"))
    become(monkeypatch, "eve", "old")
    as_ada("bucket", "list", code=3)
    become(monkeypatch, "eve", "new")
    as_ada("bucket", "list")
    become(monkeypatch, "ada")
    as_ada("user", "remove", "eve")


def test_streams_end_when_the_right_is_revoked(
    as_ada: Run, secured: Server, start: Start, tmp_path: Path
) -> None:
    bucket, password = f"{secured.url}followed", secret_file(tmp_path / "joe.password")
    as_ada("bucket", "create", bucket, "--partitions", "1")
    as_ada("user", "add", "joe", "--new-password-file", password)
    as_ada("user", "grant", "joe", "read", "followed")
    as_ada("set", bucket, "k", "v")
    tail = start("tail", bucket, "--user", "joe", "--password-file", password)
    tail.event("snapshot_end")
    as_ada("user", "revoke", "joe", "read", "followed")
    _, error = tail.finished(code=3)
    assert b"right revoked" in error
    as_ada("user", "remove", "joe")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("grant", "bob", "fly", "b"), "is not one of read, write"),
        (("grant", "bob", "secure", "b"), "grant it on *"),
        (("grant", "bob", "read", ""), "write * for every bucket"),
        # Events have these wildcards, and no bucket has such a name.
        (("grant", "bob", "read", "orders-?"), "* is the only wildcard"),
        (("grant", "bob", "read", "my orders"), "no bucket's name matches 'my orders'"),
        (("add", "a\nb"), "control character"),
        (("add", "a\u200bb", "--certificate-only"), "format character"),
        (("grant", "bob", "read", "\udcff"), "no control or format characters"),
        (("add", "bob", "--certificate-only", "--new-password-file", "x"), "give either"),
        (("grant", "bob", "operate", "b", "--prefix", "k"), "only read and write can be granted"),
        (("grant", "bob", "read", "b", "--prefix", "_design/a"), "belong to the whole bucket"),
        (("grant", "bob", "read", "b", "--prefix", ""), "leave the option out to mean the whole"),
        (("assign", "bob", "a,"), "the role's name is empty"),
        (("assign", "bob", "a\u200bb"), "format character"),
    ],
)
def test_wrong_arguments_of_user_are_usage_errors_that_say_why(
    as_ada: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in as_ada("user", *arguments, code=2).stderr


def test_a_server_without_users_says_so(server: Server, run: Run) -> None:
    listed = run("user", "list", server.url)
    assert "there are no users" in listed.stderr
