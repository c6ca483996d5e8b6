"""The process that serves: its socket, its signals, its end."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from gshard import GShardError
from m4.serve.app import make_app
from m4.serve.config import ServeConfig
from m4.translate import Translator


class ServeError(GShardError):
    """The server cannot start."""


def listen(options: ServeConfig) -> socket.socket:
    """A socket that listens on the address asked for.

    Raises:
        ServeError: the port is in use, not allowed, or the address is not of this machine.
    """
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
            way_out = "Stop what listens there, or name another one with --port (0 takes one that is free)."
            raise ServeError(f"port {options.port} is in use.", where, way_out=way_out) from error
        if error.errno == errno.EACCES:
            way_out = "Ports below 1024 need rights; name another one with --port."
            raise ServeError(f"port {options.port} is not allowed.", where, way_out=way_out) from error
        raise ServeError(f"cannot listen: {error.strerror}.", where) from error
    return found


class _Server(uvicorn.Server):
    """Uvicorn, that ends with an exit code of ours instead of by the signal that stopped it."""

    signal = 0

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


def serve(
    translator: Translator,
    options: ServeConfig,
    bound: socket.socket,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> int:
    """Serves until SIGTERM or SIGINT, then lets requests end. Must be called from the main thread.

    Args:
        translator: what translates; its program is compiled before the first request is taken.
        options: limits.
        bound: what `listen` gave.
        say: takes what is to be told.

    Returns:
        The signal that ended it.
    """
    translator.translate([" ".join(["a"] * n) for n in _lengths(translator.text.length)])
    server: _Server
    app = make_app(translator, options, lambda: server.should_exit)
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            limit_concurrency=options.connections,
            backlog=min(options.connections, 4096),
            timeout_keep_alive=5,
            timeout_graceful_shutdown=math.ceil(options.grace),
            h11_max_incomplete_event_size=16 * 1024,
            http="h11",
            ws="none",
            proxy_headers=bool(options.proxies),
            forwarded_allow_ips=options.proxies or None,
        )
    )
    host, port = bound.getsockname()[:2]
    say(f"m4: serving on http://{f'[{host}]' if ':' in host else host}:{port}/ (stop with Ctrl-C)")
    server.run(sockets=[bound])
    return server.signal


def _lengths(longest: int) -> list[int]:
    """Lengths of sentences that need every width a program is compiled for."""
    found = [8]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return found
