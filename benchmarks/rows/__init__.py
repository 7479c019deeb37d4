"""The rows of design/8, a module each. `measure(runs, say)` gives the lines of the row's table."""

from __future__ import annotations
