"""Where to listen and how much to accept."""

from __future__ import annotations

import dataclasses
import ipaddress

from gshard_m4.errors import OptionError


@dataclasses.dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where to listen and how much to accept.

    Attributes:
        host: address to listen on; 127.0.0.1 is reached from this machine only.
        port: 0 takes one that is free, and tells which.
        characters: longest text of a request.
        lines: lines of a request.
        body: bytes of the body of a request.
        queue: sentences that may wait, half of them of one address; requests beyond are refused with 503. At least
            twice as many as a request may have lines.
        connections: open connections; requests of further ones are refused with 503.
        rate: sentences a second that one address may ask for, on average; 0 does not limit.
        burst: sentences that one address may ask for at once; a larger request is answered, and the next one waits.
        wait: milliseconds to wait for more sentences before a batch that is not full is translated.
        timeout: seconds in which the body of a request must have come, and in which it must be translated.
        grace: seconds that requests may still take after SIGTERM.
        access_log: print a line about each request, without its text.
        proxies: addresses or networks, with commas between, of proxies whose X-Forwarded-For is believed; * is all.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    characters: int = 5_000
    lines: int = 200
    body: int = 64 * 1024
    queue: int = 1_000
    connections: int = 500
    rate: float = 20.0
    burst: int = 200
    wait: float = 5.0
    timeout: float = 60.0
    grace: float = 10.0
    access_log: bool = False
    proxies: str = ""

    def __post_init__(self) -> None:
        for name in ("characters", "lines", "body", "queue", "connections", "burst"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rate", "wait", "grace"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.timeout > 0:
            raise OptionError(f"timeout must be positive, got {self.timeout}")
        if self.queue < 2 * self.lines:
            raise OptionError(
                f"queue must be at least {2 * self.lines}, twice the {self.lines} lines of a request, got {self.queue}"
            )
        if not 0 <= self.port < 65536:
            raise OptionError(f"port must be from 0 to 65535, got {self.port}")
        for word in filter(None, map(str.strip, self.proxies.split(","))):
            try:
                ipaddress.ip_network("0.0.0.0/0" if word == "*" else word, strict=False)
            except ValueError as error:
                raise OptionError(f"proxies must be addresses or networks, got {word!r}") from error
