"""A server process with a certificate, OpenSSL's own client, and somebody who listens."""

from __future__ import annotations

import json
import signal
import sys
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.kit.certificates import Authority, Certificate, Certificates
from tests.kit.effort import effort
from tests.kit.process import (
    UPR,
    UPR_SERVER,
    Finished,
    ServerProcess,
    eventually,
    run,
    server_process,
)
from tests.kit.proxy import proxy_to
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import new_verifier
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users
from upr_server.storage.offline.first_users import save_first_users

SECRETS: Final = ("geheimschluessel", "geheimwert", "geheimbucket")
"""What must not be seen: keys, values and a bucket's name."""

PASSWORD, NEW_PASSWORD = "geheimpasswort", "geheimeres"
"""What is not even seen in the clear."""

ADMIN: Final = User(
    "ada",
    new_verifier(PASSWORD, b"sixteen bytes...", SCRAM_ITERATIONS_DEFAULT),
    tuple(Grant(right, EVERYTHING) for right in Right),
)
"""Who does everything, and is the nodes' user, too."""

IN_ONE_PROCESS: Final = (
    "import json, sys; from upr_protocol.cli import main\n"
    "for arguments in json.loads(sys.argv[1]): main(arguments, standalone_mode=False)"
)
"""Runs several commands."""


def options(certificate: Certificate, *more: str) -> tuple[str, ...]:
    """The options of a server with a certificate."""
    return (
        *("--tls-certificate", str(certificate.cert)),
        *("--tls-key", str(certificate.key), *more),
    )


async def s_client(server: ServerProcess, *arguments: str) -> Finished:
    """OpenSSL's own client, which says what it sees and ends."""
    return await run(("openssl", "s_client", "-connect", f"127.0.0.1:{server.port}", *arguments))


async def test_openssl_sees_1_3_only(certificates: Certificates) -> None:
    authority = str(certificates.authority.ca)
    async with server_process(*options(certificates.server)) as server:
        client = await s_client(server, "-CAfile", authority, "-verify_return_error")
        assert "Protocol  : TLSv1.3" in client.out or "New, TLSv1.3" in client.out
        assert "Verify return code: 0 (ok)" in client.out
        for version in ("-tls1_2", "-tls1_1", "-tls1"):
            refused = await s_client(server, version, "-cipher", "ALL:@SECLEVEL=0")
            assert refused.code != 0
            assert "alert protocol version" in refused.err


async def test_openssl_sees_1_2_where_a_setting_allows_it(certificates: Certificates) -> None:
    variables = {"UPR_SERVER_TLS_VERSION_MIN": "1.2"}
    async with server_process(*options(certificates.server), variables=variables) as server:
        client = await s_client(server, "-tls1_2")
        assert "New, TLSv1.2, Cipher is ECDHE-ECDSA-AES256-GCM-SHA384" in client.out
        # No cipher without forward secrecy, and nothing older.
        for arguments in (("-tls1_2", "-cipher", "AES256-SHA"), ("-tls1_1",)):
            refused = await s_client(server, *arguments)
            assert refused.code != 0


