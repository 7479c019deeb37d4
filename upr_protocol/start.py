"""The start of a command, before what it needs is imported.

Importing takes some tenths of a second. Ctrl-C in that time, or a system that has no memory or
descriptors left, ends a command with an exit code and at most one sentence, like later on.

So this module imports only what Python has imported by then: even `typing` takes milliseconds.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run_command(program: str, load: Callable[[], Callable[[], Any]]) -> NoReturn:
    """Imports a command and runs it; ends the process.

    Args:
        program: Its name, for the sentence.
        load: Imports it.
    """
    _open_closed_streams()
    is_interruptible = exit_on_interrupt()
    try:
        command = load()
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError, MemoryError) as error:
        # The loader of shared libraries gives ImportError where memory cannot be mapped.
        reason = str(error) or "out of memory"
        sys.stderr.write(f"{program}: cannot start: {reason}; look at `ulimit -a`\n")
        sys.exit(EXIT_FAILED)
    try:
        if is_interruptible:
            # From here on Ctrl-C may be raised at once.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(command())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        # Help texts and the version are printed before a command can see to its errors.
        if error.errno not in (errno.ENOSPC, errno.EBADF) or error.filename is not None:
            raise
        # Python would try again to write what is left in its buffer.
        with open(os.devnull, "wb") as null_device:
            os.dup2(null_device.fileno(), sys.stdout.fileno())
        sys.stderr.write(f"{program}: the output cannot be written: {error.strerror}\n")
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if not _is_lack_of_threads(error):
            raise
        reason = "the system gives it no more threads, or no memory for them"
        sys.stderr.write(f"{program}: ended: {reason}; look at `ulimit -a`\n")
        sys.exit(EXIT_FAILED)


def exit_on_interrupt() -> bool:
    """Has Ctrl-C end the process at once, until it gets another handler: for while it imports. A
    package that `python -m` imports whole before it runs any of it calls this first.

    Returns:
        Whether it does. A process that ignores Ctrl-C goes on to do so.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    return handler in (signal.default_int_handler, _exit)


def interrupt_handler() -> Any:
    """What Ctrl-C does once everything is imported: the handler before `exit_on_interrupt`."""
    handler = signal.getsignal(signal.SIGINT)
    return signal.default_int_handler if handler is _exit else handler


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # Not an exception: where Python imports, some places print a `KeyboardInterrupt` and go on.
    del number, frame
    os._exit(EXIT_INTERRUPTED)


def _open_closed_streams() -> None:
    """Opens the null device where standard input, output or error is closed. A file or connection
    would get its number, and be read and written in its place.

    It is opened the wrong way: to read or write the stream is an error, as nothing can come of it.
    Only what is said on standard error goes nowhere.
    """
    streams = (
        ("stdin", "r", os.O_WRONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_RDWR),
    )
    for number, (name, mode, flags) in enumerate(streams):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free.
            descriptor = os.open(os.devnull, flags)
            # For processes that this one starts, too.
            os.set_inheritable(descriptor, descriptor == number)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def _is_lack_of_threads(error: BaseException) -> bool:
    """Whether a thread could not be started. Python has no class for this error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"
