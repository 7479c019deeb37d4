"""An indexer with a certificate: who is served over HTTPS, and who is told what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.indexer.kit import a_server, an_indexer
from tests.indexer.outcomes import status_of, upr_index
from tests.kit.certificates import Authority, Certificates
from tests.kit.process import run
from tests.server.tls_server import tls_server
from upr_protocol.client import IndexClient
from upr_protocol.errors import BrokenError, TlsError
from upr_server.indexer.app import serving
from upr_server.indexer.config import IndexerConfig, load_config
from upr_server.indexer.indexer import running_indexer
from upr_server.runtime import Certificates as DaemonCertificates
from upr_server.runtime import ConfigError, certificate_files


@asynccontextmanager
async def https_indexer(
    certificates: Certificates, data_dir: Path, **settings: Any
) -> AsyncIterator[tuple[str, DaemonCertificates]]:
    """A server and an indexer, both with certificates; gives the indexer's URL."""
    async with tls_server(certificates) as server:
        config = IndexerConfig(
            bucket=server.url("b"),
            ca=str(certificates.authority.ca),
            data_dir=str(data_dir),
            pool_bytes=8 * 1024 * 1024,
            **{**certificates.server.settings(), **settings},
        )
        files = certificate_files(config)
        assert files is not None
        certificates_shown = DaemonCertificates(files)
        async with (
            running_indexer(config.settings()) as indexer,
            serving(indexer, "127.0.0.1:0", certificates_shown) as url,
        ):
            yield url, certificates_shown


async def test_an_indexer_with_a_certificate_speaks_https_only(
    certificates: Certificates, tmp_path: Path
) -> None:
    authority = str(certificates.authority.ca)
    async with https_indexer(certificates, tmp_path) as (url, _):
        assert url.startswith("https://")
        await status_of(url, certificates.security())
        listed = await upr_index("list", "--indexer", url, "--ca", authority)
        assert listed.exit_code == 0, listed.output
        with pytest.raises(TlsError, match="no authority that is trusted here"):
            await status_of(url)
        with pytest.raises(BrokenError, match="does not answer"):
            await status_of(url.replace("https", "http"))
        target = url.removeprefix("https://")
        client = await run(("openssl", "s_client", "-connect", target, "-CAfile", authority))
        assert "New, TLSv1.3" in client.out
        refusal = await run(("openssl", "s_client", "-connect", target, "-tls1_2"))
        assert refusal.code != 0
        assert "no peer certificate available" in refusal.out


async def test_clients_need_a_certificate_where_a_setting_asks_for_it(
    certificates: Certificates, tmp_path: Path
) -> None:
    settings = {"tls_client_ca": str(certificates.authority.ca)}
    async with https_indexer(certificates, tmp_path, **settings) as (url, _):
        await status_of(url, certificates.security_of(certificates.client))
        with pytest.raises(BrokenError, match="asks for a certificate"):
            await status_of(url, certificates.security())
        with pytest.raises(BrokenError, match="asks for a certificate"):
            await status_of(url, certificates.security_of(certificates.unknown))


async def test_a_renewed_certificate_is_shown_to_the_next_connection(
    certificates: Certificates, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    first_certificate, renewed = (
        authority.sign("shown"),
        authority.sign("renewed", common_name="renewed"),
    )
    async with https_indexer(certificates, tmp_path / "data", **first_certificate.settings()) as (
        url,
        files,
    ):
        command = ("openssl", "s_client", "-connect", url.removeprefix("https://"))
        assert "CN=localhost" in (await run(command)).out.replace(" ", "")
        first_certificate.replace_by(renewed)
        files.reload()
        assert "CN=renewed" in (await run(command)).out.replace(" ", "")


async def test_https_to_an_indexer_in_the_clear_says_what_to_write(
    certificates: Certificates, tmp_path: Path
) -> None:
    async with (
        a_server() as server,
        an_indexer(server.url("b"), tmp_path) as indexer,
        serving(indexer, "127.0.0.1:0") as url,
    ):
        with pytest.raises(TlsError, match="http:// in place of https://"):
            await status_of(url.replace("http", "https"), certificates.security())


def test_settings_without_use_are_refused(certificates: Certificates) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(None, {}, {"bucket": "upr://h/b", **options})
        return str(caught.value)

    assert "tls_key has no use without tls_certificate" in refusal(tls_key="key.pem")
    assert "begins with uprs://" in refusal(ca=str(certificates.authority.ca))


def test_a_client_does_not_send_its_certificate_in_the_clear(certificates: Certificates) -> None:
    with pytest.raises(ValueError, match="is not encrypted"):
        IndexClient("http://127.0.0.1:12080", certificates.security())