async def test_a_certificate_is_renewed_on_sighup(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first_certificate, renewed = (
        authority.sign("shown"),
        authority.sign("renewed", common_name="renewed"),
    )
    async with server_process(*options(first_certificate), errors=()) as server:
        assert "CN=localhost" in (await s_client(server)).out.replace(" ", "")
        first_certificate.replace_by(renewed)
        server.process.send_signal(signal.SIGHUP)
        await eventually(lambda: bool(server.events("certificate read anew")), "it is read")
        assert "CN=renewed" in (await s_client(server)).out.replace(" ", "")


async def test_the_system_s_authorities_are_those_of_a_file_that_a_variable_names(
    certificates: Certificates,
) -> None:
    async with server_process(*options(certificates.server), errors=()) as server:
        command = (*UPR, "bucket", "list", f"uprs://127.0.0.1:{server.port}")
        refused = await run(command)
        assert refused.code == 4
        assert "no authority that is trusted here" in refused.err
        trusted = {"SSL_CERT_FILE": str(certificates.authority.ca)}
        accepted = await run(command, variables=trusted)
        assert accepted.code == 0, accepted


async def test_a_certificate_that_is_not_to_be_verified_is_warned_of_each_time(
    certificates: Certificates,
) -> None:
    async with server_process(*options(certificates.expired)) as server:
        url = f"uprs://127.0.0.1:{server.port}"
        assert (await run((*UPR, "bucket", "list", url))).code == 4
        for _ in range(2):
            ended = await run((*UPR, "bucket", "list", url, "--tls-insecure"))
            assert ended.code == 0, ended
            assert "WARNING: the server's certificate is not verified" in ended.err


async def test_files_of_no_use_keep_a_server_from_starting(certificates: Certificates) -> None:
    missing = certificates.folder / "missing.pem"
    open_key = certificates.authority.sign("open-key")
    open_key.key.chmod(0o644)
    for certificate, sentence in (
        (Certificate(missing, certificates.server.key), "tls_certificate: "),
        (Certificate(certificates.server.cert, missing), "tls_key: "),
        (open_key, "tls_key: others can use the key in "),
    ):
        ended = await run((*UPR_SERVER, "serve", "--listen", "127.0.0.1:0", *options(certificate)))
        assert ended.code == 1
        assert f"upr-server: {sentence}" in ended.err


async def do_everything(
    url: str, other_node: str, variables: Mapping[str, str], folder: Path
) -> None:
    """Runs each command to a server that has something to hide. `upr events` does not end, and its
    messages are among those that the other commands hear."""
    key, value, bucket = SECRETS
    target = f"{url}{bucket}"

    async def command(*arguments: str) -> str:
        ended = await run((*UPR, *arguments), variables=variables)
        assert ended.code == 0, ended
        return ended.out

    rows = folder / "rows.csv"
    rows.write_text("id,text\n" + "".join(f"{key}{n},{value}{n}\n" for n in range(2000)))
    await command("bucket", "create", target, "--partitions", "4")
    await command("load", target, str(rows), "--key", "id")
    await command("set", target, key, value)
    assert value in await command("get", target, key)
    await command("append", target, key, value)
    await command("increment", target, f"{key}-count")
    await command("delete", target, f"{key}1")
    tail = await command("tail", target, "--until", "caught-up", "--resume", str(folder / "state"))
    assert json.dumps(value)[1:-1] in tail
    await command("explain", target, str(folder / "state"))
    await command("tail", target, "--until", "caught-up", "--state", str(folder / "copy"))
    await command("replicas", "add", target, other_node)
    await command("takeover", target, "--all-of", "a", "--to", "b")
    assert value in await command("get", target, key)
    (folder / "new").write_text(NEW_PASSWORD)
    (folder / "new").chmod(0o600)
    on_some = ("read,write", bucket, "--prefix", key)
    several = (
        ("partitions", target),
        ("stats", target),
        ("bucket", "list", url),
        ("leases", "list", target),
        ("user", "add", url, "eve", "--new-password-file", str(folder / "new")),
        ("user", "password", url, "eve", "--new-password-file", str(folder / "new")),
        ("user", "grant", url, "eve", *on_some),
        ("user", "limit", url, "eve", "--streams", "5"),
        ("role", "add", url, "editors"),
        ("role", "grant", url, "editors", *on_some),
        ("user", "assign", url, "eve", "editors"),
        ("user", "list", url),
        ("role", "list", url),
        ("user", "withdraw", url, "eve", "editors"),
        ("role", "revoke", url, "editors", *on_some),
        ("role", "remove", url, "editors"),
        ("user", "revoke", url, "eve", *on_some),
        ("user", "remove", url, "eve"),
    )
    program = (sys.executable, "-c", IN_ONE_PROCESS, json.dumps(several))
    listed = await run(program, variables=variables)
    assert listed.code == 0, listed
    assert "editors" in listed.out
    await command("replicas", "remove", target, "a")
    await command("bucket", "delete", target, "--yes")


@pytest.mark.parametrize("is_encrypted", effort([True], [True, False]))
async def test_who_listens_in_between_sees_nothing(
    certificates: Certificates, tmp_path: Path, is_encrypted: bool
) -> None:
    ca = str(certificates.authority.ca)
    password_file = tmp_path / "password"
    password_file.write_text(PASSWORD)
    password_file.chmod(0o600)
    more: tuple[str, ...] = ("--node-user", ADMIN.name, "--node-password-file", str(password_file))
    if is_encrypted:
        # Each node is the other's client, and must show its certificate to it.
        more += options(certificates.server, "--tls-ca", ca)
    for name in "ab":
        save_first_users(tmp_path / name, Users(1, {ADMIN.name: ADMIN}, b"secret"))
    async with (
        server_process("--node", "a", *more, data_dir=tmp_path / "a") as near,
        server_process("--node", "b", *more, data_dir=tmp_path / "b") as far,
        proxy_to("127.0.0.1", near.port) as near_proxy,
        proxy_to("127.0.0.1", far.port) as far_proxy,
    ):
        near_proxy.recorded, far_proxy.recorded = bytearray(), bytearray()
        url, variables = near_proxy.url(), {"UPR_USER": ADMIN.name, "UPR_PASSWORD": PASSWORD}
        if is_encrypted:
            url, variables["UPR_CA"] = url.replace("upr://", "uprs://"), ca
        await do_everything(url, f"b=127.0.0.1:{far_proxy.port}", variables, tmp_path)
        for proxy in (near_proxy, far_proxy):
            assert len(proxy.recorded or b"") > 5_000
            for secret in SECRETS:
                # In the clear all of it is there: so this test would see it.
                assert (secret.encode() in (proxy.recorded or b"")) is not is_encrypted
            for password in (PASSWORD, NEW_PASSWORD):
                assert password.encode() not in (proxy.recorded or b"")
                assert b64encode(password.encode()) not in (proxy.recorded or b"")
