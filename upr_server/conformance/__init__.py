"""Whether a client or a server keeps the protocol: played against it, scenario by scenario.

It knows the protocol and nothing of this server. `WRONG_INPUTS` are what a server must notice; the
document's table and the vectors are made from them, too.
"""

from upr_server.conformance.client_scenario import ClientScenario
from upr_server.conformance.client_scenarios import CLIENT_SCENARIOS
from upr_server.conformance.failure import ConformanceError
from upr_server.conformance.runner import Verdict, check_client, check_server, server_scenario_names
from upr_server.conformance.wrong_input import Outcome, Progress, WrongInput
from upr_server.conformance.wrong_input_table import WRONG_INPUTS

__all__ = [
    "CLIENT_SCENARIOS",
    "WRONG_INPUTS",
    "ClientScenario",
    "ConformanceError",
    "Outcome",
    "Progress",
    "Verdict",
    "WrongInput",
    "check_client",
    "check_server",
    "server_scenario_names",
]
