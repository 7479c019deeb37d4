"""Every limit of the protocol, each with its reason. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from typing import Final

from upr_protocol.ids import PARTITIONS_END

KEY_BYTES_MAX: Final = 250
"""memcached's limit: what the field's keys already keep to."""

VALUE_BYTES_MAX: Final = 20 * 1024 * 1024
"""Couchbase's limit for a document."""

FRAME_BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""A value of the largest size with its key, or a bulk load's batch. A frame is taken in whole, so
this is also the most that one half-received frame can hold."""

HANDSHAKE_BODY_BYTES_MAX: Final = 4 * 1024
"""The longest frame before `OPEN` was answered: a stranger costs no more than this."""

IDENTITY_BYTES_MAX: Final = 200
"""`what:who` in UTF-8, for logs and statistics. No control, format or separator characters but the
space: logs and terminals show it."""

BUCKET_NAME_BYTES_MAX: Final = 100
"""Fits a file name on every file system, with room for a suffix."""

PARTITIONS_MAX: Final = PARTITIONS_END
"""Couchbase's count; a node's cost must not grow with it, a map of it still fits one frame."""

PARTITIONS_DEFAULT: Final = 64

NODES_MAX: Final = 256
"""Nodes in one partition map: each asks the others for it now and then."""

REPLICAS_MAX: Final = 16
"""Replicas of one partition. With so many of each of 1,024, a map is read in 6 ms."""

COOKIE_BYTES_MAX: Final = 64
"""A barrier cookie is a short text string: a UUID in any spelling fits."""

OPEN_BARRIERS_MAX: Final = 64
"""Barriers that one connection may have under way; each costs the server its cookie."""

FAILOVER_ENTRIES_MAX: Final = 25
"""Entries that a failover log keeps; the oldest are dropped first."""

CHUNK_MUTATIONS_MAX: Final = 1 << 20
"""Mutations in one chunk: a frame of empty values would otherwise hold its reader for a second."""

BUNDLE_RUNS_MAX: Final = PARTITIONS_MAX
"""Runs in one bundle: one a partition."""

BUNDLE_MUTATIONS_MAX: Final = 4096
"""Mutations in one bundle. A server takes in a run whole, in one step of its loop: this many take
one to eight milliseconds. A bundle's own cost hardly shows beyond 1,000."""

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
"""A side that has sent nothing for this long sends `NOOP`; after twice this its peer takes it for
dead."""

IDLE_INTERVAL_S_MIN: Final = 1
IDLE_INTERVAL_S_MAX: Final = 3600

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""The server closes a connection that has not sent `Hello` by then, and logged in where that is
needed."""

SCRAM_ITERATIONS_MIN: Final = 4096
"""What RFC 7677 asks for. A client accepts no less: somebody who plays the server could then try
passwords quickly with what the client answers."""

SCRAM_ITERATIONS_DEFAULT: Final = 32 * 1024
"""Iterations of new passwords: some 20 ms at a client's first log-in, and nothing on the server."""

SCRAM_ITERATIONS_MAX: Final = 200_000
"""Some 200 ms of the client's time, once a log-in: somebody who plays the server cannot take
more."""

SEND_TIMEOUT_S: Final = 60.0
"""A peer that takes not one byte for this long is gone, not slow."""

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
"""The name of a consumer of the event bus."""

CONSUMERS_MAX: Final = 100
"""Consumers of one node's event bus: each has a queue, in which every bucket may stand once."""

CONSUMERS_OF_USER_MAX: Final = 10
"""Consumers of one user on one node's event bus, where there are users: nobody takes all places."""

HEALTH_TIMEOUT_S_MIN: Final = 1
"""A consumer polls three times in its timeout: at this rate it does not burden the server."""

HEALTH_TIMEOUT_S_MAX: Final = 3600
"""The server keeps the queue of a consumer that may be dead for so long at most."""

EVENT_PATTERN_BYTES_MAX: Final = 200
"""A bucket's name has 100 bytes, and each may need brackets."""

EVENT_KEYS_MAX: Final = 2000
"""Buckets and design documents that one answer names: with keys of 250 bytes it stays within
1 MiB."""

DESIGNS_MAX: Final = 1000
"""Design documents of one bucket that an event names one by one; when more have changed, the event
says that any of them may have changed."""
