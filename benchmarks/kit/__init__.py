"""What every row needs: processes, figures, the machine's facts, the standard work."""

from __future__ import annotations
