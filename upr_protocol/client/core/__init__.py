"""What the Trio client and the blocking client have in common: no I/O, no clock, no random
numbers."""
