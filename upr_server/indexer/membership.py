"""An indexer's place among several nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol
from urllib.parse import urlsplit

import attrs
import trio

from upr_protocol.client import Address, Security, TlsSettings, resolve_credentials
from upr_protocol.errors import UprError
from upr_protocol.security import UNPROTECTED
from upr_server.indexer.bucket_histories import BucketHistories
from upr_server.indexer.link_limit import LINKS_FACTOR, LINKS_FACTOR_MIN
from upr_server.indexer.pure.node_map import NodeMap
from upr_server.indexer.remote_slice import LinkStream, RemoteSlice
from upr_server.indexer.slices import SLICES_MAX, SliceId
from upr_server.indexer.web_socket import open_web_socket
from upr_server.runtime import ConfigError, is_loopback, parse_listen

PATH: Final = "/v1/slices/{index:int}"
"""Where a node answers links to a slice. The query names the map that the other node has, and says
which bucket it follows."""


class NotMySliceError(UprError):
    """A node is asked for a slice that it does not keep, or by a node with another map.

    Attributes:
        node_map: This node's map.
    """

    def __init__(self, node_map: NodeMap, reason: str) -> None:
        self.node_map = node_map
        super().__init__(reason)


@attrs.frozen
class Membership:
    """An indexer's place among several nodes.

    Attributes:
        node_map: Which node keeps what.
        place: This node's place in the list.
        bucket: The name of the bucket.
        histories: Tell that bucket from others of its name.
        links_max: How many links other nodes may have to this one, half of them from one host.
        security: Which certificates of other nodes count, and as whom to log in to them.
        open_stream: Opens a stream to a URL.
    """

    node_map: NodeMap
    place: int
    bucket: str
    histories: BucketHistories
    links_max: int
    security: Security = UNPROTECTED
    open_stream: Callable[[str, Security], Awaitable[LinkStream]] = open_web_socket

    @property
    def url(self) -> str:
        """Where this node answers."""
        return self.node_map.nodes[self.place]

    @property
    def kept_slices(self) -> list[SliceId]:
        """The slices that this node keeps."""
        count = self.node_map.slices
        return [SliceId(index, count) for index in self.node_map.kept_by(self.place)]

    def remote_slice(self, slice_id: SliceId, place: int) -> RemoteSlice:
        """A slice at another node."""
        url = self.node_map.nodes[place]
        path = PATH.replace("{index:int}", str(slice_id.index))
        fingerprint = self.node_map.fingerprint(self.bucket)
        link_url = f"{url}{path}?map={fingerprint}"
        return RemoteSlice(slice_id, url, partial(self._open_link, link_url))

    async def _open_link(self, url: str) -> LinkStream:
        url = f"{url}&bucket={await self.histories.statement()}"
        # The file with the password is read at each connection.
        credentials = self.security.credentials
        if credentials is not None and credentials.password_file:
            credentials = await trio.to_thread.run_sync(resolve_credentials, credentials)
        return await self.open_stream(url, attrs.evolve(self.security, credentials=credentials))

    async def check(self, index: int, fingerprint: str, statement: str) -> None:
        """Checks what another node asks for.

        Args:
            index: A slice.
            fingerprint: The fingerprint of the other node's map.
            statement: What it says of its bucket; see `BucketHistories.statement`.

        Raises:
            NotMySliceError: It is another one's, or the other node has another map.
            OtherBucketError: The other node follows another bucket.
            BrokenError: The server has not answered yet, so that this cannot be told.
        """
        self._check_slice(index, fingerprint)
        await self.histories.check(statement, self.url)

    def _check_slice(self, index: int, fingerprint: str) -> None:
        if fingerprint != self.node_map.fingerprint(self.bucket):
            raise NotMySliceError(
                self.node_map,
                f"{self.url} has another list of nodes, number of slices or of replicas, or "
                "another bucket, or its program is of another version: start every node with the "
                "same ones",
            )
        if index >= self.node_map.slices:
            raise NotMySliceError(
                self.node_map, f"there is no slice {index}: there are {self.node_map.slices}"
            )
        holders = self.node_map.holders(index)
        if self.place not in holders:
            urls = ", ".join(self.node_map.nodes[place] for place in holders)
            raise NotMySliceError(
                self.node_map,
                f"slice {index} of {self.node_map.slices} is not at {self.url}, but at {urls}",
            )


class NodeSettings(Protocol):
    """The settings that say which nodes there are."""

    @property
    def nodes(self) -> str:
        """Where each node answers, with commas between."""

    @property
    def node(self) -> str:
        """Which of them this is."""

    @property
    def slices(self) -> int:
        """How many slices there are; 0 for one a node."""

    @property
    def replicas(self) -> int:
        """How many copies each has beside the first."""

    @property
    def links_max(self) -> int:
        """How many links other nodes may have to this one; 0 for the default."""

    @property
    def workers(self) -> int:
        """Must be 0."""

    @property
    def listen(self) -> str:
        """Where this node listens."""

    @property
    def tls_ca(self) -> str:
        """The authorities of the other nodes' certificates."""

    @property
    def tls_certificate(self) -> str:
        """This node's certificate."""

    @property
    def tls_key(self) -> str:
        """The key of this node's certificate."""

    @property
    def tls_version_min(self) -> str:
        """The oldest version of TLS."""


