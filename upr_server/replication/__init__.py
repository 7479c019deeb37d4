"""Several nodes for one bucket: what each is for which partition, and how replicas follow.

- `partition_maps` has the partition maps of this node's buckets, and answers questions about them.
- `roles` decides what a map makes of this node, without doing anything; `clustered_bucket` does it.
- `map_exchange` asks other nodes whether they have a newer map, and `user_exchange` whether they
  have newer users; `node_connections` are what both ask over.
- `copy_completion` asks active nodes when a copy that follows another replica is complete.
- `bucket_replicators` runs a `replicator` for each node that this one replicates from. It is a
  consumer like any other, through the public client. `source_streams` has its streams,
  `received_snapshots` and `received_answers` what came of them; `replica_writer` puts that on disk
  as it came, and `replica_rollback` undoes it.

The decision behind it: docs/adr/0010-replicas.md.
"""

from upr_server.replication.copy_completion import CopyCompletion
from upr_server.replication.local_server import LocalServer
from upr_server.replication.map_exchange import MapExchange
from upr_server.replication.partition_maps import PartitionMaps
from upr_server.replication.user_exchange import UserExchange

__all__ = ["CopyCompletion", "LocalServer", "MapExchange", "PartitionMaps", "UserExchange"]
