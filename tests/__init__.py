"""Tests lie as the code lies."""
