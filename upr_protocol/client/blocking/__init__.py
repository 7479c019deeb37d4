"""The client for programs that block, over plain sockets."""
