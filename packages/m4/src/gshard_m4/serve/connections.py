"""Connections: how many there may be, of all clients and of one, and how long each may take for what it does.

Uvicorn's own protocol has no limit for a client that never ends its headers, dribbles a body that nobody asked for, or
never reads an answer. Here a connection always has a deadline: for the headers of a request, for its answer, for being
closed. One address may hold only so many connections; those of a proxy that is named are not counted, since they are
many clients'.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from gshard_m4.serve.config import ServeConfig
from gshard_m4.serve.limits import client_of

Told = Callable[[str, str, int, int], None]
"""Is told of an answer that the application did not give: address, request line, status and bytes."""


class Connections:
    """The open connections.

    Args:
        options: their limits, and the proxies.
        refused: is told the reason of each that is refused: ``all`` or ``address`` (too many), ``headers`` (too slow),
            ``request`` (no HTTP), ``answer`` (not read).
        told: see `Told`.
    """

    def __init__(self, options: ServeConfig, refused: Callable[[str], None], told: Told):
        self.options, self.refused, self.told = options, refused, told
        self._of: Counter[str] = Counter()
        self._open = 0
        words = [word.strip() for word in options.proxies.split(",") if word.strip()]
        self._any_proxy = "*" in words
        self._proxies = [ipaddress.ip_network(word, strict=False) for word in words if word != "*"]

    def _is_proxy(self, client: str) -> bool:
        if self._any_proxy:
            return True
        try:
            address = ipaddress.ip_address(client)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)

    @property
    def open(self) -> int:
        """How many there are."""
        return self._open

    def take(self, client: str) -> str | None:
        """Counts one more of a client, or says why there may be none."""
        if self._open >= self.options.connections:
            return "all"
        if self._of[client] >= self.options.per_address and not self._is_proxy(client):
            return "address"
        self._of[client] += 1
        self._open += 1
        return None

    def give_back(self, client: str) -> None:
        """One that was taken is closed."""
        self._open -= 1
        self._of[client] -= 1
        if not self._of[client]:
            del self._of[client]


class Guarded(H11Protocol):
    """One connection.

    Args:
        connections: all of them.
        more: what uvicorn gives.
    """

    def __init__(self, *, connections: Connections, **more: Any):
        super().__init__(**more)
        self._all = connections
        self._client = ""
        self._taken = False
        self._began = False  # something has come since the last answer
        self._doing: object = None  # the request that is answered, or "headers", or nothing
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts it, or refuses it."""
        super().connection_made(transport)
        self._client = client_of(self.client[0] if self.client else "")
        refused = self._all.take(self._client)
        self._taken = refused is None
        if refused is None:
            self._do("headers")
        elif refused == "all":
            self._refuse(refused, 503, "Too many connections are open.", {"Retry-After": "5"})
        else:
            self._refuse(refused, 429, "Too many connections from this address are open.", {"Retry-After": "5"})

    def data_received(self, data: bytes) -> None:
        """Part of a request."""
        if self.transport.is_closing():
            return
        self._began = True
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """An answer was written; the client has so long to read it, or to ask for something else."""
        self._began = False
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._taken:
            self._taken = False
            self._all.give_back(self._client)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """This is no HTTP."""
        self._refuse("request", 400, "This is not HTTP.", {})

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more was asked for."""
        super().timeout_keep_alive_handler()
        self._close()

    def _look(self) -> None:
        """What it is doing now has its own deadline."""
        if self.transport.is_closing():
            self._close()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._do(self.cycle)
        else:
            self._do("headers" if self._began else None)

    def _do(self, what: object) -> None:
        if what is self._doing:
            return
        self._doing = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None:
            # A request: its body, its translation, and then something for the answer.
            seconds = self._all.options.headers if what == "headers" else 2 * self._all.options.timeout + 10
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._doing != "headers":
            self._all.refused("answer")
            self.transport.abort()
        elif self._began and self.cycle is None:
            seconds = f"{self._all.options.headers:g}"
            self._refuse("headers", 408, f"The request did not come within {seconds} seconds.", {})
        else:  # it has said nothing, or goes on with a body that was refused
            self._all.refused("headers")
            self.transport.close()
            self._close()

    def _refuse(self, reason: str, status: int, text: str, headers: dict[str, str]) -> None:
        body = json.dumps({"error": text}).encode()
        lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"} | headers
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in lines.items()), "", ""]
        self.transport.write("\r\n".join(head).encode() + body)
        self.transport.close()
        self._all.refused(reason)
        self._all.told(self._client, "-", status, len(body))
        self._close()

    def _close(self) -> None:
        """Closed on this side: what the client has not read after some seconds is thrown away."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(_UNREAD, self.transport.abort)


_UNREAD = 5.0  # seconds
