"""The process that serves: its socket, its signals, its end."""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from gshard import GShardError
from gshard_m4.serve.app import make_app
from gshard_m4.serve.config import ServeConfig
from gshard_m4.serve.starting import starting
from gshard_m4.translate import Translator


class ServeError(GShardError):
    """The server cannot start."""


def listen(options: ServeConfig) -> socket.socket:
    """A socket that listens on the address asked for.

    Raises:
        ServeError: the port is in use, not allowed, or the address is not of this machine.
    """
    where = f"{options.host}:{options.port}"
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=options.connections)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = "Stop what listens there, or name another one with --port (0 takes one that is free)."
            raise ServeError(f"port {options.port} is in use.", where, hint=hint) from error
        if error.errno == errno.EACCES:
            hint = "Ports below 1024 need rights; name another one with --port."
            raise ServeError(f"port {options.port} is not allowed.", where, hint=hint) from error
        raise ServeError(f"cannot listen: {error.strerror}.", where) from error


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
    say("gshard-m4: compiling ...")
    with starting(bound):
        translator.translate([" ".join(["a"] * n) for n in _lengths(translator.text.length)])
    server: _Server
    config = uvicorn.Config(
        make_app(translator, options, lambda: server.should_exit),
        log_config=_LOGGING,
        access_log=options.access_log,
        server_header=False,
        lifespan="on",
        backlog=options.connections,
        limit_concurrency=options.connections,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=math.ceil(options.grace),
        h11_max_incomplete_event_size=16 * 1024,
        http="h11",
        ws="none",
        proxy_headers=bool(options.proxies),
        forwarded_allow_ips=options.proxies or None,
    )
    server = _Server(config)
    ended_by = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal ended_by
        ended_by = number

    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn handles them, and raises them again once it has ended
        signal.signal(number, note)
    host, port = bound.getsockname()[:2]
    say(f"gshard-m4: serving on http://{f'[{host}]' if ':' in host else host}:{port}/ (stop with Ctrl-C)")
    server.run(sockets=[bound])
    return ended_by


class _Server(uvicorn.Server):
    """Uvicorn's server, except that a second signal ends the process without waiting for requests."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Lets requests end."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)


def _lengths(longest: int) -> list[int]:
    """Lengths of sentences that need every width a program is compiled for."""
    found = [8]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return found


_LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"dated": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "formatter": "dated"},
        "stdout": {"class": "logging.StreamHandler", "formatter": "dated", "stream": "ext://sys.stdout"},
    },
    "loggers": {
        "uvicorn.error": {"handlers": ["stderr"], "level": "ERROR", "propagate": False},
        "uvicorn.access": {"handlers": ["stdout"], "level": "INFO", "propagate": False},
        "gshard_m4.serve": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
    },
}
