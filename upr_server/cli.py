"""The command `upr-server`."""

from __future__ import annotations

import faulthandler
import os
import shlex
import signal
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio

import upr_kernel
from upr_protocol.address import Address, AddressError
from upr_protocol.concurrency import first_failure
from upr_protocol.errors import UprError
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import SALT_BYTES, new_verifier
from upr_protocol.security import Credentials, Security, TlsSettings
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users, UsersError, normalised_name
from upr_server.config import ServerConfig, load_config
from upr_server.runtime import (
    ConfigError,
    collect_only_young,
    keep_heap_small,
    raise_file_limit,
    set_up_logging,
)
from upr_server.startup import serve
from upr_server.storage.directory import default_data_dir, lock_for_reading
from upr_server.storage.errors import DataDirectoryError, StorageError
from upr_server.storage.offline.dump import DumpOptions
from upr_server.storage.offline.findings import Problem, Progress, Stage
from upr_server.storage.offline.first_users import save_first_users
from upr_server.storage.offline.inspection import OutputClosedError, Task, bucket_names, inspect
from upr_server.storage.offline.mend import DamagedPartition, empty_damaged_replicas
from upr_server.storage.offline.restore import begin_new_histories
from upr_server.user_store import SECRET_BYTES

if TYPE_CHECKING:
    from upr_server.app import Server

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_UNSAVED = 3
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE

_options = (
    click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        envvar="UPR_SERVER_CONFIG",
        help="A TOML file with settings. `upr-server config` prints one.",
    ),
    click.option(
        "--listen", metavar="HOST:PORT", help="Where to listen. Port 0 stands for any free port."
    ),
    click.option(
        "--data-dir",
        metavar="DIR",
        help="Where buckets are stored.  [default: the platform's data directory]",
    ),
    click.option(
        "--tls-certificate",
        metavar="FILE",
        help="The server's certificate; then every connection is encrypted.  [default: none]",
    ),
    click.option(
        "--tls-key",
        metavar="FILE",
        help="The key of the certificate.  [default: in the certificate's file]",
    ),
    click.option(
        "--tls-client-ca",
        metavar="FILE",
        help="Clients need a certificate that one of the authorities in this file has signed.",
    ),
    click.option(
        "--tls-ca",
        metavar="FILE",
        help="The authorities of the other nodes' certificates.  [default: the system's]",
    ),
    click.option(
        "--node-user",
        metavar="NAME",
        help="The user as whom the server logs in to other nodes.  [default: its certificate's "
        "name]",
    ),
    click.option(
        "--node-password-file",
        metavar="FILE",
        help="The file with that user's password in its first line.",
    ),
    click.option(
        "--insecure-no-authentication",
        is_flag=True,
        default=None,
        help="Listen where other machines reach the server without users or encryption. Anybody "
        "there can then read and change everything.",
    ),
    click.option("--node", help="The server's name in partition maps.  [default: its identity]"),
    click.option(
        "--quota-bytes", type=int, help="The memory quota of a bucket that is created without one."
    ),
    click.option("--log-level", help="The lowest level to log: debug, info, warning or error."),
    click.option(
        "--log-format", help="The form of the log: console for people, json for programs."
    ),
)


def _with_options(command: Any) -> Any:
    for option in reversed(_options):
        command = option(command)
    return command


