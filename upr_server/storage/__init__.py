"""The disk: each bucket's log and index, and what writes, maintains and reads them.

`online` runs in the server's loop. Its `Flusher` writes the engine's mutations, whole snapshots at
a time, and its `PartitionReader` reads them again, joining what is on disk with what is in memory.
`offline` reads a data directory that no server uses. The other modules are the store between them:
`api` is what the loop sees of it, and everything below `calls` runs where the disk is.
"""
