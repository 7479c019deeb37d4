"""The first messages of every connection: the client's identity, the log-in where there are users,
and the bucket it opens."""

from __future__ import annotations

from upr_protocol.client.core.log_in import ClientLogIn
from upr_protocol.client.core.results import status_of
from upr_protocol.errors import ServerError
from upr_protocol.ids import PartitionId
from upr_protocol.session import ClientSession
from upr_protocol.wire import (
    HelloReply,
    LoggedIn,
    LogInChallenge,
    Message,
    Open,
    Opened,
    PartitionLog,
    Refusal,
)


class Handshake:
    """Takes a new session to the point where requests may be sent.

    Args:
        bucket: The bucket to open; empty for none.
        partitions: The partitions whose histories the client needs; empty for all.

    Attributes:
        hello_reply: The server's answer to `Hello`; None before it.
        logs: The logs in the answer to `Open` that have arrived, by partition.
        opened_reply: The end of that answer; None before it.
    """

    __slots__ = (
        "_bucket",
        "_log_in",
        "_partitions",
        "_session",
        "hello_reply",
        "is_done",
        "logs",
        "opened_reply",
    )

    def __init__(
        self,
        session: ClientSession,
        bucket: str,
        partitions: tuple[PartitionId, ...] = (),
        log_in: ClientLogIn | None = None,
    ) -> None:
        self._session = session
        self._bucket = bucket
        self._partitions = partitions
        self._log_in = log_in or ClientLogIn()
        self.is_done = False
        self.hello_reply: HelloReply | None = None
        self.logs: dict[PartitionId, PartitionLog] = {}
        self.opened_reply: Opened | None = None

    @property
    def is_channel_bound(self) -> bool:
        """Whether the server proves to know the password, and nobody can have passed the proof on
        from another one: it is bound to the server's certificate."""
        return self._log_in.is_channel_bound

    def receive(self, message: Message) -> None:
        """Takes in a message of the server, and sends the next one.

        Raises:
            ServerError: The server refused the bucket; or only one of the two sides wants a log-in.
            RemoteProtocolError: The server does not prove that it knows the user.
            UsersError: The user's name or the password is empty, or has a control character.
        """
        if isinstance(message, HelloReply):
            self.hello_reply = message
            if (log_in := self._log_in.begin(message.mechanisms)) is not None:
                self._session.send(log_in)
            else:
                self._open()
        elif isinstance(message, LogInChallenge):
            self._session.send(self._log_in.respond(message))
        elif isinstance(message, LoggedIn):
            self._log_in.check(message)
            self._open()
        elif isinstance(message, PartitionLog):
            self.logs[message.partition] = message
        elif isinstance(message, Opened):
            self.opened_reply = message
            self.is_done = True
        elif isinstance(message, Refusal):
            raise ServerError(status_of(message.status), message.sentence)

    def _open(self) -> None:
        if self._bucket:
            opaque = self._session.new_opaque()
            self._session.send(Open(self._bucket, self._partitions, opaque=opaque))
        else:
            self.is_done = True

    @property
    def partition_count(self) -> int:
        """How many partitions the bucket has; 0 before it is opened."""
        return self.opened_reply.partition_count if self.opened_reply is not None else 0

    @property
    def map_revision(self) -> int:
        """The revision of the node's partition map; 0 when it holds the bucket alone."""
        return self.opened_reply.map_revision if self.opened_reply is not None else 0
