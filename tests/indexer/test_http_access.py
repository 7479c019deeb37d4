"""Which user may send which HTTP request to an indexer whose server has users."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.indexer.http_users import OF_SOME_KEYS, OTHER, OWN, name_of, users_of_the_table
from tests.indexer.kit import until_ready
from tests.indexer.outcomes import upr_index
from tests.server.users import BOB, USERS, VERIFIER, address_of, server_with_users
from upr_protocol.client import Address, Credentials, IndexClient, IndexerError, Security
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users
from upr_server.app import Server
from upr_server.indexer import http_access
from upr_server.indexer.api import application
from upr_server.indexer.app import serving
from upr_server.indexer.http_access import (
    FAILURES_MAX,
    HOST_FAILURES_MAX,
    LOG_INS_MAX,
    HttpAccess,
    LogInNeededError,
    NotAllowedError,
    TooManyLogInsError,
)
from upr_server.indexer.indexer import IndexerSettings, running_indexer
from upr_server.indexer.remote_slice import OPEN_S

DESIGN: Final = b'{"indexes": {"city": {"key": ["city"]}}}'
PASSWORD: Final = "pencil"
# Every route with the right that it needs on the indexer's bucket, written by hand. A route without
# a line here fails a test.
TABLE: Final = """
    GET    /openapi.json                             anybody
    GET    /v1/status                                read
    GET    /v1/nodes                                 read
    GET    /v1/designs                               read
    GET    /v1/indexes                               read
    GET    /v1/indexes/{design}/{index:path}         read
    POST   /v1/indexes/{design}/{index:path}/scan    read
    DELETE /v1/moments/{moment}                      read
    PUT    /v1/designs/{design:path}                 index
    DELETE /v1/designs/{design:path}                 index
    LINK   /v1/slices/{index:int}                    read,index
