"""The indexer's configuration: where it comes from, what overrides what, what is refused."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result

from tests.indexer.processes import UPR_INDEXER
from tests.kit.process import run
from upr_server.indexer.app import serve
from upr_server.indexer.cli import main
from upr_server.indexer.config import IndexerConfig, load_config
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.slices import SliceId
from upr_server.runtime import ConfigError

URL: Final = "upr://127.0.0.1:12000/planes"
FILE: Final = f"""
bucket = "{URL}"
listen = "0.0.0.0:1"
pool_bytes = 9000000
queues = 3
"""


def load(**options: Any) -> IndexerConfig:
    return load_config(None, {}, {"bucket": URL, **options})


def test_defaults_fit_the_machine() -> None:
    assert load() == IndexerConfig(URL)
    settings = load().settings()
    assert settings.address.bucket == "planes"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    processes = 1 if settings.slices == 1 else settings.slices + 1
    assert settings.slices == min(4, len(os.sched_getaffinity(0)))
    assert settings.pool_bytes * processes == pytest.approx(0.3 * memory, rel=0.01)
    assert settings.queues == 8
    assert settings.received_keys_limits.entries == 200_000


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "indexer.toml"
    path.write_text(FILE)
    config = load_config(path, {}, {})
    assert (config.listen, config.pool_bytes, config.queues) == ("0.0.0.0:1", 9_000_000, 3)
    environment = {"UPR_INDEXER_LISTEN": "h:2", "UPR_SERVER_LISTEN": "h:7", "OTHER": "x"}
    config = load_config(path, environment, {})
    assert (config.listen, config.pool_bytes) == ("h:2", 9_000_000)
    options = {"listen": "h:3", "pool_bytes": None, "bucket": "upr://h/other"}
    config = load_config(path, environment, options)
    assert (config.listen, config.pool_bytes) == ("h:3", 9_000_000)
    assert config.settings().address.bucket == "other"


def test_text_from_the_environment_is_converted() -> None:
    environment = {
        "UPR_INDEXER_BUCKET": URL,
        "UPR_INDEXER_POOL_BYTES": "9000000",
        "UPR_INDEXER_QUEUES": "2",
        "UPR_INDEXER_UNDO_MUTATIONS": "7",
        "UPR_INDEXER_DATA_DIR": "/somewhere",
        # These name the file, and where `upr index` finds the indexer: no settings.
        "UPR_INDEXER_CONFIG": "/nowhere.toml",
        "UPR_INDEXER_URL": "http://127.0.0.1:12080",
    }
    settings = load_config(None, environment, {}).settings()
    assert (settings.pool_bytes, settings.queues) == (9_000_000, 2)
    assert settings.received_keys_limits.entries == 7
    assert settings.data_dir == Path("/somewhere")


def test_each_bucket_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load().settings().data_dir == Path("/data/upr-indexer/planes")
    other_settings = load(bucket="upr://127.0.0.1:12000/other").settings()
    assert other_settings.data_dir == Path("/data/upr-indexer/other")


def test_several_nodes_may_be_named() -> None:
    address = load(bucket="upr://a:1,b:2/planes").address()
    assert [(node.host, node.port) for node in address.each_node()] == [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": ""}, "the URL of the bucket is missing: .* upr://"),
        ({"bucket": "planes"}, "bucket is 'planes'.* upr://"),
        ({"bucket": "upr://h:1"}, "the bucket is missing"),
        ({"listen": "nowhere"}, "listen is 'nowhere'; write HOST:PORT"),
        ({"listen": "h:99999"}, "listen is 'h:99999'; write HOST:PORT"),
        ({"listen": "h:\u0662"}, "HOST:PORT"),
        ({"listen": "h:-1"}, "HOST:PORT"),
        ({"pool_bytes": "8388607"}, "pool_bytes must be at least 8388608, not 8388607"),
        (
            {"pool_bytes": "9000000", "workers": "2"},
            "pool_bytes must be at least 25165824 with 2 workers, not 9000000",
        ),
        ({"workers": "-1"}, "workers"),
        ({"workers": "65"}, "workers"),
        ({"worker_niceness": "-1"}, "worker_niceness"),
        ({"worker_niceness": "20"}, "worker_niceness"),
        ({"pool_bytes": "-1"}, "pool_bytes"),
        ({"pool_bytes": "many"}, "pool_bytes"),
        ({"queues": "0"}, "queues"),
        ({"undo_mutations": "0"}, "undo_mutations"),
        ({"log_level": "loud"}, "log_level"),
        ({"log_format": "xml"}, "log_format"),
        ({"colour": "red"}, "colour|UPR_INDEXER_COLOUR"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**settings)
    environment = {f"UPR_INDEXER_{name.upper()}": text for name, text in settings.items()}
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"UPR_INDEXER_BUCKET": URL, **environment}, {})


NODES = "http://127.0.0.1:1,http://127.0.0.1:2/ , http://n:3"


def test_nodes_share_the_slices_by_their_place() -> None:
    settings = load(nodes=NODES, listen="127.0.0.1:2", replicas=1, slices=5).settings()
    membership = settings.membership
    assert membership is not None
    nodes = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://n:3")
    assert membership.node_map == NodeMap(nodes, 5, 1)
    assert (membership.place, membership.url, membership.bucket) == (1, nodes[1], "planes")
    # Two nodes link to each of its slices, and four times as many links are allowed.
    assert membership.links_max == 4 * 2 * len(membership.kept_slices)
    assert settings.slices == 5
    assert settings.kept_slices == [SliceId(index, 5) for index in membership.node_map.kept_by(1)]
    for node in ("2", "http://n:3", "http://n:3/"):
        other = load(nodes=NODES, node=node).settings()
        assert other.membership is not None
        assert other.membership.place == 2
        # A slice a node, without a copy.
        assert other.kept_slices == [SliceId(2, 3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": "http://a:1"}, "two different URLs"),
        ({"nodes": "http://a:1,http://a:1/"}, "two different URLs"),
        ({"nodes": "http://a:1,a:2"}, "nodes has 'a:2'; write http://HOST:PORT"),
        ({"nodes": "http://a:1,http://b"}, "write http://HOST:PORT"),
        ({"nodes": "http://a:1,http://[::1:80"}, "write http://HOST:PORT"),
        ({"nodes": "http://a:1,http://b:x"}, "write http://HOST:PORT"),
        ({"nodes": "http://a:1,http://b:1/x"}, "write http://HOST:PORT"),
        ({"nodes": "http://a:1,http://u:p@b:1"}, "write http://HOST:PORT"),
        ({"nodes": NODES}, "no URL in nodes has the host and port of listen, 127.0.0.1:12080"),
        (
            {"nodes": NODES, "node": "3"},
            "node is '3'; .* place in nodes, from 0 to 2",
        ),
        ({"nodes": NODES, "node": "http://x:1"}, "node is 'http://x:1'"),
        ({"nodes": NODES, "node": "0", "workers": "2"}, "workers and nodes exclude each other"),
        ({"nodes": NODES, "node": "0", "slices": "2"}, "slices must be from 3, one a node, to 64"),
        ({"nodes": NODES, "node": "0", "replicas": "3"}, "replicas"),
        (
            {"nodes": "http://a:1,http://b:1", "node": "0", "replicas": "2"},
            "there are nodes, 2",
        ),
        ({"nodes": "http://a:1,https://b:1", "node": "0"}, "has http:// and https://"),
        ({"nodes": "https://a:1,https://b:1", "node": "0"}, "with tls_certificate all nodes"),
        ({"node": "1"}, "node has no use without nodes"),
        ({"slices": "4"}, "slices has no use without nodes"),
        ({"replicas": "1"}, "replicas has no use without nodes"),
        ({"links_max": "9"}, "links_max has no use without nodes"),
        (
            {"nodes": NODES, "node": "0", "links_max": "3"},
            "links_max must be at least 4, twice as many as the other nodes need, not 3",
        ),
        ({"tls_ca": "ca.pem"}, "tls_ca has no use without nodes"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(settings: dict[str, str], message: str) -> None:
    environment = {f"UPR_INDEXER_{name.upper()}": text for name, text in settings.items()}
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"UPR_INDEXER_BUCKET": URL, **environment}, {})


def test_a_password_is_not_sent_to_nodes_in_the_clear(tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("pencil\n")
    password_file.chmod(0o600)
    options = {"nodes": NODES, "node": "0", "password_file": str(password_file)}
    with pytest.raises(ConfigError, match="nodes are not encrypted"):
        load(**options, user="bob")
    with pytest.raises(ConfigError, match="a colon"):
        load(**options, user="b:ob")
    here = {**options, "nodes": "http://127.0.0.1:1,http://localhost:2"}
    assert load(**here, user="bob").settings().membership is not None


@pytest.mark.parametrize("text", ["listen = ", "\xff", "queues = 'three'", "colour = 'red'"])
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "indexer.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        load_config(path, {}, {"bucket": URL})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml", {}, {"bucket": URL})


# The command.


def command(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment, prog_name="upr-indexer")


def test_help_names_every_setting() -> None:
    for option in ("--help", "-h"):
        result = command(option)
        assert result.exit_code == 0
        # The bucket is the argument.
        for name in IndexerConfig.__struct_fields__[1:]:
            assert f"--{name.replace('_', '-')}" in result.output
        assert "Usage: upr-indexer [OPTIONS] URL" in result.output
        assert "upr://HOST:PORT/BUCKET" in result.output
        assert f"[default: {IndexerConfig().listen}]" in result.output


def test_the_version_is_printed() -> None:
    result = command("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"upr-indexer, version \S+\n", result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the URL of the bucket is missing"),
        (["planes"], "bucket is 'planes'"),
        ([URL, "more"], "unexpected extra argument (more)"),
        ([URL, "--listen", "nowhere"], "listen is 'nowhere'; write HOST:PORT"),
        ([URL, "--pool-bytes", "5"], "pool_bytes must be at least 8388608, not 5"),
        ([URL, "--pool-bytes", "many"], "'many' is not a valid integer"),
        ([URL, "--queues", "0"], "queues"),
        ([URL, "--undo-mutations", "-1"], "undo_mutations"),
        ([URL, "--log-level", "loud"], "log_level"),
        ([URL, "--log-format", "xml"], "log_format"),
        ([URL, "--config", "/no/such.toml"], "/no/such.toml cannot be read"),
        ([URL, "--colour", "red"], "No such option"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Try 'upr-indexer --help' for help." in result.output


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "indexer.toml"
    path.write_text("queues = 0")
    result = command(URL, UPR_INDEXER_CONFIG=str(path))
    assert result.exit_code == 2
    assert "queues" in result.output


async def test_a_failed_start_prints_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listen = f"127.0.0.1:{listener.getsockname()[1]}"
        options = ("--listen", listen, "--data-dir", str(tmp_path / "data"))
        finished = await run((*UPR_INDEXER, "upr://127.0.0.1:1/planes", *options))
    assert finished.code == 1
    assert finished.out == ""
    last = finished.err.splitlines()[-1]
    assert last.startswith(f"upr-indexer: cannot listen on {listen}: Address already in use")

    (tmp_path / "file").write_text("")
    options = ("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "file"))
    finished = await run((*UPR_INDEXER, "upr://127.0.0.1:1/planes", *options))
    assert finished.code == 1
    assert finished.err.splitlines()[-1].startswith("upr-indexer: ")
    assert str(tmp_path / "file") in finished.err
    assert "Traceback" not in finished.err


TLS: Final = {"tls_certificate": "indexer.pem", "tls_client_ca": "ca.pem"}


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "indexer.example:0"])
@pytest.mark.parametrize(
    ("settings", "is_safe"),
    [
        ({}, False),
        ({"tls_certificate": "indexer.pem"}, False),
        (TLS, True),
        ({**TLS, "tls_client_certificates": "optional"}, False),
        ({"insecure_no_authentication": True}, True),
        # An indexer that logs in follows a server with users. It asks for users, too, over an
        # encrypted link.
        ({"tls_certificate": "indexer.pem", "user": "bob"}, True),
        ({"user": "bob"}, False),
    ],
)
def test_where_others_reach_it_an_indexer_keeps_strangers_away(
    listen: str, settings: dict[str, Any], is_safe: bool
) -> None:
    IndexerConfig(URL, listen="127.0.0.1:0", **settings).check_exposure()
    config = IndexerConfig(URL, listen=listen, **settings)
    if is_safe:
        config.check_exposure()
    else:
        with pytest.raises(ConfigError, match="--insecure-no-authentication"):
            config.check_exposure()


async def test_such_an_indexer_does_not_start(tmp_path: Path) -> None:
    config = load(listen="0.0.0.0:0", data_dir=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="other machines could reach"):
        await serve(config, lambda _: None)
    assert not (tmp_path / "data").exists()
