"""Tests of `upr_server.replication`."""
