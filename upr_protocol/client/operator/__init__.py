"""What an operator does with a cluster: survey it, add and remove replicas, make another node
active.

A command asks all nodes what they hold (`survey`), makes the next maps (`plan`, which is pure), and
gives them to the nodes (`map_publisher`). Wherever it is interrupted, at most one node is active in
a history, because of the order in which nodes get their maps. docs/adr/0010-replicas.md has the
reasons.
"""

from upr_protocol.client.operator.errors import (
    MapRefusedError,
    NotDoneError,
    OvertakenError,
    PartlyDoneError,
    UnreachableError,
)
from upr_protocol.client.operator.failover import fail_over
from upr_protocol.client.operator.plan import active_partitions_of, partitions_text, ranges_text
from upr_protocol.client.operator.replicas import (
    ReplicaLag,
    add_replicas,
    remove_replicas,
    wait_caught_up,
)
from upr_protocol.client.operator.survey import NodeReport, Operator, Survey
from upr_protocol.client.operator.takeover import TakeoverTimeouts, take_over

__all__ = [
    "MapRefusedError",
    "NodeReport",
    "NotDoneError",
    "Operator",
    "OvertakenError",
    "PartlyDoneError",
    "ReplicaLag",
    "Survey",
    "TakeoverTimeouts",
    "UnreachableError",
    "active_partitions_of",
    "add_replicas",
    "fail_over",
    "partitions_text",
    "ranges_text",
    "remove_replicas",
    "take_over",
    "wait_caught_up",
]
