"""What an answer means, and an answer that means nothing."""

from __future__ import annotations

import pytest

from upr_protocol.client.core.calls import stats
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.wire import StatsReply


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' + "[" * 100_000])
def test_unreadable_statistics_raise_an_error(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="the statistics cannot be read"):
        stats("").result(StatsReply(text))
