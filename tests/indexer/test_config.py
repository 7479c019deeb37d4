"""What an indexer can be told, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from upr_server.daemon import ConfigError
from upr_server.indexer.config import load_config

BUCKET = {"bucket": "upr://h:1/b"}


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "indexer.toml"
    path.write_text('bucket = "upr://h:1/b"\nqueues = 2\nlisten = "h:1"')
    environment = {"UPR_INDEXER_QUEUES": "3", "UPR_INDEXER_CONFIG": "x", "UPR_SERVER_QUEUES": "4"}
    config = load_config(path, environment, {"listen": "h:2", "data_dir": None})
    assert (config.queues, config.listen, config.data_dir) == (3, "h:2", "")
    assert config.settings().address.bucket == "b"


def test_a_bucket_has_a_folder_of_its_own() -> None:
    settings = load_config(None, {}, BUCKET).settings()
    assert settings.data_dir.name == "b"
    settings = load_config(None, {}, {**BUCKET, "data_dir": "/d"}).settings()
    assert settings.data_dir == Path("/d")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bucket": ""}, "bucket is ''"),
        ({"bucket": "upr://h:1"}, "bucket is"),
        ({"listen": "nowhere"}, "HOST:PORT"),
        ({"listen": "h:99999"}, "HOST:PORT"),
        ({"pool_bytes": 1}, "pool_bytes is 1"),
        ({"queues": 0}, "queues"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, {}, {**BUCKET, **settings})