def _config(config_path: Path | None, **options: Any) -> ServerConfig:
    try:
        return load_config(config_path, os.environ, options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


class _Commands(click.Group):
    """Ends with 130 on Ctrl-C, wherever it comes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except* KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="upr-server", prog_name="upr-server")
def main() -> None:
    """A server that stores changes and streams them to consumers in consistent snapshots.

    Settings come from a TOML file (--config), from environment variables (UPR_SERVER_LISTEN and so
    on) and from options. Options override environment variables, which override the file.
    """


@main.command("serve")
@_with_options
def serve_command(config_path: Path | None, **options: Any) -> None:
    """Run the server until Ctrl-C or SIGTERM.

    A second signal closes all connections at once. If mutations that are only in memory are lost by
    that, or because the disk is full, the exit code is 3. The first line on standard output is
    `listening on HOST:PORT`; the log goes to standard error.
    """
    config = _config(config_path, **options)
    set_up_logging(config.log_level, config.log_format)

    # A crash in C tells its place on standard error.
    faulthandler.enable(2)
    keep_heap_small()
    # Each connection is a file.
    raise_file_limit()
    collect_only_young()

    loss, is_listening = "", False

    def on_listening(server: Server) -> None:
        nonlocal is_listening
        is_listening = True
        host = f"[{server.host}]" if ":" in server.host else server.host
        try:
            print(f"listening on {host}:{server.port}", flush=True)
        except OSError:
            # Nobody reads it, or its disk is full. The log says the same.
            _discard_output()

    try:
        loss = trio.run(serve, config, on_listening)
    except* UprError as errors:
        _say(str(first_failure(errors)))
        sys.exit(EXIT_FAILED)
    except* (OSError, MemoryError, ImportError) as errors:
        # Later it is a fault of ours, and keeps its traceback.
        if is_listening:
            raise
        reason = str(first_failure(errors)) or "out of memory"
        _say(f"cannot start: {reason}; look at `ulimit -a`")
        sys.exit(EXIT_FAILED)
    if loss:
        _say(f"{loss}; data that was only in memory is lost; the log says how much")
        sys.exit(EXIT_UNSAVED)


def _discard_output() -> None:
    # Python writes what is left in its buffer when it exits, and would fail again.
    with open(os.devnull, "wb") as null_device:
        os.dup2(null_device.fileno(), sys.stdout.fileno())


@main.command("conformance")
@click.option("--client", metavar="COMMAND", help="Play a server to the client that this starts.")
@click.option(
    "--server", metavar="HOST:PORT", help="Play a client to the server that listens there."
)
@click.option("--list", "is_list", is_flag=True, help="Print the names of the scenarios.")
@click.argument("scenarios", nargs=-1)
def conformance_command(
    client: str | None, server: str | None, is_list: bool, scenarios: tuple[str, ...]
) -> None:
    """Check whether a client, or a server, keeps the protocol.

    Plays all SCENARIOS, or those named, and prints one line for each: `ok`, or `FAILED` with what
    the other side did wrong. Ends with 1 if any failed. A client gets its task as JSON on standard
    input; docs/protocol.md describes the tasks. At a server, the scenarios create and delete the
    bucket `conformance`.
    """
    # Here, as no other command needs it: a server should start soon.
    from upr_server.conformance import (
        CLIENT_SCENARIOS,
        check_client,
        check_server,
        server_scenario_names,
    )

    if is_list and client is None and server is None:
        _print("\n".join(("With --client:", *CLIENT_SCENARIOS)))
        _print("\n".join(("", "With --server:", *server_scenario_names())))
        return
    if (client is None) == (server is None):
        raise click.UsageError("give either --client or --server")
    if client is not None:
        names, verdicts = list(CLIENT_SCENARIOS), check_client(_command(client), scenarios)
    else:
        assert server is not None
        try:
            address = Address.parse(f"upr://{server}")
        except AddressError as error:
            raise click.UsageError(f"--server: {error}") from error
        names = server_scenario_names()
        verdicts = check_server(address.host, address.port, scenarios)
    if unknown := set(scenarios) - set(names):
        raise click.UsageError(f"there is no scenario {min(unknown)!r}; --list prints the names")
    if is_list:
        _print("\n".join(names))
        return

    async def play() -> int:
        failed = 0
        async with aclosing(verdicts):
            async for verdict in verdicts:
                failed += bool(verdict.failure)
                line = f"FAILED  {verdict.scenario}: {verdict.failure}"
                _print(line if verdict.failure else f"ok      {verdict.scenario}")
        return failed

    try:
        failed = trio.run(play)
    except OSError as error:
        _say(f"cannot reach {server}: {error.strerror or error}")
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_FAILED if failed else 0)


def _command(text: str) -> list[str]:
    """The program and the arguments that `--client` names."""
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--client: {text!r} is no command: {error}") from error
    if not command:
        raise click.UsageError("--client: name the command that starts the client")
    return command


@main.command("config")
@_with_options
def config_command(config_path: Path | None, **options: Any) -> None:
    """Print the settings that `serve` would use, as a TOML file, and which kernel it would run."""
    settings = _config(config_path, **options).to_toml()
    _print(f"# kernel: {upr_kernel.BUILD}\n{settings}", nl=False)


_PROGRESS_S = 0.2

_CHECK_EXITS = """\b
Exit codes:
  0    no problems
  1    problems, one per line on standard output, or the output cannot be written
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""

_DUMP_EXITS = """\b
Exit codes:
  0    everything was printed
  1    damaged records were left out, or the output cannot be written
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""

_RESTORE_EXITS = """\b
Exit codes:
  0    the copy is ready to be served
  1    the directory is in use, damaged or not writable
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""

_INIT_EXITS = """\b
Examples:
  upr-server init --user ada
  upr-server init --from uprs://db1:12000 --user node2 --password-file node2.password

\b
Exit codes:
  0    the data directory has users
  1    it has users already, is in use or not writable, or the other node did not give any
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""

_MEND_EXITS = """\b
Exit codes:
  0    no replica has damaged chunks any more
  1    the node is active for a damaged partition, or the directory cannot be used
  2    wrong usage: check the command line
  130  interrupted by Ctrl-C
"""

_data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    envvar="UPR_SERVER_DATA_DIR",
    default=default_data_dir,
    help="The data directory.  [default: where `serve` stores a user's data]",
)


@main.command("init", epilog=_INIT_EXITS)
@_data_dir
@click.option(
    "--user",
    metavar="NAME",
    help="The first user, who may do everything. With --from: the user to log in as there.",
)
@click.option(
    "--password-file",
    metavar="FILE",
    help="The file with the user's password in its first line.  [default: asks for it; with --from "
    "takes UPR_PASSWORD first]",
)
@click.option(
    "--certificate-only",
    is_flag=True,
    help="The first user has no password, and logs in with a certificate that has this name.",
)
@click.option(
    "--from",
    "source",
    metavar="URL",
    help="Copy the users of the cluster from a node that has them. The user needs the right "
    "replicate on *.",
)
@click.option("--tls-ca", metavar="FILE", default="", help="With --from: see `serve`.")
@click.option("--tls-certificate", metavar="FILE", default="", help="With --from: see `serve`.")
@click.option("--tls-key", metavar="FILE", default="", help="With --from: see `serve`.")
def init_command(
    data_dir: Path,
    user: str | None,
    password_file: str | None,
    certificate_only: bool,
    source: str | None,
    **files: str,
) -> None:
    """Make the first user of a cluster, or give another node its users.

    A server whose data directory has users lets nobody do anything without a log-in. Run this
    before the first start of each node; one node gets the first user, the others copy from it.
    """
    try:
        if source is not None:
            if certificate_only:
                raise click.UsageError("--certificate-only goes without --from")
            if user is None and password_file is not None:
                raise click.UsageError("--password-file goes with --user: whose password it is")
            tls = TlsSettings(files["tls_ca"], files["tls_certificate"], files["tls_key"])
            credentials = Credentials(user, _password(user, password_file)) if user else None
            users = _users_of(source, Security(None if tls == TlsSettings() else tls, credentials))
        else:
            if any(files.values()):
                raise click.UsageError("--tls-ca, --tls-certificate and --tls-key go with --from")
            if user is None:
                raise click.UsageError("name the first user with --user")
            users = _first_users(user, password_file, certificate_only=certificate_only)
        save_first_users(data_dir, users)
    except* (UprError, OSError) as errors:
        _say(str(first_failure(errors)))
        sys.exit(EXIT_FAILED)
    names = ", ".join(users.users)
    _print(f"{data_dir} has the users of revision {users.revision}: {names}")


def _first_users(name: str, password_file: str | None, *, certificate_only: bool) -> Users:
    if certificate_only and password_file is not None:
        raise click.UsageError("give either --certificate-only or --password-file")
    verifier = None
    if not certificate_only:
        password = _password(name, password_file, is_new=True)
        verifier = new_verifier(password, os.urandom(SALT_BYTES), SCRAM_ITERATIONS_DEFAULT)
    grants = tuple(Grant(right, EVERYTHING) for right in Right)
    # What strangers hear of users who do not exist follows from the secret, on all nodes alike.
    return Users(secret=os.urandom(SECRET_BYTES)).with_user(
        User(normalised_name(name, "the user's name"), verifier, grants)
    )


def _users_of(source: str, security: Security) -> Users:
    """The users of the cluster, as the node at `source` has them."""
    # Here, as no other command needs it: a server should start soon.
    from upr_protocol.client import open_node

    async def ask() -> Users:
        async with open_node(Address.parse(source, security), identity="node:init") as node:
            users = await node.users()
        if users is None or users.is_open:
            raise UsersError(f"{source} has no users: run `upr-server init` there first")
        return users

    return trio.run(ask)


def _password(name: str, path: str | None, *, is_new: bool = False) -> str:
    from upr_protocol.cli.passwords import log_in_password, new_password
    from upr_protocol.client import read_password

    if path is not None:
        return read_password(path)
    return new_password(name, "--password-file") if is_new else log_in_password(name)


@main.command("check", epilog=_CHECK_EXITS)
@_data_dir
def check_command(data_dir: Path) -> None:
    """Check a data directory for damage.

    The command reads every record, chunk and index entry, and compares them with their checksums
    and with each other. It changes nothing. Stop the server that uses the directory first.
    """
    inspected = _inspect(data_dir, None, "check", DumpOptions())
    for problem in inspected.problems:
        _print(str(problem))
    if inspected.problems:
        _say(f"{data_dir} has {len(inspected.problems)} problems")
        sys.exit(EXIT_FAILED)
    _print(f"{data_dir} has no problems: {inspected.summary()}")


@main.command("dump", epilog=_DUMP_EXITS)
@_data_dir
@click.option("--bucket", help="Print only this bucket.  [default: all]")
@click.option(
    "--partition", type=click.IntRange(0), help="Print only this partition.  [default: all]"
)
@click.option("--keys-only", is_flag=True, help="Leave out the values.")
@click.option(
    "--history", is_flag=True, help="Print every mutation that is still stored, oldest first."
)
def dump_command(
    data_dir: Path, bucket: str | None, partition: int | None, keys_only: bool, history: bool
) -> None:
    """Print the contents of a data directory, one JSON object per line.

    By default that is the newest mutation of each key, deletions too, in the order in which they
    were made. Keys and values are text where they are UTF-8; otherwise they are base64, and a
    second field (key_encoding, value_encoding) says so. Damaged records are left out, and reported
    on standard error. The command changes nothing. Stop the server that uses the directory first.
    """
    options = DumpOptions(partition, keys_only, history)
    inspected = _inspect(data_dir, bucket, "dump", options)
    for problem in inspected.problems:
        _say(str(problem))
    if inspected.problems:
        sys.exit(EXIT_FAILED)
    if partition is not None and not inspected.stages:
        place = "" if bucket is None else f" of bucket {bucket!r}"
        raise click.UsageError(f"{data_dir} has no partition {partition}{place}")


@main.command("restore", epilog=_RESTORE_EXITS)
@_data_dir
@click.option(
    "--new-histories",
    is_flag=True,
    help="Required: begin new histories. Consumers that have more than the copy will roll back.",
)
def restore_command(data_dir: Path, new_histories: bool) -> None:
    """Prepare a restored data directory for its first start.

    A copy continues the histories of its original, and would give sequence numbers that consumers
    already have to other changes. After this command, every bucket begins new histories when the
    server starts. Stop the server that uses the directory first.
    """
    if not new_histories:
        raise click.UsageError(
            "say --new-histories: the buckets begin new histories, and consumers that have more "
            "than the copy roll back"
        )
    try:
        buckets = begin_new_histories(data_dir)
    except StorageError as error:
        _say(str(error))
        sys.exit(EXIT_FAILED)
    for bucket in buckets:
        _print(f"{bucket.name}: {bucket.partition_count} partitions begin new histories")
    _print(f"{data_dir} is ready to be served")


@main.command("mend", epilog=_MEND_EXITS)
@_data_dir
def mend_command(data_dir: Path) -> None:
    """Empty the damaged partitions of which this node is a replica.

    The node copies them from the active node when it runs again. Make sure that the active node
    runs and is intact: the command removes this node's copy.

    It reads and verifies all chunks. It changes nothing in partitions that are intact, and nothing
    in those for which this node is active: let a replica take these over first. Stop the server
    that uses the directory first.
    """
    damaged: list[DamagedPartition] = []
    try:
        for partition in empty_damaged_replicas(data_dir):
            # At once: an error that follows must not hide what was emptied already.
            _print(str(partition))
            damaged.append(partition)
    except DataDirectoryError as error:
        _say(str(error))
        sys.exit(EXIT_FAILED)
    except StorageError as error:
        _say(f"{error}; run `upr-server check`")
        sys.exit(EXIT_FAILED)
    if not damaged:
        _print(f"{data_dir} has no damaged chunks")
    if not all(partition.is_emptied for partition in damaged):
        sys.exit(EXIT_FAILED)


class _Inspected:
    """What an inspection found so far."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.buckets = self.stages = self.chunks = self.chunk_bytes = self.records = 0
        self._shown_at = time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def summary(self) -> str:
        """How much was inspected, in a line."""
        return (
            f"{self.buckets:,} buckets, {self.chunks:,} chunks of {self.chunk_bytes:,} bytes, "
            f"{self.records:,} records"
        )

    def take(self, checked: Progress) -> None:
        """Counts, and shows the counts on a terminal."""
        self.chunks += checked.chunks
        self.chunk_bytes += checked.chunk_bytes
        self.records += checked.records
        if self._on_terminal and time.monotonic() - self._shown_at > _PROGRESS_S:
            self._shown_at = time.monotonic()
            click.echo(f"\r{self.summary()}", nl=False, err=True)

    def clear(self) -> None:
        """Leaves the terminal's line empty."""
        if self._on_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)