"""
ROUTES: Final = [tuple(line.split()) for line in TABLE.strip().split("\n")]
PATHS: Final = {
    "{design}": "d",
    "{index:path}": "city",
    "{moment}": "nothing",
    "{index:int}": "0",
    "{design:path}": "new",
}


def authorization(name: str, password: str = PASSWORD) -> str:
    return "Basic " + b64encode(f"{name}:{password}".encode()).decode()


class DirectApi:
    """An indexer's HTTP API, called without a network.

    Attributes:
        access: Decides who may send a request.
        server: The server that the indexer follows.
    """

    def __init__(self, app: Any, access: HttpAccess, server: Server) -> None:
        self._app = app
        self.access = access
        self.server = server

    @property
    def routes(self) -> set[tuple[str, str]]:
        """Every method and path that the API answers."""
        methods = {
            (method, route.path)
            for route in self._app.routes
            for method in getattr(route, "methods", ["LINK"])
        }
        return {(method, path) for method, path in methods if method != "HEAD"}

    async def ask(
        self, method: str, path: str, header: str = "", host: str = "10.0.0.9"
    ) -> tuple[int, Any]:
        """The status and the body of an answer."""
        for placeholder, text in PATHS.items():
            path = path.replace(placeholder, text)
        scope: dict[str, Any] = {
            "type": "http" if method != "LINK" else "websocket",
            "extensions": {"websocket.http.response": {}},
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"authorization", header.encode())] if header else [],
            "client": (host, 50112),
        }
        status, body = 0, b""
        request_body = DESIGN if method == "PUT" else b""
        messages = [{"type": "http.request", "body": request_body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await trio.sleep_forever()
            await trio.lowlevel.checkpoint()
            return messages.pop()

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, body
            await trio.lowlevel.checkpoint()
            status = message.get("status", status)
            body += message.get("body", b"")

        await self._app(scope, receive, send)
        return status, json.loads(body) if body else None


@asynccontextmanager
async def a_direct_api(
    folder: Path, users: Users = USERS, *, asks_users: bool = True
) -> AsyncIterator[DirectApi]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(server_with_users(users))
        address = address_of(server, BOB if not users.is_open else None)
        settings = IndexerSettings(address, folder, 64 * 1024 * 1024)
        indexer = await stack.enter_async_context(running_indexer(settings))
        await indexer.designs.create("d", DESIGN)
        await until_ready(indexer, "d/city")
        access = HttpAccess(address, asks_users=asks_users)
        yield DirectApi(application(indexer, access), access, server)


async def test_every_route_needs_its_right_on_the_indexers_bucket(tmp_path: Path) -> None:
    async with a_direct_api(tmp_path, users_of_the_table()) as api:
        assert api.routes == {(method, path) for method, path, _ in ROUTES}
        for method, path, needed in ROUTES:
            status, _ = await api.ask(method, path)
            assert status == (200 if needed == "anybody" else 401), (method, path)
            for right in Right:
                for bucket in (OWN, OTHER) if right is not Right.SECURE else (EVERYTHING,):
                    name = name_of(right, bucket)
                    status, _ = await api.ask(method, path, authorization(name))
                    # No user of the table has two rights.
                    is_allowed = needed == "anybody" or (right.value, OWN) == (needed, bucket)
                    assert (status not in (401, 403)) == is_allowed, (method, path, name, status)
            # An indexer's answers may be about all keys.
            status, _ = await api.ask(method, path, authorization(OF_SOME_KEYS))
            assert status == (200 if needed == "anybody" else 403), (method, path, status)
            answer = await api.ask(method, path, authorization("bob"))
            assert answer[0] not in (401, 403), (method, path)


async def test_without_users_every_request_is_allowed(tmp_path: Path) -> None:
    async with a_direct_api(tmp_path, Users()) as api:
        for method, path, _ in ROUTES:
            status, _ = await api.ask(method, path)
            assert status not in (401, 403), (method, path)


async def test_an_indexer_may_be_set_to_need_no_log_in(
    tmp_path: Path,
) -> None:
    async with a_direct_api(tmp_path, asks_users=False) as api:
        assert (await api.ask("GET", "/v1/status"))[0] == 200


async def test_a_verdict_on_a_user_is_used_for_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_direct_api(tmp_path, users_of_the_table()) as api:
        name = name_of(Right.READ, OWN)
        reader = authorization(name)
        logged_in = 0

        async def may_read(access: HttpAccess, credentials: Credentials) -> bool:
            nonlocal logged_in
            logged_in += 1
            return await original(access, credentials)

        original = HttpAccess._may_read
        monkeypatch.setattr(HttpAccess, "_may_read", may_read)
        monkeypatch.setattr(http_access, "VERDICT_S", 1000.0)
        for _ in range(3):
            assert (await api.ask("GET", "/v1/status", reader))[0] == 200
        assert logged_in == 1
        assert api.access._verdicts
        for key, verdict in api.access._verdicts.items():
            # The key is a hash. Neither key nor verdict can contain a password.
            assert (type(key), len(key)) == (bytes, 32)
            assert {type(value) for value in attrs.astuple(verdict)} == {bool, float}
        monkeypatch.setattr(http_access, "VERDICT_S", 0.0)
        api.access._verdicts.clear()
        assert (await api.ask("GET", "/v1/status", reader))[0] == 200
        await api.server.users.apply_change(lambda users: users.without_user(name))
        assert (await api.ask("GET", "/v1/status", reader))[0] == 401


async def test_known_users_keep_their_verdict_while_the_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_access, "VERDICT_S", 0.0)
    async with a_direct_api(tmp_path, users_of_the_table()) as api:
        reader, other_user = (authorization(name_of(Right.READ, bucket)) for bucket in (OWN, OTHER))
        for header, expected in ((reader, 200), (other_user, 403)):
            assert (await api.ask("GET", "/v1/status", header))[0] == expected
        nowhere = attrs.evolve(api.access._address, port=1)
        api.access._address = nowhere
        for header, expected in ((reader, 200), (other_user, 403)):
            assert (await api.ask("GET", "/v1/status", header))[0] == expected
        stranger = authorization("bob")
        status, body = await api.ask("GET", "/v1/status", stranger)
        assert (status, body["error"]["code"]) == (502, "server_failed")


class Answers:
    """Takes the place of the server: answers whether a user may read.

    Attributes:
        answer: The next answer: whether the user may read, or the error to raise.
        asked: How many questions were asked.
        wait: Each question waits for this event before its answer.
    """

    def __init__(self) -> None:
        self.answer: bool | UprError = True
        self.asked = 0
        self.wait = trio.Event()
        self.wait.set()

    async def may_read(self, _credentials: Credentials) -> bool:
        self.asked += 1
        await self.wait.wait()
        if isinstance(self.answer, UprError):
            raise self.answer
        return self.answer


def access_with(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> HttpAccess:
    address = Address.parse("upr://127.0.0.1:1/b", Security(credentials=BOB))
    access = HttpAccess(address)
    monkeypatch.setattr(access, "_may_read", answers.may_read)
    return access


async def check(access: HttpAccess, name: str = "ann", host: str = "10.0.0.9") -> None:
    await access.check(Right.READ, authorization(name), f"{host}:50112")


async def test_an_old_verdict_is_used_only_while_the_server_is_away_and_for_a_limited_time(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    access = access_with(answers, monkeypatch)
    await check(access)
    await trio.sleep(http_access.VERDICT_S)
    for refusal in (Status.TOO_MANY, Status.NO_BUCKET):
        answers.answer = ServerError(refusal)
        with pytest.raises(ServerError):
            await check(access)
    answers.answer = BrokenError("away")
    await check(access)
    await trio.sleep(http_access.AWAY_S - 10)
    await check(access)
    await trio.sleep(10)
    with pytest.raises(BrokenError):
        await check(access)


async def test_requests_with_invented_names_do_not_delay_new_verdicts_on_known_users(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    access = access_with(answers, monkeypatch)
    await check(access)
    await trio.sleep(http_access.VERDICT_S)
    answers.wait = trio.Event()
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(check, access, f"made up {number}", f"10.0.1.{number}")
        for _ in range(10):
            nursery.start_soon(check, access)
        await wait_all_tasks_blocked()
        # The server is asked once about the known user. Nine of ten requests did not wait for it.
        assert answers.asked == 1 + LOG_INS_MAX + 1
        assert len(nursery.child_tasks) == 11
        answers.wait.set()


async def test_the_requests_of_one_host_do_not_take_all_turns_of_unknown_users(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts take turns, however many requests each host has."""
    answers = Answers()
    access = access_with(answers, monkeypatch)
    names: list[str] = []

    async def may_read(credentials: Credentials) -> bool:
        names.append(credentials.user)
        return await answers.may_read(credentials)

    monkeypatch.setattr(access, "_may_read", may_read)
    answers.wait = trio.Event()
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(check, access, f"made up {number}", "10.0.0.1")
        await wait_all_tasks_blocked()
        assert len(names) == 1
        nursery.start_soon(check, access, "good")
        await wait_all_tasks_blocked()
        assert names[1:] == ["good"]
        for host in ("10.0.0.2", "10.0.0.3"):
            nursery.start_soon(check, access, f"of {host}", host)
        await wait_all_tasks_blocked()
        before, answers.wait = answers.wait, trio.Event()
        before.set()
        await wait_all_tasks_blocked()
        assert sorted(names[2:]) == ["of 10.0.0.2", "of 10.0.0.3"]
        answers.wait.set()
    assert len(names) == 13
    assert not access._new_turns._hosts


