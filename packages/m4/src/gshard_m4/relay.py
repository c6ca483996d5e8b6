"""A relay between a process and JAX's coordinator that outlives the coordinator.

JAX's client ends its process, by an abort and with a message of its own, in the instant in which its connection to
the coordinator breaks. When the first process is killed, every other one would so end as if it had crashed itself,
or as the watchdog says, whichever thread is quicker. Through a relay the client's connection stays open, and silent:
it is the watchdog that hears of the death, names it and ends the process. If the watchdog hears nothing, because only
this connection broke, the client's own heartbeats fail a minute later, as they would without a relay.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_RETRY = 0.2  # seconds between attempts to reach a coordinator that does not listen yet
_BYTES = 1 << 16


class Relay:
    """Listens on this machine and passes on what comes to a coordinator and back.

    Args:
        host, port: of the coordinator.

    Attributes:
        address: what to give to ``jax.distributed.initialize`` for the coordinator's address.
    """

    def __init__(self, host: str, port: int):
        self._to = host, port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Takes no more connections; those there are stay as they are."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near:
            far = self._reach(near)
            if far is None:
                return
            with far:
                for line in (near, far):
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass_on, args=(far, near), daemon=True).start()
                _pass_on(near, far)  # until the client closes its end; that the coordinator did is not passed on

    def _reach(self, near: socket.socket) -> socket.socket | None:
        """A connection to the coordinator, as soon as it listens; None once the client no longer waits for one."""
        while not _closed(near):
            try:
                return socket.create_connection(self._to, timeout=30)
            except OSError:
                time.sleep(_RETRY)
        return None


def _closed(line: socket.socket) -> bool:
    """Whether the other side has closed a connection; nothing is read."""
    try:
        return line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    source.settimeout(None)
    with contextlib.suppress(OSError):
        while data := source.recv(_BYTES):
            target.sendall(data)
