"""Ten thousand strangers who never get as far as a log-in, beside a good client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kit.certificates import Certificates
from tests.kit.effort import thorough
from tests.system.strangers import GREETING, STRANGERS, measure

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

STRANGER_BYTES_MAX: Final = 64 * 1024
SHARE: Final = 0.95
STRANGERS_MIN: Final = 500


@thorough
@pytest.mark.timeout(300)
async def test_strangers_leave_a_good_client_its_rate(
    certificates: Certificates, tmp_path: Path
) -> None:
    """In the server's processor time: rates mean nothing on a machine that others use. Nor do
    then ten thousand come in time."""
    measured = await measure(certificates, tmp_path, STRANGERS, GREETING)
    print(measured)  # noqa: T201
    assert max(measured.greeting_bytes, measured.stranger_bytes) < STRANGER_BYTES_MAX
    assert measured.stayed == measured.strangers > STRANGERS_MIN, "the machine is too busy for this"
    assert measured.share("processor_s") >= SHARE
