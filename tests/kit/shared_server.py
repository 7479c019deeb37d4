"""A real server process for the tests of a file that do it no harm: it is started once for all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import trio

from tests.kit.process import ServerProcess, server_process
from tests.kit.threaded import TrioThread


class SharedServer:
    """A server that starts when it is first needed, and once more after a test that failed.

    Args:
        thread: Where Trio runs while it does. Each test has a Trio of its own.
        variables: More for its environment.
    """

    def __init__(self, thread: TrioThread, variables: Mapping[str, str] | None = None) -> None:
        self._thread = thread
        self._variables = variables
        self._context: AbstractAsyncContextManager[ServerProcess] | None = None
        self._server: ServerProcess | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[ServerProcess]:
        """The server, for a test. A test that fails kills it, and the next one starts another."""
        server = await trio.to_thread.run_sync(self._running)
        try:
            yield server
            assert not server.faults, server.faults
        except BaseException as error:
            error.add_note(
                f"The log of the server that tests share ends:\n{server.log_text[-4000:]}"
            )
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.kill)
            raise

    def stop(self) -> None:
        """Stops the server with all the checks of `server_process`, if one runs."""
        context, self._context, self._server = self._context, None, None
        if context is not None:
            self._thread.run(lambda: context.__aexit__(None, None, None))

    def kill(self) -> None:
        """Kills the server, if one runs, and checks nothing."""
        if self._server is not None:
            self._server.kill()
            context, self._context, self._server = self._context, None, None
            assert context is not None
            failure = AssertionError("a test failed")
            with suppress(AssertionError):
                self._thread.run(lambda: context.__aexit__(type(failure), failure, None))

    def _running(self) -> ServerProcess:
        if self._server is None:
            self._context = context = server_process(variables=self._variables)
            self._server = self._thread.run(context.__aenter__)
        return self._server
