"""The client over Trio."""
