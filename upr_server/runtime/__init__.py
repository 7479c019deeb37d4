"""What both processes need, the server and the indexer: settings, logs, listeners, signals."""

from upr_server.runtime.audit_log import AuditLog, AuditLogError
from upr_server.runtime.certificates import CertificateFiles, Certificates, certificate_files
from upr_server.runtime.collector import (
    YoungObjects,
    collect_only_young,
    collect_rarely,
    keeps_ended_frames,
)
from upr_server.runtime.failed_log_ins import (
    FAILURE_DELAY_S,
    FAILURES_MAX,
    FailedLogIns,
    network_of,
)
from upr_server.runtime.faults import OUT_OF_MEMORY, essential
from upr_server.runtime.listeners import (
    BoundListeners,
    ListenError,
    bind_tcp,
    is_loopback,
    open_listeners,
    parse_listen,
)
from upr_server.runtime.logging import set_up_logging
from upr_server.runtime.memory_return import HeapTrimmer, keep_heap_small, sums_in_steps
from upr_server.runtime.open_files import file_limit, raise_file_limit
from upr_server.runtime.settings import ConfigError, load_settings, refuse_without
from upr_server.runtime.signals import run_until_signal
from upr_server.runtime.system import System
from upr_server.runtime.time_slice import SHORT_SLICE_S, in_background, set_time_slice
from upr_server.runtime.turn_timer import TurnTimer

__all__ = [
    "FAILURES_MAX",
    "FAILURE_DELAY_S",
    "OUT_OF_MEMORY",
    "SHORT_SLICE_S",
    "AuditLog",
    "AuditLogError",
    "BoundListeners",
    "CertificateFiles",
    "Certificates",
    "ConfigError",
    "FailedLogIns",
    "HeapTrimmer",
    "ListenError",
    "System",
    "TurnTimer",
    "YoungObjects",
    "bind_tcp",
    "certificate_files",
    "collect_only_young",
    "collect_rarely",
    "essential",
    "file_limit",
    "in_background",
    "is_loopback",
    "keep_heap_small",
    "keeps_ended_frames",
    "load_settings",
    "network_of",
    "open_listeners",
    "parse_listen",
    "raise_file_limit",
    "refuse_without",
    "run_until_signal",
    "set_time_slice",
    "set_up_logging",
    "sums_in_steps",
]
