"""The disk: chunk logs, their indexes, and what flushes, reads and tidies them.

The engine's mutations come down through the `Flusher`, whole snapshots at a time, and go up again
through a `StreamReader`, which joins what is on disk to what is in memory.
"""
