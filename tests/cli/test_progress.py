from __future__ import annotations

import sys

import pytest
import trio

from upr_protocol.cli.progress import Progress, rate_text


async def shown_for(progress: Progress, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await progress.run()
    progress.clear()


async def test_where_it_is_kept_it_is_a_line_now_and_then(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = iter(["one", "two", "three"])
    await shown_for(Progress(lambda: next(texts), interval_s=5.0), 11.0)
    assert capsys.readouterr().err == "one\ntwo\n"


async def test_on_a_terminal_it_stays_in_its_place_and_leaves_nothing(
    autojump_clock: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    texts = iter(["longer", "short"])
    await shown_for(Progress(lambda: next(texts)), 0.5)
    assert capsys.readouterr().err == "\rlonger\rshort \r     \r"


def test_rates() -> None:
    assert rate_text(120_000, 2.0) == "60,000/s"
    assert rate_text(0, 0.0) == "0/s"
