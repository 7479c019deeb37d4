"""How a driver asks a server: again and again while that may help."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from upr_protocol.client import Address, BlockingClient
from upr_protocol.client.core.retry import RetryState
from upr_protocol.errors import BrokenError, ServerError, Status, UprError
from upr_protocol.spark.errors import PipelineError, as_pipeline_error

T = TypeVar("T")

_log = logging.getLogger(__name__)

DRIVER: Final = "spark:driver"

ANSWERS: Final = (Status.RANGE_GONE, Status.ROLLBACK_NEEDED)
"""Refusals that the caller handles; all others end the query."""

SILENT_WAIT_S: Final = 0.5
"""A wait that is as long as this is worth a line in the log. Shorter ones come before it: the first
line comes after about a second."""

ASK_ONCE_TIMEOUT_S: Final = 2.0
"""How long a server that was away may take to answer what is not worth waiting for."""


class DriverConnection:
    """Asks a server; connects at the first question, and again after a lost connection.

    Args:
        address: The server, and perhaps the bucket.
        timeout_s: How long to go on trying.

    Attributes:
        client: The client that is connected, or is to be; None for none.
    """

    def __init__(self, address: Address, timeout_s: int) -> None:
        self.client: BlockingClient | None = None
        self._address = address
        self._timeout_s = timeout_s

    def ask(self, question: Callable[[BlockingClient], T]) -> T:
        """Asks, and asks again while that may help. The log says once that the server is away.

        Args:
            question: Asks by means of a client. It may ask this connection, too.

        Raises:
            ServerError: A refusal of `ANSWERS`.
            PipelineError: Another refusal; or the time is over.
        """
        retries = RetryState(self._timeout_s, random.random)
        is_logged = False
        while True:
            is_fresh = self.client is None
            try:
                if self.client is None:
                    self.client = BlockingClient(self._address, identity=DRIVER)
                return question(self.client)
            except PipelineError:
                raise
            except TimeoutError as error:
                failure: UprError = BrokenError(str(error))
            except UprError as error:
                failure = error
            refusal = None
            if isinstance(failure, ServerError):
                if failure.status in ANSWERS:
                    raise failure
                refusal = failure
                failure = _as_retryable(failure, is_fresh=is_fresh)
            self.close()
            try:
                wait_s = retries.wait_after_failure_s(failure, time.monotonic())
            except UprError as error:
                if refusal is not None and isinstance(error, BrokenError):
                    # The advice to start the server is left out: it has answered.
                    raise PipelineError(
                        "UPR_SERVER",
                        f"{self._address}: {refusal}; it was asked again for {self._timeout_s} s "
                        "(timeoutSeconds)",
                    ) from error
                raise as_pipeline_error(error, self._address, self._timeout_s) from error
            if wait_s >= SILENT_WAIT_S and not is_logged:
                _log.warning("%s; trying again for %d s (timeoutSeconds)", failure, self._timeout_s)
                is_logged = True
            time.sleep(wait_s)  # noqa: TID251  there is no event to wait for

    def ask_once(self, question: Callable[[BlockingClient], T]) -> T:
        """Asks what is not worth waiting for; where there is no connection, on one of its own.

        Args:
            question: Asks by means of a client.

        Raises:
            UprError, TimeoutError: It was refused, or the server does not answer.
        """
        if self.client is not None:
            return question(self.client)
        with BlockingClient(
            self._address,
            identity=DRIVER,
            timeout_s=ASK_ONCE_TIMEOUT_S,
            connect_timeout_s=ASK_ONCE_TIMEOUT_S,
        ) as client:
            return question(client)

    def close(self) -> None:
        """Closes the connection."""
        if self.client is not None:
            self.client.close()
            self.client = None


def _as_retryable(error: ServerError, *, is_fresh: bool) -> UprError:
    """The same error; or, where another attempt may succeed, one that is retried."""
    # The disk is slow, or full for a while.
    is_slow = error.status is Status.TIMED_OUT
    # It was deleted under this connection, and may have been created again.
    is_deleted = error.status is Status.NO_BUCKET and not is_fresh
    # There was a failover while it was asked: the new history has another answer.
    is_outdated = error.status is Status.HISTORY_CHANGED
    return BrokenError(error.sentence) if is_slow or is_deleted or is_outdated else error


def check_bucket(address: Address, timeout_s: int) -> None:
    """Makes sure, before any task begins, that a server is there and has the bucket. Each task
    would find out, and Spark logs a page for each.

    Args:
        address: Server and bucket.
        timeout_s: How long to go on trying.

    Raises:
        PipelineError: There is no server, or it refuses.
    """
    connection = DriverConnection(address, timeout_s)
    try:
        # `connect` would not do: it retries for a time of its own.
        connection.ask(lambda client: client.partition_count)
    finally:
        connection.close()
