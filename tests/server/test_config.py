"""The configuration: where it comes from, what overrides what, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

import upr_kernel
from upr_server.app import running_server
from upr_server.cli import main
from upr_server.config import BucketConfig, ServerConfig, load_config
from upr_server.runtime import ConfigError
from upr_server.storage.simulated import SimulatedStore

FILE = """
listen = "0.0.0.0:1"
quota_bytes = 5000000
[[buckets]]
name = "flights"
partitions = 8
"""


def test_without_settings_the_defaults_hold() -> None:
    assert load_config(None, {}, {}) == ServerConfig()
    assert ServerConfig().address() == ("127.0.0.1", 12000)


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "upr.toml"
    path.write_text(FILE)
    config = load_config(path, {}, {})
    assert config.listen == "0.0.0.0:1"
    assert config.buckets == (BucketConfig("flights", 8),)
    config = load_config(path, {"UPR_SERVER_LISTEN": "h:2", "OTHER": "x"}, {})
    assert (config.listen, config.quota_bytes) == ("h:2", 5_000_000)
    config = load_config(path, {"UPR_SERVER_LISTEN": "h:2"}, {"listen": "h:3", "identity": None})
    assert (config.listen, config.identity) == ("h:3", "")


def test_a_variable_that_names_no_setting_is_refused() -> None:
    """As Kubernetes sets it beside a service called `upr-server`."""
    with pytest.raises(ConfigError, match="variable UPR_SERVER_PORT names no setting"):
        load_config(None, {"UPR_SERVER_PORT": "tcp://10.0.0.1:12000"}, {})


def test_a_variable_cannot_name_buckets() -> None:
    with pytest.raises(ConfigError, match=r"UPR_SERVER_BUCKETS cannot .* \[\[buckets\]\]"):
        load_config(None, {"UPR_SERVER_BUCKETS": "planes"}, {})


def test_text_from_the_environment_is_converted() -> None:
    config = load_config(
        None, {"UPR_SERVER_QUOTA_BYTES": "7000000", "UPR_SERVER_SHUTDOWN_DEADLINE_S": "0.5"}, {}
    )
    assert (config.quota_bytes, config.shutdown_deadline_s) == (7_000_000, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "nowhere"}, "HOST:PORT"),
        ({"listen": "h:99999"}, "HOST:PORT"),
        ({"listen": "h:\u0662"}, "HOST:PORT"),
        ({"quota_bytes": "0"}, "quota_bytes"),
        ({"quota_bytes": "1048575"}, "quota_bytes"),
        ({"quota_bytes": str(2**63)}, "quota_bytes"),
        ({"disk_bytes_max": str(2**63)}, "disk_bytes_max"),
        ({"disk_bytes_max": "-1"}, "disk_bytes_max"),
        ({"identity": "é" * 101}, "200 bytes"),
        ({"identity": "\udcff"}, "must be UTF-8"),
        ({"quota_bytes": "many"}, "quota_bytes"),
        ({"log_level": "loud"}, "log_level`; use debug, info, warning or error"),
        ({"tls_version_min": "1.1"}, r"tls_version_min`; use 1\.2 or 1\.3"),
        ({"colour": "red"}, "colour"),
        ({"shutdown_deadline_s": "-1"}, "shutdown_deadline_s"),
        ({"send_timeout_s": "nan"}, "send_timeout_s"),
        ({"tls_ca": "f"}, "tls_ca has no use without tls_certificate"),
        ({"tls_version_min": "1.2"}, "tls_version_min has no use without tls_certificate"),
        ({"node_user": "nodes"}, "node_user and node_password_file go together"),
        ({"node_password_file": "f"}, "node_user and node_password_file go together"),
        ({"node_user": "nodes", "node_password_file": "/nowhere"}, "/nowhere, cannot be read"),
        ({"node_user": "nodes", "node_password_file": "/dev/null"}, "is read at each connection"),
    ],
)
def test_an_invalid_setting_is_refused_by_its_name(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {}, settings)


@pytest.mark.parametrize(
    "text",
    [
        "listen = ",
        "\xff",
        "[[buckets]]\npartitions = 4",
        "[[buckets]]\nname = 'no/slash'",
        "[[buckets]]\nname = 'b'\nquota_bytes = 1000",
        "[[buckets]]\nname = 'b'\n[[buckets]]\nname = 'b'",
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "upr.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        load_config(path, {}, {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file or directory$"):
        load_config(tmp_path / "none.toml", {}, {})


def test_a_printed_configuration_reads_back(tmp_path: Path) -> None:
    config = ServerConfig(
        listen="[::1]:7",
        identity='a "quoted" näme\\ with words',
        data_dir='two\x7fcontrols\tand a "quote"',
        send_timeout_s=float("inf"),
        shutdown_deadline_s=1.5,
        buckets=(BucketConfig("a"), BucketConfig("b", 3, 9_000_000)),
    )
    path = tmp_path / "upr.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(path, {}, {}) == config
    assert config.address() == ("::1", 7)


def test_the_command_prints_what_serve_would_run_with(tmp_path: Path) -> None:
    path = tmp_path / "upr.toml"
    path.write_text(FILE)
    result = CliRunner().invoke(
        main, ["config", "--config", str(path), "--listen", "h:9"], env={"UPR_SERVER_IDENTITY": "n"}
    )
    assert result.exit_code == 0
    assert 'listen = "h:9"' in result.output
    assert 'identity = "n"' in result.output
    assert "partitions = 8" in result.output
    assert f"# kernel: {upr_kernel.BUILD}\n" in result.output


def test_the_command_refuses_a_wrong_address() -> None:
    result = CliRunner().invoke(main, ["config", "--listen", "nowhere"])
    assert result.exit_code == 2
    assert "HOST:PORT" in result.output


@pytest.mark.parametrize("has_users", [False, True])
def test_on_the_loopback_address_nothing_is_needed(has_users: bool) -> None:
    for listen in ("127.0.0.1:0", "[::1]:0", "localhost:0", ":0"):
        ServerConfig(listen=listen).check_exposure(has_users=has_users)


TLS: Final = {"tls_certificate": "server.pem"}


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "db.example:0"])
@pytest.mark.parametrize(
    ("settings", "has_users", "missing"),
    [
        ({}, False, ("tls_certificate", "upr-server init")),
        ({}, True, ("tls_certificate",)),
        (TLS, False, ("upr-server init",)),
        (TLS, True, ()),
        ({**TLS, "tls_client_ca": "ca.pem"}, False, ()),
        (
            {**TLS, "tls_client_ca": "ca.pem", "tls_client_certificates": "optional"},
            False,
            ("upr-server init",),
        ),
        ({"insecure_no_authentication": True}, False, ()),
    ],
)
def test_where_others_reach_it_a_server_keeps_strangers_away(
    listen: str, settings: dict[str, Any], has_users: bool, missing: tuple[str, ...]
) -> None:
    config = ServerConfig(listen=listen, **settings)
    if not missing:
        config.check_exposure(has_users=has_users)
        return
    with pytest.raises(ConfigError) as refusal:
        config.check_exposure(has_users=has_users)
    for expected_text in ("tls_certificate", "upr-server init"):
        assert (expected_text in str(refusal.value)) == (expected_text in missing)
    assert "--insecure-no-authentication" in str(refusal.value)


async def test_such_a_server_does_not_start() -> None:
    refusal = pytest.RaisesExc(ConfigError, match="other machines could reach")
    with pytest.RaisesGroup(refusal, flatten_subgroups=True):
        async with running_server(ServerConfig(listen="0.0.0.0:0"), SimulatedStore()):
            pass
    async with running_server(
        ServerConfig(listen="0.0.0.0:0", insecure_no_authentication=True), SimulatedStore()
    ) as server:
        assert server.port
