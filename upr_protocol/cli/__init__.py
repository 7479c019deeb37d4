"""The command `upr`: one module a group of commands."""

from __future__ import annotations

import sys

from upr_protocol.start import exit_on_interrupt

if sys.argv[:1] == ["-m"]:
    # Python looks for the module that `python -m` is to run, and comes by here.
    exit_on_interrupt()

from upr_protocol.cli.command import main

__all__ = ["main"]
