"""A bucket's disk, in the server's loop: it writes, maintains, and reads again."""