def _inspect(data_dir: Path, bucket: str | None, task: Task, options: DumpOptions) -> _Inspected:
    inspected = _Inspected()
    try:
        with lock_for_reading(data_dir):
            names = bucket_names(data_dir)
            if bucket is not None and bucket not in names:
                text = ", ".join(names) or "none"
                raise click.UsageError(f"{data_dir} has no bucket {bucket!r}; it has {text}")
            names = names if bucket is None else [bucket]
            inspected.buckets = len(names)
            for finding in inspect(data_dir, names, task, options):
                if isinstance(finding, Problem):
                    inspected.problems.append(finding)
                elif isinstance(finding, Stage):
                    inspected.stages += 1
                else:
                    inspected.take(finding)
        inspected.clear()
    except DataDirectoryError as error:
        _say(str(error))
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OutputClosedError:
        sys.exit(EXIT_BROKEN_PIPE)
    return inspected


def _say(sentence: str) -> None:
    click.echo(f"upr-server: {sentence}", err=True)


def _print(text: str, *, nl: bool = True) -> None:
    """Prints on standard output. If it cannot be written, that ends the command."""
    try:
        click.echo(text, nl=nl)
    except OSError as error:
        _discard_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(EXIT_BROKEN_PIPE)
        _say(f"the output cannot be written: {error.strerror}")
        sys.exit(EXIT_FAILED)
