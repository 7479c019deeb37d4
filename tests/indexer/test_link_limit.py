"""How many links other nodes may have to a node."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.indexer.link_limit import LinkLimit, TooManyLinksError


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=40),
)
def test_links_are_counted_by_host(links_max: int, steps: list[tuple[bool, int]]) -> None:
    limit = LinkLimit(links_max)
    open_links: list[tuple[str, ExitStack]] = []
    for opens, number in steps:
        host = f"h{number}"
        if opens:
            of_host = [name for name, _ in open_links].count(host)
            may_open = len(open_links) < links_max and of_host < links_max // 2
            stack = ExitStack()
            try:
                stack.enter_context(limit.link_of(host))
            except TooManyLinksError:
                assert not may_open
            else:
                assert may_open
                open_links.append((host, stack))
        elif open_links:
            open_links.pop(number % len(open_links))[1].close()
        assert len(limit) == len(open_links)
    for _, stack in open_links:
        stack.close()
    assert not limit._links._counts


def test_the_refusal_names_the_setting() -> None:
    limit = LinkLimit(4)
    with ExitStack() as stack:
        for host in "aa":
            stack.enter_context(limit.link_of(host))
        with pytest.raises(TooManyLinksError, match=r"a has 2 links .* half of its setting links"):
            stack.enter_context(limit.link_of("a"))
        for host in "bb":
            stack.enter_context(limit.link_of(host))
        with pytest.raises(TooManyLinksError, match=r"have 4 links .* links_max allows"):
            stack.enter_context(limit.link_of("c"))
