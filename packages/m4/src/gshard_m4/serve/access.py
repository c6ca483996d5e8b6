"""The access log: one line for each answer, in the format that web servers share, and never a word of a text.

>>> line("192.0.2.7", "POST /translate HTTP/1.1", 200, 341, 0.0123, when=0.0)
'192.0.2.7 - - [01/Jan/1970:00:00:00 +0000] "POST /translate HTTP/1.1" 200 341 0.012'
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
import time

from gshard import GShardError


class AccessLogError(GShardError):
    """The access log cannot be written."""


def line(
    address: str, request: str, status: int, size: int, seconds: float | None = None, when: float | None = None
) -> str:
    r"""One answer: address, time, request line, status, bytes of the body, and seconds that it took.

    Args:
        address: of the client; behind a proxy that is named, what the proxy says.
        request: as it came; what could end a line or a quotation is written as ``\xNN``.
        status: of the answer.
        size: bytes of its body.
        seconds: from the end of the headers to the end of the answer, if known.
        when: seconds since 1970; now if None.
    """
    now = time.gmtime(time.time() if when is None else when)
    safe = "".join(c if c.isprintable() and c not in '"\\' else f"\\x{ord(c):02x}" for c in request)
    date = f"{now.tm_mday:02}/{_MONTHS[now.tm_mon - 1]}/{now.tm_year}:{time.strftime('%H:%M:%S', now)} +0000"
    took = "" if seconds is None else f" {seconds:.3f}"
    return f'{address or "-"} - - [{date}] "{safe}" {status} {size}{took}'


def logger(path: str | None) -> logging.Logger:
    """Where lines go: a file, which may be moved away and is then begun anew; ``-`` is standard error, None nowhere.

    Raises:
        AccessLogError: the file cannot be written.
    """
    found = logging.getLogger(
        "gshard_m4.access"
    )  # none of those that uvicorn configures, which would lose its handlers
    found.propagate = False
    found.setLevel(logging.INFO)
    for handler in list(found.handlers):
        found.removeHandler(handler)
        handler.close()
    try:
        handler = (
            logging.NullHandler()
            if path is None
            else logging.StreamHandler(sys.stderr)
            if path == "-"
            else logging.handlers.WatchedFileHandler(path, encoding="utf-8")
        )
    except OSError as error:
        raise AccessLogError(f"the access log cannot be written: {error.strerror}.", where=str(path)) from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    found.addHandler(handler)
    return found


_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
