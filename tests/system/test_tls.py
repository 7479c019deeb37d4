"""A server process with a certificate, and OpenSSL's own client."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.kit.certificates import Authority, Certificate, Certificates, encrypted
from tests.kit.process import (
    UPR,
    UPR_SERVER,
    Finished,
    ServerProcess,
    children_of,
    eventually,
    run,
    server_process,
)
from tests.system.certificate_options import options
from upr_protocol.client import connect
from upr_protocol.ids import Durability


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
            refusal = await s_client(server, version, "-cipher", "ALL:@SECLEVEL=0")
            assert refusal.code != 0
            assert "alert protocol version" in refusal.err


async def test_openssl_sees_1_2_where_a_setting_allows_it(certificates: Certificates) -> None:
    variables = {"UPR_SERVER_TLS_VERSION_MIN": "1.2"}
    async with server_process(*options(certificates.server), variables=variables) as server:
        client = await s_client(server, "-tls1_2")
        assert "New, TLSv1.2, Cipher is ECDHE-ECDSA-AES256-GCM-SHA384" in client.out
        # No cipher without forward secrecy, and nothing older.
        for arguments in (("-tls1_2", "-cipher", "AES256-SHA"), ("-tls1_1",)):
            refusal = await s_client(server, *arguments)
            assert refusal.code != 0


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
        await eventually(lambda: bool(server.events("certificate read again")), "it is read")
        assert "CN=renewed" in (await s_client(server)).out.replace(" ", "")


async def test_a_hangup_that_reaches_the_disk_s_processes_ends_none_of_them(
    certificates: Certificates,
) -> None:
    """A service manager sends a signal to all processes of a service, and so does a terminal."""
    async with server_process(*options(certificates.server)) as server:
        url, security = server.url().replace("upr:", "uprs:"), certificates.security()
        async with connect(encrypted(url, security)) as client:
            await client.create_bucket("b", 4)
        async with connect(encrypted(f"{url}b", security)) as client:
            for times in (1, 2):
                # The one process writes for this, and the other one reads.
                await client.set("k", "v", durability=Durability.PERSISTED)
                await client.seqnos_at_time(0)
                for pid in (*children_of(server.process.pid), server.process.pid):
                    os.kill(pid, signal.SIGHUP)
                await server.logged("certificate read again", times)


async def test_the_system_s_authorities_are_those_of_a_file_that_a_variable_names(
    certificates: Certificates,
) -> None:
    async with server_process(*options(certificates.server), errors=()) as server:
        command = (*UPR, "bucket", "list", f"uprs://127.0.0.1:{server.port}")
        refusal = await run(command)
        assert refusal.code == 4
        assert "no authority that is trusted here" in refusal.err
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
            process_result = await run((*UPR, "bucket", "list", url, "--tls-insecure"))
            assert process_result.code == 0, process_result
            assert "WARNING: the server's certificate is not verified" in process_result.err


async def test_files_of_no_use_keep_a_server_from_starting(certificates: Certificates) -> None:
    missing_path = certificates.folder / "missing.pem"
    open_key = certificates.authority.sign("open-key")
    open_key.key.chmod(0o644)
    for certificate, sentence in (
        (Certificate(missing_path, certificates.server.key), "tls_certificate: "),
        (Certificate(certificates.server.cert, missing_path), "tls_key: "),
        (open_key, "tls_key: others can use the key in "),
    ):
        process_result = await run(
            (*UPR_SERVER, "serve", "--listen", "127.0.0.1:0", *options(certificate))
        )
        assert process_result.code == 1
        assert f"upr-server: {sentence}" in process_result.err
