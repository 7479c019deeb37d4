from __future__ import annotations

import click
import pytest

from upr_protocol.cli.errors import FailedError, errors_as_exits
from upr_protocol.client import AddressError, ResumeStateError
from upr_protocol.errors import (
    ADVICE,
    BrokenError,
    ClosedError,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    Status,
    UprError,
)


def leave_with(error: BaseException) -> None:
    with errors_as_exits():
        raise error


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (AddressError("'x' is not a valid address"), 2, "'x' is not a valid address"),
        (ResumeStateError("this is no resume state"), 2, "this is no resume state"),
        (
            ServerError(Status.NO_BUCKET, "no bucket x"),
            3,
            f"no bucket x: {ADVICE[Status.NO_BUCKET]}",
        ),
        (ServerError(Status.CAS_MISMATCH), 3, f"cas mismatch: {ADVICE[Status.CAS_MISMATCH]}"),
        (ServerError(Status.SHUTTING_DOWN), 4, f"shutting down: {ADVICE[Status.SHUTTING_DOWN]}"),
        (BrokenError("cannot connect"), 4, "cannot connect"),
        (ClosedError("closed"), 4, "closed"),
        (RemoteProtocolError("no frame"), 4, "the server does not speak UPR: no frame"),
        (UprError("something"), 1, "something"),
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "x: No such file or directory"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
    ],
)
def test_each_error_has_a_sentence_and_a_code(error: Exception, code: int, sentence: str) -> None:
    for raised in (error, ExceptionGroup("", [ExceptionGroup("", [error])])):
        with pytest.raises(FailedError) as caught:
            leave_with(raised)
        assert caught.value.exit_code == code
        assert caught.value.format_message().startswith(sentence)


def test_an_errors_notes_are_printed_too() -> None:
    error = BrokenError("lost")
    error.add_note("gave up after 3 attempts")
    with pytest.raises(FailedError, match="lost; gave up after 3 attempts"):
        leave_with(error)


@pytest.mark.parametrize("error", [ValueError("x"), LocalProtocolError("x"), AssertionError()])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        leave_with(error)


def test_a_bug_in_a_group_of_errors_is_not_hidden() -> None:
    with pytest.RaisesGroup(BrokenError, ValueError):
        leave_with(ExceptionGroup("", [BrokenError("lost"), ValueError("x")]))


def test_ctrl_c_determines_the_exit_code_whatever_else_failed() -> None:
    group = BaseExceptionGroup("", [BrokenError("lost"), KeyboardInterrupt()])
    for error in (KeyboardInterrupt(), group):
        with pytest.raises(click.exceptions.Exit) as caught:
            leave_with(error)
        assert caught.value.exit_code == 130


@pytest.mark.parametrize(("prompted", "code"), [(KeyboardInterrupt, 130), (EOFError, None)])
def test_ctrl_c_at_a_question_is_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, prompted: type[BaseException], code: int | None
) -> None:
    def interrupt(_prompt: str) -> str:
        raise prompted

    monkeypatch.setattr("click.termui.visible_prompt_func", interrupt)
    with pytest.raises((click.exceptions.Exit, click.Abort)) as caught, errors_as_exits():
        click.confirm("Delete it?", abort=True)
    assert getattr(caught.value, "exit_code", None) == code
