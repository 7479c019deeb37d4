"""Tests of `upr_protocol.transport`."""
