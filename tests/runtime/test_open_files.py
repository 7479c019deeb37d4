"""How many files a process may have open."""

from __future__ import annotations

import resource

import pytest

from upr_server.runtime import file_limit, raise_file_limit


def test_the_limit_is_raised_as_far_as_the_system_allows() -> None:
    before, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1, hard_limit))
        assert file_limit() == before - 1
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard_limit, hard_limit)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard_limit))


def test_a_system_that_refuses_leaves_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_kind: int, _limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    before = file_limit()
    monkeypatch.setattr("resource.setrlimit", refuse)
    raise_file_limit()
    assert file_limit() == before


def test_no_limit_is_more_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr("resource.getrlimit", lambda _kind: (infinity, infinity))
    assert file_limit() > 1 << 32
