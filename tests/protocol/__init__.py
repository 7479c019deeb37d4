"""Tests of `upr_protocol`."""
