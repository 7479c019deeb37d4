"""The command `upr`: one module a group of commands."""

from __future__ import annotations

from upr_protocol.cli.command import main

__all__ = ["main"]
