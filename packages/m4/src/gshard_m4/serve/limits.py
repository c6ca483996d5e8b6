"""How much, and how often, a client may ask."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections import OrderedDict
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

_CLIENTS = 10_000  # addresses that are remembered; the one that was silent longest is forgotten first


def client_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 network that an IPv6 address is one of 2**64 in.

    >>> client_of("192.0.2.7"), client_of("::ffff:192.0.2.7"), client_of("2001:db8:1:2:3:4:5:6")
    ('192.0.2.7', '192.0.2.7', '2001:db8:1:2::')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> 64 << 64))


class Rate:
    """A bucket for each address, that holds `burst` requests and is refilled at `rate` a second.

    >>> rate = Rate(rate=1.0, burst=2)
    >>> [rate.ask("a", now=0.0), rate.ask("a", now=0.0), rate.ask("a", now=0.25), rate.ask("b", now=0.25)]
    [0.0, 0.0, 0.75, 0.0]
    """

    def __init__(self, rate: float, burst: int):
        self._rate, self._burst = rate, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def ask(self, address: str, now: float | None = None) -> float:
        """Takes one request from the bucket; seconds to wait if it is empty, else 0."""
        if not self._rate:
            return 0.0
        now = time.monotonic() if now is None else now
        left, since = self._buckets.pop(address, (float(self._burst), now))
        left = min(left + (now - since) * self._rate, float(self._burst))
        allowed = left >= 1
        self._buckets[address] = (left - allowed, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._rate


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, of which no more than `limit` bytes are ever kept.

    Raises:
        HTTPException: 413 if it is longer, 400 if the client went away.
    """
    too_long = HTTPException(413, f"The body is longer than {limit} bytes.", {"Connection": "close"})
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced[:20]) > limit:
        raise too_long
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_long
    except ClientDisconnect:
        raise HTTPException(400, "The client went away.") from None
    return bytes(body)


class Patience:
    """The deadlines of all requests under way, which can be brought forward to now: when the server is to end."""

    def __init__(self) -> None:
        self.over = False
        self._running: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError in the block once it takes longer, or at `end`."""
        if self.over:
            raise TimeoutError
        async with asyncio.timeout(seconds) as deadline:
            self._running.add(deadline)
            try:
                yield
            finally:
                self._running.discard(deadline)

    def end(self) -> None:
        """Nobody is waited for any more."""
        self.over = True
        now = asyncio.get_running_loop().time()
        for deadline in list(self._running):
            with contextlib.suppress(RuntimeError):  # it is just passing by itself
                deadline.reschedule(now)
