"""The process that serves: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import uvicorn

from gshard import GShardError
from gshard_m4.serve import access
from gshard_m4.serve.app import make_app
from gshard_m4.serve.config import ServeConfig
from gshard_m4.serve.connections import Connections, Guarded
from gshard_m4.serve.limits import Patience
from gshard_m4.serve.starting import starting
from gshard_m4.translate import Translator


class ServeError(GShardError):
    """The server cannot start."""


def listen(options: ServeConfig) -> socket.socket:
    """A socket that listens on the address asked for.

    Raises:
        ServeError: the port is in use, not allowed, or the address is not of this machine; or this process may not
            have so many connections.
    """
    _allow_files(options.connections)
    where = f"{options.host}:{options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"there is no address {options.host!r} to listen on: {error.strerror}.", where) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(min(options.connections, 4096))
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            hint = "Stop what listens there, or name another one with --port (0 takes one that is free)."
            raise ServeError(f"port {options.port} is in use.", where, hint=hint) from error
        if error.errno == errno.EACCES:
            hint = "Ports below 1024 need rights; name another one with --port."
            raise ServeError(f"port {options.port} is not allowed.", where, hint=hint) from error
        raise ServeError(f"cannot listen: {error.strerror}.", where) from error
    return found


def _allow_files(connections: int) -> None:
    """Each connection is an open file, of which a process may often have 1,024 only, unless it asks for more."""
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ServeError(
            f"this process may open {hard} files, which is too few for {connections} connections.",
            hint=f"Give --connections of at most {max(hard - _OTHER_FILES, 1)}, or raise the limit (ulimit -Hn).",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


_OTHER_FILES = 128
_AFTER = 2.0  # seconds after the grace in which refusals are still written


class _Server(uvicorn.Server):
    """Uvicorn, that ends with an exit code of ours instead of by the signal that stopped it."""

    signal = 0

    def __init__(self, config: uvicorn.Config, patience: Patience, grace: float):
        super().__init__(config)
        self._patience, self._grace = patience, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What is not answered within the grace is refused; what is not read after that is dropped."""
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._grace, self._patience.end),
            loop.call_later(self._grace + _AFTER, self._drop),
        ]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    def _drop(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A first signal lets requests end; a second one ends the process as it is."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(128 + number)
            self.should_exit = True
            self.signal = number

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"dated": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "dated"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": level, "propagate": False}
        for name, level in (("uvicorn", "ERROR"), ("gshard_m4.serve", "WARNING"))
    },
}


def serve(
    translator: Translator,
    options: ServeConfig,
    bound: socket.socket,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
    identify: Callable[[Sequence[str]], str | None] = lambda lines: None,
) -> int:
    """Serves until SIGTERM or SIGINT, then lets requests end. Must be called from the main thread.

    Args:
        translator: what translates; its program is compiled before the first request is taken.
        options: limits.
        bound: what `listen` gave.
        say: takes what is to be told.
        identify: tells the language of lines of text, if it can.

    Returns:
        The signal that ended it.
    """
    say("gshard-m4: compiling ...")
    with starting(bound):
        identify(["a"])  # counts what it needs
        translator.translate([" ".join(["a"] * n) for n in _lengths(translator.text.length)])
    server: _Server
    app = make_app(translator, options, lambda: server.should_exit, identify)
    log_access = access.logger(options.access_log).info
    connections = Connections(
        options,
        lambda reason: app.state.metrics.refused.labels(reason).inc(),
        lambda *answer: log_access(access.line(*answer)),
    )
    app.state.metrics.open.set_function(lambda: connections.open)
    config = uvicorn.Config(
        app,
        log_config=_LOGGING,
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        backlog=min(options.connections, 4096),
        timeout_keep_alive=5,
        timeout_graceful_shutdown=math.ceil(options.grace + 2 * _AFTER),
        h11_max_incomplete_event_size=16 * 1024,
        http=functools.partial(Guarded, connections=connections),  # type: ignore[arg-type]
        ws="none",
        proxy_headers=bool(options.proxies),
        forwarded_allow_ips=options.proxies or None,
    )
    server = _Server(config, app.state.patience, options.grace)
    host, port = bound.getsockname()[:2]
    say(f"gshard-m4: serving on http://{f'[{host}]' if ':' in host else host}:{port}/ (stop with Ctrl-C)")
    server.run(sockets=[bound])
    return server.signal


def _lengths(longest: int) -> list[int]:
    """Lengths of sentences that need every width a program is compiled for."""
    found = [8]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return found
