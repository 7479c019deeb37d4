"""Tests of `upr_protocol.session`."""
