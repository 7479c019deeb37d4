"""Running a client against the scripted server of a scenario."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import attrs
import trio

from upr_server.conformance.client_scenario import ClientScenario
from upr_server.conformance.failure import ConformanceError
from upr_server.conformance.scripted_server import ScriptedServer

RUN_TIMEOUT_S: Final = 60.0
"""How long to wait for each connection of the client, and for its end."""


async def play_client_scenario(scenario: ClientScenario, command: Sequence[str]) -> None:
    """Runs a client against the scripted server of one scenario.

    Args:
        scenario: The scenario.
        command: Starts the client: the program and its arguments.

    Raises:
        ConformanceError: The client does something else than it must.
    """
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listener = listeners[0]
    port: int = listener.socket.getsockname()[1]
    scripts: list[ScriptedServer] = []

    async def accept() -> ScriptedServer:
        with trio.move_on_after(RUN_TIMEOUT_S):
            scripts.append(ScriptedServer(await listener.accept()))
            return scripts[-1]
        raise ConformanceError("the client did not connect")

    task = json.dumps({**scenario.task, "host": "127.0.0.1", "port": port}).encode()
    try:
        async with trio.open_nursery() as nursery:
            client = _RunningClient()
            nursery.start_soon(_run_client, client, command, task)
            await scenario.play(accept)
            with trio.fail_after(RUN_TIMEOUT_S):
                await client.ended.wait()
            nursery.cancel_scope.cancel()
    except* ConformanceError as errors:
        raise _first(errors) from None
    except* trio.BrokenResourceError:
        raise ConformanceError("the client closed the connection in the middle") from None
    except* trio.TooSlowError:
        raise ConformanceError(f"the client did not end within {RUN_TIMEOUT_S:.0f} s") from None
    finally:
        await listener.aclose()
    scenario.check(_outcome_of(client))


def _first(errors: BaseExceptionGroup[ConformanceError]) -> ConformanceError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


@attrs.define(eq=False)
class _RunningClient:
    ended: trio.Event = attrs.field(factory=trio.Event)
    code: int = 0
    output: bytes = b""


async def _run_client(client: _RunningClient, command: Sequence[str], task: bytes) -> None:
    try:
        process = await trio.run_process(command, stdin=task, capture_stdout=True, check=False)
    except OSError as error:
        raise ConformanceError(f"cannot start {command[0]}: {error.strerror}") from error
    client.code, client.output = process.returncode, process.stdout
    if process.returncode:
        raise ConformanceError(f"the client ended with code {process.returncode}")
    client.ended.set()


def _outcome_of(client: _RunningClient) -> Any:
    try:
        return json.loads(client.output)
    except ValueError as error:
        text = client.output[:200].decode(errors="replace")
        raise ConformanceError(f"the client wrote no JSON, but {text!r}") from error
