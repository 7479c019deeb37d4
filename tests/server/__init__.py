"""Tests of the server around its engine."""
