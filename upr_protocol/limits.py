"""Every limit of the protocol, each with its reason. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from typing import Final

from upr_protocol.ids import PARTITIONS_END

KEY_BYTES_MAX: Final = 250
"""memcached's limit. Existing keys already respect it."""

VALUE_BYTES_MAX: Final = 20 * 1024 * 1024
"""Couchbase's limit for a document."""

FRAME_BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Enough for a value of the largest size with its key, or for a bundle of a bulk load. A receiver
needs the whole frame, so an unfinished frame takes at most this much memory."""

HANDSHAKE_BODY_BYTES_MAX: Final = 4 * 1024
"""The longest body before `Open` is answered: a stranger's frame takes no more memory than this."""

IDENTITY_BYTES_MAX: Final = 200
"""`what:who` in UTF-8, for logs and statistics. It has no control, format or separator characters
except the space, because logs and terminals show it."""

BUCKET_NAME_BYTES_MAX: Final = 100
"""Fits a file name on every file system, with room for a suffix."""

PARTITIONS_MAX: Final = PARTITIONS_END
"""Couchbase's count. A partition map of so many partitions fits one frame."""

PARTITIONS_DEFAULT: Final = 64
"""Partitions of a bucket that is created without a count."""

NODES_MAX: Final = 256
"""Nodes in one partition map. Each node regularly asks others for the map."""

REPLICAS_MAX: Final = 16
"""Replicas of one partition. With 16 replicas of each of 1,024 partitions, a map is read in 6
ms."""

COOKIE_BYTES_MAX: Final = 64
"""Enough for a UUID in any spelling."""

OPEN_BARRIERS_MAX: Final = 64
"""Open barriers of one connection. The server stores the cookie of each."""

FAILOVER_ENTRIES_MAX: Final = 25
"""Entries that a failover log keeps; those that gave no number are dropped first."""

CHUNK_MUTATIONS_MAX: Final = 1 << 20
"""Mutations in one chunk: a frame of empty values would otherwise hold its reader for a second."""

BUNDLE_RUNS_MAX: Final = PARTITIONS_MAX
"""Runs in one bundle: one a partition."""

BUNDLE_MUTATIONS_MAX: Final = 4096
"""Mutations in one bundle. A server applies a run in one step of its loop, and this many mutations
take one to eight milliseconds. Above 1,000 mutations, larger bundles are hardly faster."""

GET_KEYS_MAX: Final = 4096
"""Keys in one `Get`."""

GET_REPLY_KEYS_MAX: Final = 256
"""Keys in one answer to a `Get`, which are looked up in one step of 2 ms. A client that names more
in a `Get` asks again for the rest."""

WINDOW_BYTES_DEFAULT: Final = 16 * 1024 * 1024
"""A consumer's flow-control window: at 1 GB/s it covers 16 ms without an acknowledgement."""

WINDOW_BYTES_MIN: Final = 64 * 1024
"""Smaller windows would turn every chunk into a round trip."""

IDLE_INTERVAL_S_DEFAULT: Final = 20
"""A side that has sent nothing for this time sends `Noop`. A side that has received no byte for
twice this time regards the connection as broken."""

IDLE_INTERVAL_S_MIN: Final = 1
"""At this rate the frames that show a side to be alive do not burden the other one."""

IDLE_INTERVAL_S_MAX: Final = 3600
"""A server keeps a connection whose peer has gone for twice this time at most."""

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""The server closes a connection if the client has not sent `Hello`, and logged in if that is
needed, within this time."""

SCRAM_ITERATIONS_MIN: Final = 4096
"""What RFC 7677 asks for. A client accepts no less. Otherwise a false server could use the client's
answer to test passwords quickly."""

SCRAM_ITERATIONS_DEFAULT: Final = 32 * 1024
"""Iterations of new passwords: some 20 ms at a client's first log-in, and nothing on the server."""

SCRAM_ITERATIONS_MAX: Final = 200_000
"""A false server can take at most this much of the client's time: some 200 ms in each log-in."""

SEND_TIMEOUT_S: Final = 60.0
"""If a peer accepts no byte for this time, it is gone, not slow."""

REQUESTS_OPEN_MAX: Final = 4096
"""Requests of one connection that wait for their answers."""

LEASES_MAX: Final = 1024
"""Leases that clients may hold on one bucket: every step of a compaction looks at each of them."""

LEASE_RANGES_MAX: Final = 1024
"""Ranges of one lease: one a partition."""

LEASED_RANGES_MAX: Final = 64 * 1024
"""Ranges of all leases on one bucket: every step of a compaction looks at each of them, which takes
the server's loop 3 ms."""

LEASE_OWNER_BYTES_MAX: Final = 200
"""As long as an identity."""

LEASE_TIME_TO_LIVE_S_MAX: Final = 24 * 3600
"""A client that needs a range for longer renews its lease: a leased range costs disk, and the
client may be dead."""

CONSUMER_NAME_BYTES_MAX: Final = 100
"""The name of a consumer of events."""

CONSUMERS_MAX: Final = 100
"""Consumers of events at one node: each has a queue, in which every bucket may stand once."""

CONSUMERS_OF_USER_MAX: Final = 10
"""Consumers of events of one user at one node, where there are users: nobody takes all places."""

HEALTH_TIMEOUT_S_MIN: Final = 1
"""The shortest `timeout_s` of `NextEvents`. A consumer polls three times in this time: at this rate
it does not burden the server."""

HEALTH_TIMEOUT_S_MAX: Final = 3600
"""The longest `timeout_s` of `NextEvents`. The server keeps the queue of a consumer that may be
dead for so long at most."""

EVENT_PATTERN_BYTES_MAX: Final = 200
"""A bucket's name has 100 bytes, and each may need brackets."""

EVENT_KEYS_MAX: Final = 2000
"""Buckets and design documents that one answer names: with keys of 250 bytes it stays within
1 MiB."""

DESIGNS_MAX: Final = 1000
"""Design documents of one bucket that an event names one by one; when more have changed, the event
says that any of them may have changed."""
