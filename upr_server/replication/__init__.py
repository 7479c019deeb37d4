"""Several nodes for one bucket: what each is for which partition, and how replicas follow.

A node carries out the partition maps that it is given (`membership`), asks others whether there is
a newer one (`peers`), and follows the nodes from which it replicates (`replicator`), as a consumer
like any other, through the public client. What it receives goes to disk as it came (`incoming`).
The decision behind it: docs/adr/0010-replicas.md.
"""

from upr_server.replication.host import Host
from upr_server.replication.membership import Membership
from upr_server.replication.peers import Peers

__all__ = ["Host", "Membership", "Peers"]
