"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine and what else runs on it than about us.
settings.register_profile("upr", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("upr")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it runs in the background ignore Ctrl-C, and so would what tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
