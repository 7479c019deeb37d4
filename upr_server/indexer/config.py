"""The indexer's configuration: defaults, a TOML file, the environment, the command line.

Each overrides the one before. It is validated once, whole, before anything is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import platformdirs

from upr_protocol.client import (
    Address,
    AddressError,
    Credentials,
    ReceivedKeysLimits,
    Security,
    TlsSettings,
    resolve_credentials,
)
from upr_protocol.errors import CredentialsError
from upr_server.indexer.indexer import IndexerSettings
from upr_server.indexer.membership import membership_of
from upr_server.indexer.pure.node_map import REPLICAS_MAX
from upr_server.indexer.slices import SLICES_MAX
from upr_server.runtime import (
    ConfigError,
    certificate_files,
    is_loopback,
    load_settings,
    parse_listen,
    refuse_without,
)

ENVIRONMENT_PREFIX: Final = "UPR_INDEXER_"

POOL_SHARE: Final = 0.3
"""How much of the machine's memory the pool takes by default."""

POOL_BYTES_MIN: Final = 8 * 1024 * 1024
"""The smallest pool of a process."""

WORKERS_DEFAULT_MAX: Final = 4
"""How many workers there are by default at most. Each takes some memory, and one stream more."""

_Count = Annotated[int, msgspec.Meta(ge=1)]


class IndexerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an indexer.

    Attributes:
        bucket: The bucket, as `upr://HOST:PORT/BUCKET`, or `uprs://…` for an encrypted connection.
        ca: For `uprs://`, the file with the authorities that may have signed the server's
            certificate; empty for those that the system trusts.
        cert: For `uprs://`, the file with the indexer's own certificate; empty for none.
        cert_key: The file with its key; empty if it is in the same file.
        user: The user as whom the indexer logs in to the server; empty to log in by its
            certificate, or not at all. The user needs the right `read`.
        password_file: The file with that user's password in its first line, which is read at each
            connection.
        listen: `HOST:PORT` for HTTP; port 0 takes a free one.
        tls_certificate: The file with the certificate that the indexer shows over HTTPS, and those
            between it and its authority; empty for HTTP in the clear.
        tls_key: The file with its key; empty if it is in the same file.
        tls_client_ca: The file with the authorities of the clients' certificates; empty to ask
            for none.
        tls_client_certificates: Whether a client without a certificate is refused (`required`) or
            not (`optional`), where `tls_client_ca` is set.
        tls_ca: The file with the authorities of the other nodes' certificates; empty for those that
            the system trusts.
        tls_version_min: The oldest version of TLS, in both directions.
        insecure_no_authentication: Whether everybody may ask over HTTP for what the indexer may
            do: no user is asked for, and the indexer may listen where other machines reach it.
        data_dir: Where indexes are kept; empty for the platform's data directory.
        pool_bytes: The memory for what waits to be indexed and for scans; 0 for 30 % of the
            machine's.
        queues: Among how many queues the partitions are divided.
        workers: How many processes keep the indexes, each a slice of them; 0 for one a core, and
            4 at most, and fewer if the pool is small. With 1 this process does it. Not together
            with `nodes`.
        worker_niceness: By how much workers are nicer than this process, which answers scans; 19
            at most.
        nodes: Where each node of the indexer answers, `http://HOST:PORT` or `https://…`, with
            commas between; the same at each node. Empty for an indexer that is alone.
        node: Which of them this is: its place, from 0, or its URL; empty for the one whose host and
            port are `listen`.
        slices: How many slices the indexes have on all nodes together, the same at each node; 0 for
            one a node.
        replicas: How many copies each slice has beside the first, the same at each node.
        links_max: How many links other nodes may have to this one, half of them from one host; 0
            for four times as many as they need.
        undo_mutations: Of how many documents, those changed last, each slice can undo changes that
            the server loses; beyond it the slice indexes the partition again from the beginning.
        log_level: The least severe event that is logged.
        log_format: `console` for people, `json` for machines.
    """

    bucket: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""
    user: str = ""
    password_file: str = ""
    listen: str = "127.0.0.1:12080"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_client_certificates: Literal["required", "optional"] = "required"
    tls_ca: str = ""
    tls_version_min: Literal["1.2", "1.3"] = "1.3"
    insecure_no_authentication: bool = False
    data_dir: str = ""
    pool_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    queues: _Count = 8
    workers: Annotated[int, msgspec.Meta(ge=0, le=SLICES_MAX)] = 0
    worker_niceness: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0
    nodes: str = ""
    node: str = ""
    slices: Annotated[int, msgspec.Meta(ge=0, le=SLICES_MAX)] = 0
    replicas: Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)] = 0
    links_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    undo_mutations: _Count = 200_000
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    def check_exposure(self) -> None:
        """Checks whether strangers could scan the indexes.

        Raises:
            ConfigError: Other machines reach the indexer, and nothing keeps strangers away.
        """
        host, _ = parse_listen(self.listen)
        wants_certificates = self.tls_client_ca and self.tls_client_certificates == "required"
        # An indexer that logs in with a password follows a server with users, and asks for them.
        wants_users = self.tls_certificate and self.user
        if is_loopback(host) or wants_certificates or wants_users:
            return
        if self.insecure_no_authentication:
            return
        raise ConfigError(
            f"other machines could reach {host} and scan all indexes: have clients log in with "
            "tls_certificate, user and password_file; or require certificates of clients with "
            "tls_certificate and tls_client_ca; or listen on 127.0.0.1; or, in a network of people "
            "you trust, say --insecure-no-authentication"
        )

    def address(self) -> Address:
        """The address of the bucket.

        Raises:
            ConfigError: The setting does not name a bucket.
        """
        tls = TlsSettings(
            self.ca, self.cert, self.cert_key, allows_tls_1_2=self.tls_version_min == "1.2"
        )
        names_files = bool(self.ca or self.cert or self.cert_key)
        security = Security(
            tls if names_files or self.bucket.startswith("uprs://") else None, self._credentials()
        )
        if not self.bucket:
            raise ConfigError(
                "the URL of the bucket is missing: name it, as in upr://127.0.0.1:12000/flights"
            )
        try:
            return Address.parse(self.bucket, security).with_bucket()
        except AddressError as error:
            raise ConfigError(f"bucket is {self.bucket!r}: {error}") from error

    def _credentials(self) -> Credentials | None:
        if bool(self.user) != bool(self.password_file):
            raise ConfigError(
                "user and password_file go together: the user as whom the indexer logs in, and the "
                "file with the password"
            )
        if not self.user:
            return None
        credentials = Credentials(self.user, password_file=self.password_file)
        try:
            resolve_credentials(credentials)
        except CredentialsError as error:
            raise ConfigError(f"password_file: {error}") from error
        return credentials

    def settings(self) -> IndexerSettings:
        """The settings with their defaults resolved.

        Raises:
            ConfigError: A field is wrong.
        """
        parse_listen(self.listen)
        certificate_files(self)
        address = self.address()
        folder = Path(self.data_dir) if self.data_dir else _default_data_dir(address.bucket)
        pool_bytes = self.pool_bytes or int(POOL_SHARE * _memory_bytes())
        membership = membership_of(self, address) if self.nodes else None
        refuse_without(
            "nodes",
            self.nodes,
            node=self.node,
            slices=self.slices,
            replicas=self.replicas,
            links_max=self.links_max,
            tls_ca=self.tls_ca,
        )
        workers = self.workers or _default_workers(pool_bytes)
        slice_count = workers if membership is None else len(membership.kept_slices)
        # With several workers this process has none of the indexes, but merges answers.
        processes = 1 if slice_count == 1 else slice_count + 1
        if pool_bytes < POOL_BYTES_MIN * processes:
            with_workers = "" if slice_count == 1 else f" with {slice_count} workers"
            raise ConfigError(
                f"pool_bytes must be at least {POOL_BYTES_MIN * processes}{with_workers}, not "
                f"{pool_bytes}"
            )
        return IndexerSettings(
            address,
            folder,
            pool_bytes // processes,
            ReceivedKeysLimits(self.undo_mutations, self.undo_mutations * 256),
            self.queues,
            slices=workers if membership is None else membership.node_map.slices,
            membership=membership,
        )


def _default_data_dir(bucket: str) -> Path:
    return Path(platformdirs.user_data_dir("upr-indexer", appauthor=False)) / bucket


def _default_workers(pool_bytes: int) -> int:
    """One a core, but as many as the pool is large enough for."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(WORKERS_DEFAULT_MAX, cores, pool_bytes // POOL_BYTES_MIN - 1))


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load_config(
    path: Path | None, environment: Mapping[str, str], options: Mapping[str, Any]
) -> IndexerConfig:
    """The configuration from `path` (if any), then `environment`, then `options`.

    An option that is None is not set. Environment variables are a field's name in capitals behind
    `UPR_INDEXER_`.

    Raises:
        ConfigError: With the name of what is wrong, and what it should be.
    """
    # `UPR_INDEXER_URL` tells `upr index` where the indexer is.
    config = load_settings(
        IndexerConfig, ENVIRONMENT_PREFIX, path, environment, options, ignored=("url",)
    )
    config.settings()
    return config
