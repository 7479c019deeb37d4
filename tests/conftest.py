"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine and what else runs on it than about us.
settings.register_profile("upr", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("upr")
