"""Connections: sessions driven over Trio."""

from __future__ import annotations

from upr_server.net.connection import AcceptedConnection
from upr_server.net.handlers import HANDLERS
from upr_server.net.server import ConnectionServer

__all__ = ["HANDLERS", "AcceptedConnection", "ConnectionServer"]
