"""Connections: sessions driven over Trio."""

from __future__ import annotations

from upr_server.net.connection import Connection
from upr_server.net.service import Service

__all__ = ["Connection", "Service"]
