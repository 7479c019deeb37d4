"""Back-off, and when to give up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.client.core.retry import (
    FIRST_WAIT_S,
    LOG_IN_RETRY_S,
    MAP_WAIT_S_MAX,
    RETRY_TIMEOUT_S_DEFAULT,
    WAIT_S_MAX,
    Backoff,
    RetryState,
    is_retryable,
)
from upr_protocol.client.trio.dispatcher import REQUEST_RETRY_TIMEOUT_S
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
)


def test_clients_give_up_and_ask_again_after_the_times_that_are_promised() -> None:
    assert (RETRY_TIMEOUT_S_DEFAULT, REQUEST_RETRY_TIMEOUT_S) == (300.0, 30.0)
    assert (WAIT_S_MAX, MAP_WAIT_S_MAX) == (5.0, 0.5)


def test_waits_double_up_to_the_cap() -> None:
    backoff = Backoff(lambda: 1.0, cap_s=10 * FIRST_WAIT_S)
    waits = [backoff.next_wait_s() for _ in range(6)]
    assert waits == [FIRST_WAIT_S * factor for factor in (1, 2, 4, 8, 10, 10)]
    backoff.reset()
    assert backoff.next_wait_s() == FIRST_WAIT_S
    assert backoff.failures == 1


@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=100))
def test_waits_are_drawn_between_half_and_all(draws: list[float]) -> None:
    numbers = iter(draws)
    backoff = Backoff(lambda: next(numbers))
    for failures in range(len(draws)):
        longest = min(WAIT_S_MAX, FIRST_WAIT_S * 2**failures)
        assert longest / 2 <= backoff.next_wait_s() <= longest


def test_the_next_wait_is_known_after_thousands_of_failures() -> None:
    backoff = Backoff(lambda: 0.5)
    for _ in range(2000):
        backoff.next_wait_s()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BrokenError("lost"), True),
        (ClosedError("ours"), False),
        (LocalProtocolError("ours"), False),
        (RemoteProtocolError("theirs", Status.BAD_CHECKSUM), True),
        (RemoteProtocolError("theirs", Status.BAD_MAGIC), False),
        (ServerError(Status.NOT_MY_PARTITION), True),
        (ServerError(Status.SEQ_TOO_HIGH), True),
        (ServerError(Status.SHUTTING_DOWN), True),
        (ServerError(Status.NO_BUCKET), False),
        (ServerError(Status.OUT_OF_TURN), False),
        (ServerError(Status.TOKEN_TOO_OLD), False),
    ],
)
def test_which_errors_are_retryable(error: Exception, expected: bool) -> None:
    assert is_retryable(error) is expected


def test_the_retry_timeout_counts_from_the_first_failure_without_progress() -> None:
    retry = RetryState(10.0, lambda: 0.5)
    error = BrokenError("lost")
    assert retry.wait_after_failure_s(error, 1000.0) > 0
    assert retry.wait_after_failure_s(error, 1009.0) <= 1.0
    retry.note_progress()
    assert retry.wait_after_failure_s(error, 1011.0) > 0
    assert retry.wait_after_failure_s(error, 1020.9) <= 0.1 + 1e-9
    with pytest.raises(BrokenError, match="lost") as caught:
        retry.wait_after_failure_s(error, 1021.0)
    assert caught.value.__notes__ == ["gave up after 3 attempts in 10 s"]


def test_errors_that_are_not_retryable_are_raised_at_once() -> None:
    with pytest.raises(ServerError):
        RetryState(10.0, lambda: 0.5).wait_after_failure_s(ServerError(Status.NO_BUCKET), 0.0)


def test_a_refused_log_in_is_tried_once_more() -> None:
    retry = RetryState(10.0, lambda: 0.5)
    refusal = ServerError(Status.LOG_IN_FAILED)
    for began in (0.0, 100.0):
        assert retry.wait_after_failure_s(refusal, began) == LOG_IN_RETRY_S
        # Another failure in between gives it no second one.
        retry.wait_after_failure_s(BrokenError("lost"), began + 1)
        with pytest.raises(ServerError):
            retry.wait_after_failure_s(refusal, began + 2)
        retry.note_progress()
    # Nobody waits who has no time.
    with pytest.raises(ServerError):
        RetryState(0.0, lambda: 0.5).wait_after_failure_s(refusal, 0.0)
