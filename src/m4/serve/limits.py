"""How much, and how often, a client may ask."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

_CLIENTS = 10_000  # addresses that are remembered; the one that was silent longest is forgotten first


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


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body of a request, of which no more than `limit` bytes are ever kept.

    Raises:
        HTTPException: 413 if it is longer, 408 if it takes longer than `seconds`, 400 if the client went away.
    """
    too_long = HTTPException(413, f"The body is longer than {limit} bytes.", {"Connection": "close"})
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced[:20]) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise HTTPException(
            408, f"The body did not come within {seconds:.0f} seconds.", {"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise HTTPException(400, "The client went away.") from None
    return bytes(body)