async def test_the_addresses_of_an_ipv6_network_count_as_one_host(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    access = access_with(answers, monkeypatch)
    answers.wait = trio.Event()
    async with trio.open_nursery() as nursery:
        for number in range(1, 10):
            nursery.start_soon(check, access, f"made up {number}", f"[2001:db8::{number}]")
        await wait_all_tasks_blocked()
        assert answers.asked == 1
        answers.wait.set()


async def test_only_one_request_asks_whether_the_server_is_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    access = access_with(answers, monkeypatch)
    names = [f"known {number}" for number in range(10)]
    for name in names:
        await check(access, name)
    answers.answer = BrokenError("away")
    for _ in range(2):
        await trio.sleep(http_access.VERDICT_S)
        answers.asked = 0
        for name in names:
            await check(access, name)
        assert answers.asked == 1
    await trio.sleep(http_access.VERDICT_S)
    answers.answer = False
    for name in names:
        with pytest.raises(NotAllowedError):
            await check(access, name)


async def test_failed_questions_about_unknown_users_count_against_their_host(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for failure in (BrokenError("away"), ServerError(Status.TOO_MANY)):
        answers = Answers()
        access = access_with(answers, monkeypatch)
        answers.answer = failure
        for number in range(HOST_FAILURES_MAX):
            with pytest.raises(type(failure)):
                await check(access, f"made up {number}")
        with pytest.raises(TooManyLogInsError):
            await check(access, "made up")
        with pytest.raises(type(failure)):
            await check(access, "made up", "10.0.0.1")


async def test_failed_log_ins_from_two_hosts_do_not_lock_out_new_users(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    access = access_with(answers, monkeypatch)
    answers.answer = ServerError(Status.LOG_IN_FAILED)
    refusals = 0
    for host in ("10.0.0.1", "10.0.0.2"):
        for number in range(FAILURES_MAX):
            with pytest.raises((LogInNeededError, TooManyLogInsError)) as caught:
                await check(access, f"made up {number}", host)
            refusals += caught.type is TooManyLogInsError
    assert refusals == 2 * FAILURES_MAX - (FAILURES_MAX - 1)
    answers.answer = True
    await check(access)


async def test_requests_at_the_same_time_ask_once_whether_the_server_has_users(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = HttpAccess(Address.parse("upr://127.0.0.1:1/b"))
    question_count = 0

    async def wants_log_in() -> bool:
        nonlocal question_count
        question_count += 1
        await trio.sleep(0.1)
        return False

    monkeypatch.setattr(access, "_ask_wants_log_in", wants_log_in)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(check, access)
    assert question_count == 1

    async def fails() -> bool:
        await trio.sleep(http_access.ASK_TIMEOUT_S)
        raise BrokenError("away")

    async def check_fails() -> None:
        with pytest.raises(BrokenError):
            await check(access)

    access = HttpAccess(Address.parse("upr://127.0.0.1:1/b"))
    monkeypatch.setattr(access, "_ask_wants_log_in", fails)
    with trio.fail_after(http_access.ASK_TIMEOUT_S + 1):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(check_fails)


async def test_no_request_waits_while_the_indexer_asks_again_whether_there_are_users(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = HttpAccess(Address.parse("upr://127.0.0.1:1/b"))
    is_away = False

    async def wants_log_in() -> bool:
        await trio.sleep(0.3)
        if is_away:
            raise BrokenError("away")
        return False

    async def waited_s() -> float:
        began = trio.current_time()
        await check(access)
        return trio.current_time() - began

    monkeypatch.setattr(access, "_ask_wants_log_in", wants_log_in)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(access.run)
        assert await waited_s() == pytest.approx(0.3)
        for is_failing in (False, True, False):
            is_away = is_failing
            for _ in range(20):
                await trio.sleep(0.2)
                assert not await waited_s()
        # Without requests the server is not asked.
        await trio.sleep(5)
        assert await waited_s() == pytest.approx(0.3)
        nursery.cancel_scope.cancel()


async def check_node(access: HttpAccess, name: str = "ann") -> None:
    await access.check_node(authorization(name), "10.0.0.9:50112")


async def test_a_known_node_may_link_for_a_limited_time_while_the_server_hangs(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    access = access_with(answers, monkeypatch)

    async def may_index(_address: Address) -> bool:
        await answers.wait.wait()
        return True

    monkeypatch.setattr(http_access, "_may_index", may_index)
    await check_node(access)
    answers.wait = trio.Event()
    until = trio.current_time() + http_access.AWAY_S
    while trio.current_time() < until - OPEN_S:
        with trio.fail_after(OPEN_S / 1.5):
            await check_node(access)
        await trio.sleep(http_access.NODE_VERDICT_S)
    await trio.sleep_until(until)
    answers.answer = BrokenError("did not answer in time")
    answers.wait.set()
    with pytest.raises(BrokenError):
        await check_node(access)
    with pytest.raises(BrokenError):
        await check_node(access, "bob")


async def test_a_node_may_link_while_a_server_without_users_hangs(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = HttpAccess(Address.parse("upr://127.0.0.1:1/b"))
    hangs = False

    async def wants_log_in() -> bool:
        if hangs:
            await trio.sleep(http_access.ASK_TIMEOUT_S)
            raise BrokenError("away")
        return False

    monkeypatch.setattr(access, "_ask_wants_log_in", wants_log_in)
    await access.check_node("", "10.0.0.9:50112")
    hangs = True
    await trio.sleep(http_access.NODE_VERDICT_S)
    with trio.fail_after(OPEN_S / 1.5):
        await access.check_node("", "10.0.0.9:50112")


async def test_links_that_a_node_opens_at_the_same_time_ask_the_server_once(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = access_with(Answers(), monkeypatch)
    question_count = 0

    async def may_index(_address: Address) -> bool:
        nonlocal question_count
        question_count += 1
        await trio.sleep(0.1)
        return True

    monkeypatch.setattr(http_access, "_may_index", may_index)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(check_node, access)
    assert question_count == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (False, NotAllowedError),
        (ServerError(Status.LOG_IN_FAILED), LogInNeededError),
        (BaseExceptionGroup("", [BrokenError("a"), BrokenError("b")]), None),
    ],
    ids=["not allowed", "another password", "several reasons"],
)
async def test_which_answers_refuse_a_known_node(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    answer: bool | BaseException,
    kind: type[UprError] | None,
) -> None:
    access = access_with(Answers(), monkeypatch)
    is_known = False

    async def may_index(_address: Address) -> bool:
        await trio.lowlevel.checkpoint()
        if not is_known:
            return True
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(http_access, "_may_index", may_index)
    await check_node(access)
    is_known = True
    await trio.sleep(http_access.NODE_VERDICT_S)
    if kind is None:
        await check_node(access)
        with pytest.raises(BrokenError, match="a; b"):
            await check_node(access, "bob")
        return
    for _ in range(2):
        with pytest.raises(kind):
            await check_node(access)


async def test_wrong_passwords_are_refused_and_lock_out_no_known_user(
    tmp_path: Path,
) -> None:
    async with a_direct_api(tmp_path, users_of_the_table()) as api:
        reader = authorization(name_of(Right.READ, OWN))
        assert (await api.ask("GET", "/v1/status", reader))[0] == 200
        failures = api.server.connections.resources.log_ins.failures
        codes: list[int] = []

        async def guess(number: int, host: str) -> None:
            header = authorization("bob", f"guess {number}")
            codes.append((await api.ask("GET", "/v1/status", header, host))[0])

        for number in range(HOST_FAILURES_MAX + 2):
            await guess(number, "10.0.0.1")
        assert codes == [401] * HOST_FAILURES_MAX + [429] * 2
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(guess, number, f"10.0.1.{number}")
        # The server does not yet refuse log-ins from the indexer's host.
        assert FAILURES_MAX <= failures.failure_count < 10
        assert failures.refusal_count == 0
        api.access._verdicts.update(
            {
                key: attrs.evolve(verdict, answered_at=verdict.answered_at - http_access.VERDICT_S)
                for key, verdict in api.access._verdicts.items()
            }
        )
        assert (await api.ask("GET", "/v1/status", reader))[0] == 200


async def test_headers_without_credentials_are_refused(tmp_path: Path) -> None:
    async with a_direct_api(tmp_path) as api:
        for header in ("Bearer x", "Basic", "Basic ?", "Basic " + b64encode(b"bob").decode()):
            status, body = await api.ask("GET", "/v1/status", header)
            assert (status, body["error"]["code"]) == (401, "log_in_needed"), header
        # No server accepts this user name.
        assert (await api.ask("GET", "/v1/status", authorization("a\x00b")))[0] == 401


async def test_upr_index_and_the_client_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = User("reader", VERIFIER, (Grant(Right.READ, OWN),))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(server_with_users(USERS.with_user(reader)))
        settings = IndexerSettings(address_of(server), tmp_path, 64 * 1024 * 1024)
        indexer = await stack.enter_async_context(running_indexer(settings))
        url = await stack.enter_async_context(serving(indexer, "127.0.0.1:0"))
        options = ("--indexer", url)
        refused = await upr_index("list", *options)
        assert refused.exit_code == 3
        assert "the server has users: say who you are" in refused.output
        monkeypatch.setenv("UPR_PASSWORD", PASSWORD)
        create = ("create", "d", "--index", "city=city", *options)
        refused = await upr_index(*create, "--user", "reader")
        assert refused.exit_code == 3
        assert "index" in refused.output
        assert (await upr_index(*create, "--user", "bob")).exit_code == 0
        await until_ready(indexer, "d/city")
        listed = await upr_index("list", *options, "--user", "reader")
        assert "d/city" in listed.output

        def refusal(credentials: Credentials) -> str:
            with (
                IndexClient(url, Security(credentials=credentials)) as client,
                pytest.raises(IndexerError) as caught,
            ):
                client.status()
            return caught.value.code

        wrong = Credentials("reader", "pen")
        assert await trio.to_thread.run_sync(refusal, wrong) == "log_in_needed"


def test_the_client_sends_no_password_over_an_unencrypted_connection() -> None:
    security = Security(credentials=Credentials("bob", PASSWORD))
    with pytest.raises(ValueError, match="would read the password"):
        IndexClient("http://indexer.example:12080", security)
    for url in ("http://127.0.0.1:12080", "http://[::1]:1", "http://localhost", "https://h"):
        IndexClient(url, security).close()
    with pytest.raises(ValueError, match="no users with a colon"):
        IndexClient("https://h", Security(credentials=Credentials("a:b", PASSWORD)))