def membership_of(config: NodeSettings, address: Address) -> Membership:
    """The place that settings give an indexer.

    Args:
        config: The settings.
        address: The bucket, with the credentials of the indexer.

    Raises:
        ConfigError: A setting is wrong, or contradicts another one.
    """
    nodes = tuple(_url(text) for text in config.nodes.split(","))
    if len(nodes) < 2 or len(set(nodes)) < len(nodes):
        raise ConfigError("nodes must have two different URLs at least, with commas between")
    slices = config.slices or len(nodes)
    if config.workers:
        raise ConfigError(
            "workers and nodes exclude each other: with nodes, each node has a worker for each "
            "slice that it keeps; set slices, the same at each node"
        )
    if not len(nodes) <= slices <= SLICES_MAX:
        raise ConfigError(f"slices must be from {len(nodes)}, one a node, to {SLICES_MAX}")
    if config.replicas >= len(nodes):
        raise ConfigError(f"replicas must be fewer than there are nodes, {len(nodes)}")
    place = _place(nodes, config)
    _check_encryption(nodes, place, config, address)
    tls = TlsSettings(
        config.tls_ca,
        config.tls_certificate,
        config.tls_key,
        allows_tls_1_2=config.tls_version_min == "1.2",
    )
    security = Security(tls if config.tls_certificate else None, address.security.credentials)
    node_map = NodeMap(nodes, slices, config.replicas)
    links_max = _links_max(node_map, place, config)
    histories = BucketHistories(address)
    return Membership(node_map, place, address.bucket, histories, links_max, security)


def _links_max(node_map: NodeMap, place: int, config: NodeSettings) -> int:
    """How many links other nodes may have. Each needs one to each slice that this one keeps."""
    needed_links = (len(node_map.nodes) - 1) * len(list(node_map.kept_by(place)))
    if 0 < config.links_max < LINKS_FACTOR_MIN * needed_links:
        raise ConfigError(
            f"links_max must be at least {LINKS_FACTOR_MIN * needed_links}, twice as many as the "
            f"other nodes need, not {config.links_max}"
        )
    return config.links_max or LINKS_FACTOR * needed_links


def _url(text: str) -> str:
    """A node's URL, as it is compared."""
    text = text.strip().rstrip("/")
    try:
        parts = urlsplit(text)
        is_url = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname and parts.port)
            and not (parts.path or parts.query or parts.username)
        )
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"nodes has {text!r}; write http://HOST:PORT or https://HOST:PORT")
    return text


def _place(nodes: tuple[str, ...], config: NodeSettings) -> int:
    if config.node.isascii() and config.node.isdigit() and int(config.node) < len(nodes):
        return int(config.node)
    if config.node:
        if config.node.rstrip("/") in nodes:
            return nodes.index(config.node.rstrip("/"))
        raise ConfigError(
            f"node is {config.node!r}; write this node's place in nodes, from 0 to "
            f"{len(nodes) - 1}, or its URL as it stands there"
        )
    listen = parse_listen(config.listen)
    places = [
        place
        for place, url in enumerate(nodes)
        if (urlsplit(url).hostname, urlsplit(url).port) == listen
    ]
    if len(places) != 1:
        raise ConfigError(
            f"no URL in nodes has the host and port of listen, {config.listen}: say with node "
            "which of them this node is"
        )
    return places[0]


def _check_encryption(
    nodes: tuple[str, ...], place: int, config: NodeSettings, address: Address
) -> None:
    schemes = {urlsplit(url).scheme for url in nodes}
    if len(schemes) > 1:
        raise ConfigError("nodes has http:// and https://: give all nodes certificates, or none")
    if bool(config.tls_certificate) != (schemes == {"https"}):
        raise ConfigError(
            f"nodes says {nodes[place]}: with tls_certificate all nodes are at https://, and "
            "without it at http://"
        )
    credentials = address.security.credentials
    if credentials is None:
        return
    if ":" in credentials.user:
        raise ConfigError(
            f"HTTP has no users with a colon in their name: {credentials.user!r}; log in as "
            "another user"
        )
    hosts = [urlsplit(url).hostname or "" for url in nodes]
    if schemes == {"http"} and not all(map(is_loopback, hosts)):
        raise ConfigError(
            "nodes are not encrypted, and whoever listens would read the password of user: give "
            "all nodes certificates, and write https://"
        )
