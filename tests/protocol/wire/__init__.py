"""Tests of `upr_protocol.wire`."""
