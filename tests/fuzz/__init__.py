"""Fuzzing: what is promised of any bytes at all, as functions of those bytes.

`python -m tests.fuzz` has Atheris look for bytes that break a promise; `test_corpus` tries the
corpus and what a seeded generator makes of it, in seconds; `test_cost` holds the cost linear.
"""
