"""How much, and how often, a client may ask."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")

_GONE = 499  # nginx's status for a closed connection; for the metrics
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
    """A bucket for each address, that holds `burst` sentences and is refilled at `rate` a second.

    A request takes one before it is read. How many more it has is known afterwards, and `charge` takes these, below
    zero if need be: then the next request waits until the bucket has one again.

    >>> rate = Rate(rate=1.0, burst=2)
    >>> [rate.ask("a", now=0.0), rate.ask("a", now=0.0), rate.ask("a", now=0.25), rate.ask("b", now=0.25)]
    [0.0, 0.0, 0.75, 0.0]
    >>> rate.charge("b", 9, now=0.25)
    >>> rate.ask("b", now=0.25)
    9.0
    """

    def __init__(self, rate: float, burst: int):
        self._rate, self._burst = rate, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def ask(self, address: str, now: float | None = None) -> float:
        """Takes one sentence from the bucket; seconds to wait if it has none, else 0."""
        if not self._rate:
            return 0.0
        left = self._take(address, 0, now)
        if left < 1:
            return (1 - left) / self._rate
        self._take(address, 1, now)
        return 0.0

    def charge(self, address: str, sentences: int, now: float | None = None) -> None:
        """Takes some more, whether the bucket has them or not."""
        if self._rate:
            self._take(address, sentences, now)

    def _take(self, address: str, count: int, now: float | None) -> float:
        """Takes so many; what is left then."""
        now = time.monotonic() if now is None else now
        left, since = self._buckets.pop(address, (float(self._burst), now))
        left = min(left + (now - since) * self._rate, float(self._burst)) - count
        self._buckets[address] = (left, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        return left


async def until_gone(request: Request) -> None:
    """Returns when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client goes away.

    Raises:
        HTTPException: 499 if the client went away.
    """
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise HTTPException(_GONE, "The client went away.")
    finally:
        for task in (doing, gone):
            task.cancel()


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request. No more than `limit` bytes of it are ever kept.

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
