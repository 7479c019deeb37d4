"""The UPR server."""
