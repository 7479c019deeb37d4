"""Where a command begins."""

from __future__ import annotations

import signal

import pytest

from upr_protocol.entry import run_command


def test_ctrl_c_as_soon_as_it_is_an_exception_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_number: int, handler: object) -> None:
        if handler is signal.default_int_handler:
            raise KeyboardInterrupt

    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.default_int_handler)
    monkeypatch.setattr(signal, "signal", interrupt)
    with pytest.raises(SystemExit) as exit_info:
        run_command("upr", lambda: lambda: pytest.fail("the command ran"))
    assert exit_info.value.code == 130
