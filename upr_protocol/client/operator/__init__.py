"""What an operator does with a cluster: look at it, add and remove replicas, have another node
become active.

A command looks at all nodes (`survey`), makes the next maps (`plan`, which is pure), and gives them
one by one (`giver`), in an order in which whatever comes between leaves nobody, or one node, active
in a history. The decision behind it: docs/adr/0010-replicas.md.
"""

from upr_protocol.client.operator.errors import (
    MapRefusedError,
    NotDoneError,
    OvertakenError,
    PartlyDoneError,
    UnreachableError,
)
from upr_protocol.client.operator.failover import fail_over
from upr_protocol.client.operator.plan import partitions_text, ranges_text
from upr_protocol.client.operator.replicas import (
    Behind,
    add_replicas,
    remove_replicas,
    wait_caught_up,
)
from upr_protocol.client.operator.survey import NodeReport, Operator, Survey
from upr_protocol.client.operator.takeover import Limits, take_over

__all__ = [
    "Behind",
    "Limits",
    "MapRefusedError",
    "NodeReport",
    "NotDoneError",
    "Operator",
    "OvertakenError",
    "PartlyDoneError",
    "Survey",
    "UnreachableError",
    "add_replicas",
    "fail_over",
    "partitions_text",
    "ranges_text",
    "remove_replicas",
    "take_over",
    "wait_caught_up",
]
