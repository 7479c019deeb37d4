"""The server's configuration: defaults, a TOML file, the environment, the command line.

Each overrides the one before. It is validated once, whole, before anything is opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from upr_protocol.limits import (
    IDENTITY_BYTES_MAX,
    PARTITIONS_DEFAULT,
    PARTITIONS_MAX,
    SEND_TIMEOUT_S,
)
from upr_protocol.partition_map import NODE_NAME
from upr_server.engine import QUOTA_BYTES_MIN, BucketError, check_bucket
from upr_server.runtime import ConfigError, load_settings, parse_listen
from upr_server.storage.directory import default_data_dir

ENVIRONMENT_PREFIX: Final = "UPR_SERVER_"

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class BucketConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket that is there from the start: made, or found.

    Attributes:
        name: Its name.
        partitions: How many partitions it is made with; one that was found keeps its own.
        quota_bytes: Memory that it may take; 0 for `quota_bytes` of the server, or for what one
            that was found was made with.
    """

    name: str
    partitions: Annotated[int, msgspec.Meta(ge=1, le=PARTITIONS_MAX)] = PARTITIONS_DEFAULT
    quota_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server can be told.

    Attributes:
        listen: `HOST:PORT`; port 0 takes a free one.
        identity: The server's name for itself; empty takes the host's name.
        node: What partition maps call this server; empty takes `identity`.
        quota_bytes: The memory quota of a bucket that is created without one.
        connections_max: Connections at a time.
        send_timeout_s: How long a peer may take nothing of what waits for it.
        replication_timeout_s: How long replicas may take to have a batch that was to be replicated;
            then its publisher hears that they do not have it yet.
        undo_mutations: How many of a bucket's newest mutations a replica can undo, about, when
            another than its master goes on; beyond it, it begins again from nothing.
        data_dir: Where buckets are kept; empty for the platform's data directory.
        disk_bytes_max: How large each file there may become; 0 for as large as the disk is, and at
            most 256 GiB.
        purge_age_s: How old a deletion must be to be forgotten; a consumer that was away for
            longer may have to begin again.
        events: Whether those who ask are told which buckets were created, deleted and updated.
        shutdown_deadline_s: How long peers have to take what is queued when the server stops.
        log_level: The least severe event that is logged.
        log_format: `console` for people, `json` for machines.
        buckets: Buckets that are there from the start.
    """

    listen: str = "127.0.0.1:12000"
    identity: str = ""
    node: str = ""
    quota_bytes: Annotated[int, msgspec.Meta(ge=QUOTA_BYTES_MIN)] = 1024 * 1024 * 1024
    connections_max: _Count = 10_000
    send_timeout_s: _Seconds = SEND_TIMEOUT_S
    replication_timeout_s: _Seconds = 30.0
    undo_mutations: Annotated[int, msgspec.Meta(ge=0)] = 64 * 1024
    data_dir: str = ""
    disk_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    purge_age_s: _Seconds = 3 * 24 * 3600.0
    events: bool = True
    shutdown_deadline_s: _Seconds = 5.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    buckets: tuple[BucketConfig, ...] = ()

    def address(self) -> tuple[str, int]:
        """The host and port of `listen`.

        Raises:
            ConfigError: It is not `HOST:PORT`.
        """
        return parse_listen(self.listen)

    def data_path(self) -> Path:
        """The data directory."""
        return Path(self.data_dir) if self.data_dir else default_data_dir()

    def check(self) -> None:
        """Looks at what the types of the fields do not tell.

        Raises:
            ConfigError: With what is wrong, and what it should be.
        """
        self.address()
        try:
            identity = self.identity.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"identity is {self.identity!r}, which is not UTF-8") from error
        if len(identity) > IDENTITY_BYTES_MAX:
            raise ConfigError(f"identity is at most {IDENTITY_BYTES_MAX} bytes")
        if self.node and not NODE_NAME.fullmatch(self.node):
            raise ConfigError(
                f"node is {self.node!r}; a node's name is 1 to 100 letters, digits, dots, "
                "underscores or hyphens"
            )
        names = [bucket.name for bucket in self.buckets]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"there are two buckets {name!r}")
        for bucket in self.buckets:
            try:
                check_bucket(bucket.name, bucket.partitions, bucket.quota_bytes or self.quota_bytes)
            except BucketError as error:
                raise ConfigError(str(error)) from error

    def to_toml(self) -> str:
        """The configuration as a TOML file that would produce it."""
        lines = [
            f"{name} = {_toml(getattr(self, name))}"
            for name in self.__struct_fields__
            if name != "buckets"
        ]
        for bucket in self.buckets:
            lines.append("\n[[buckets]]")
            lines += [
                f"{name} = {_toml(getattr(bucket, name))}" for name in bucket.__struct_fields__
            ]
        return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    # Strings, integers and floats are written alike in JSON and TOML; all but these.
    if value == math.inf:
        return "inf"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def load_config(
    path: Path | None, environment: Mapping[str, str], options: Mapping[str, Any]
) -> Config:
    """The configuration from `path` (if any), then `environment`, then `options`.

    Options that are None are not given. Environment variables are a field's name in capitals behind
    `UPR_SERVER_`; `buckets` can only be set in the file.

    Raises:
        ConfigError: With the name of what is wrong, and what it should be.
    """
    config = load_settings(
        Config, ENVIRONMENT_PREFIX, path, environment, options, ignored=("buckets",)
    )
    config.check()
    return config
