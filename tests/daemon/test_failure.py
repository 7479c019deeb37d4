"""What ended a daemon."""

from __future__ import annotations

from upr_server.daemon import first_failure


def test_the_first_of_several_reasons() -> None:
    first, second = ValueError(1), OSError(2)
    assert first_failure(first) is first
    inner = ExceptionGroup("", [first, second])
    assert first_failure(ExceptionGroup("", [inner, second])) is first
