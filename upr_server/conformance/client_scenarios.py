"""What a client must do, played by a scripted server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from upr_server.conformance.client_scenario import ClientScenario
from upr_server.conformance.consumer_scenarios import CONSUMER_SCENARIOS
from upr_server.conformance.get_scenarios import GET_SCENARIOS
from upr_server.conformance.publisher_scenarios import PUBLISHER_SCENARIOS

CLIENT_SCENARIOS: Final[Mapping[str, ClientScenario]] = {
    **CONSUMER_SCENARIOS,
    **PUBLISHER_SCENARIOS,
    **GET_SCENARIOS,
}
"""Every scenario by its name, in the order in which they are played."""
