"""The server's configuration: defaults, a TOML file, the environment, the command line.

Each overrides the one before. It is validated once, whole, before anything is opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from upr_protocol.errors import CredentialsError
from upr_protocol.limits import (
    IDENTITY_BYTES_MAX,
    PARTITIONS_DEFAULT,
    PARTITIONS_MAX,
    SEND_TIMEOUT_S,
)
from upr_protocol.partition_map import NODE_NAME
from upr_protocol.security import Credentials, Security, TlsSettings
from upr_protocol.users import UsersError, normalised_name
from upr_server.engine import QUOTA_BYTES_MIN, BucketError, check_bucket
from upr_server.runtime import (
    ConfigError,
    certificate_files,
    is_loopback,
    load_settings,
    parse_listen,
    refuse_without,
)
from upr_server.storage.directory import default_data_dir

ENVIRONMENT_PREFIX: Final = "UPR_SERVER_"

BYTES_MAX: Final = 2**63 - 1
"""More bytes do not fit where their number is stored."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=BYTES_MAX)]


class BucketConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket that the server creates at its start, unless it exists.

    Attributes:
        name: Its name.
        partitions: How many partitions it is created with. A bucket that exists keeps its own.
        quota_bytes: Memory that it may take; 0 for `quota_bytes` of the server, or for the quota
            that a bucket that exists was created with.
    """

    name: str
    partitions: Annotated[int, msgspec.Meta(ge=1, le=PARTITIONS_MAX)] = PARTITIONS_DEFAULT
    quota_bytes: _Bytes = 0


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a server.

    Attributes:
        listen: `HOST:PORT`; port 0 takes a free one.
        identity: The server's name for itself; empty takes the host's name.
        node: What partition maps call this server; empty takes `identity`.
        quota_bytes: The memory quota of a bucket that is created without one.
        connections_max: How many connections may be open at a time.
        partitions_max: How many partitions all buckets may have together; an empty one takes
            some 6 KiB of memory.
        send_timeout_s: How long a peer may take no bytes that wait for it.
        replication_timeout_s: How long replicas may take to have a batch that its publisher wants
            replicated. Then the publisher is told that they do not have it yet.
        undo_mutations: How many of a bucket's newest mutations a replica can undo, about, after a
            failover to another node. A replica that would have to undo more starts from nothing.
        tls_certificate: The file with this server's certificate, and those between it and its
            authority; then every connection is encrypted, to other nodes too, which are shown the
            same certificate. Empty for no encryption. All files are in PEM form, and are read again
            when they change.
        tls_key: The file with the certificate's key; empty if it is in the same file.
        tls_client_ca: The file with the authorities of the clients' certificates; empty to ask
            clients for none.
        tls_client_certificates: Whether a client without a certificate is refused (`required`) or
            not (`optional`), where `tls_client_ca` is set.
        tls_ca: The file with the authorities of the other nodes' certificates; empty for those that
            the system trusts.
        tls_version_min: The oldest version of TLS.
        insecure_no_authentication: Whether the server may listen where other machines reach it,
            though it has no users, or does not encrypt.
        node_user: The user as whom this server logs in to other nodes; empty to log in by its
            certificate. The user needs the right `replicate`.
        node_password_file: The file with that user's password in its first line, which is read at
            each connection.
        audit_log: The file in which it is noted who asked for what, if there are users; empty for
            `audit.jsonl` in the data directory.
        data_dir: Where buckets are kept; empty for the platform's data directory.
        disk_bytes_max: How large each file there may become; 0 for the size of the disk, and at
            most 256 GiB.
        purge_age_s: How old a deletion must be to be forgotten. A consumer that was away for longer
            may have to start again.
        events: Whether the server tells event consumers which buckets were created, deleted and
            updated.
        shutdown_deadline_s: How long peers have to take what is queued when the server stops.
        log_level: The least severe event that is logged.
        log_format: `console` for people, `json` for machines.
        buckets: Buckets that the server creates at its start.
    """

    listen: str = "127.0.0.1:12000"
    identity: str = ""
    node: str = ""
    quota_bytes: Annotated[int, msgspec.Meta(ge=QUOTA_BYTES_MIN, le=BYTES_MAX)] = 1024 * 1024 * 1024
    connections_max: _Count = 10_000
    partitions_max: _Count = 128 * 1024
    send_timeout_s: _Seconds = SEND_TIMEOUT_S
    replication_timeout_s: _Seconds = 30.0
    undo_mutations: Annotated[int, msgspec.Meta(ge=0)] = 64 * 1024
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_client_certificates: Literal["required", "optional"] = "required"
    tls_ca: str = ""
    tls_version_min: Literal["1.2", "1.3"] = "1.3"
    insecure_no_authentication: bool = False
    node_user: str = ""
    node_password_file: str = ""
    audit_log: str = ""
    data_dir: str = ""
    disk_bytes_max: _Bytes = 0
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

    @property
    def data_path(self) -> Path:
        """The data directory."""
        return Path(self.data_dir) if self.data_dir else default_data_dir()

    @property
    def audit_path(self) -> Path:
        """The file of the audit log."""
        return Path(self.audit_log) if self.audit_log else self.data_path / "audit.jsonl"

    def node_security(self) -> Security:
        """How links to other nodes are protected, and how this node logs in there."""
        tls = credentials = None
        if self.tls_certificate:
            tls = TlsSettings(
                self.tls_ca,
                self.tls_certificate,
                self.tls_key,
                allows_tls_1_2=self.tls_version_min == "1.2",
            )
        if self.node_user:
            credentials = Credentials(self.node_user, password_file=self.node_password_file)
        return Security(tls, credentials)

    def check_exposure(self, *, has_users: bool) -> None:
        """Checks whether strangers could do what they like.

        Args:
            has_users: Whether clients must log in.

        Raises:
            ConfigError: Other machines reach the server, and nothing keeps strangers away.
        """
        host, _ = self.address()
        if is_loopback(host) or self.insecure_no_authentication:
            return
        advice = []
        if not self.tls_certificate:
            advice.append("set tls_certificate, so that connections are encrypted")
        wants_certificates = self.tls_client_ca and self.tls_client_certificates == "required"
        if not has_users and not wants_certificates:
            advice.append("make a first user with `upr-server init`, so that clients must log in")
        if advice:
            raise ConfigError(
                f"other machines could reach {host} and read and change everything: "
                f"{'; '.join(advice)}; or listen on 127.0.0.1; or, in a network of people you "
                "trust, say --insecure-no-authentication"
            )

    def check(self) -> None:
        """Checks what the types of the fields do not.

        Raises:
            ConfigError: A setting is invalid; the message says which, and what it should be.
        """
        self.address()
        self._check_names()
        certificate_files(self)
        refuse_without(
            "tls_certificate",
            self.tls_certificate,
            tls_ca=self.tls_ca,
            tls_version_min=self.tls_version_min != "1.3",
        )
        self._check_node_user()
        self._check_buckets()

    def _check_names(self) -> None:
        try:
            identity = self.identity.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"identity must be UTF-8, not {self.identity!r}") from error
        if len(identity) > IDENTITY_BYTES_MAX:
            raise ConfigError(
                f"identity must be at most {IDENTITY_BYTES_MAX} bytes of UTF-8, not {len(identity)}"
            )
        if not self.identity.isprintable():
            raise ConfigError(
                "identity must not have control, format or separator characters, not "
                f"{self.identity!r}"
            )
        if self.node and not NODE_NAME.fullmatch(self.node):
            raise ConfigError(
                "node must be 1 to 100 letters, digits, dots, underscores or hyphens, not "
                f"{self.node!r}"
            )

    def _check_buckets(self) -> None:
        names = [bucket.name for bucket in self.buckets]
        for bucket in self.buckets:
            if names.count(bucket.name) > 1:
                raise ConfigError(
                    f"bucket {bucket.name!r} is listed twice; give each bucket a name of its own"
                )
            try:
                check_bucket(bucket.name, bucket.partitions, bucket.quota_bytes or self.quota_bytes)
            except BucketError as error:
                raise ConfigError(str(error)) from error

    def _check_node_user(self) -> None:
        if bool(self.node_user) != bool(self.node_password_file):
            raise ConfigError(
                "node_user and node_password_file go together: the user as whom this server logs "
                "in to other nodes, and the file with the password"
            )
        if self.node_user:
            # The client is large, and a server without such a user starts its disk before it.
            from upr_protocol.client import resolve_credentials

            try:
                normalised_name(self.node_user, "node_user")
                resolve_credentials(self.node_security().credentials)
            except (CredentialsError, UsersError) as error:
                raise ConfigError(f"node_password_file: {error}") from error

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
) -> ServerConfig:
    """The configuration from `path` (if any), then `environment`, then `options`.

    Options that are None are left out. An environment variable is named `UPR_SERVER_` and the field
    in capitals; `buckets` can only be set in the file.

    Raises:
        ConfigError: A setting is invalid; the message says which, and what it should be.
    """
    if f"{ENVIRONMENT_PREFIX}BUCKETS" in environment:
        raise ConfigError(
            f"the environment variable {ENVIRONMENT_PREFIX}BUCKETS cannot name buckets: write them "
            "in the file of settings (--config), each behind a line [[buckets]]"
        )
    config = load_settings(ServerConfig, ENVIRONMENT_PREFIX, path, environment, options)
    config.check()
    return config
