"""Starting: while the model is read and compiled, every request is answered with 503 instead of being left to wait.

The server opens its port before it reads the model, so it reports a port in use at once. The kernel then accepts
connections, and a readiness probe would wait for its own time limit.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_SILENT = 2.0  # seconds that a client may keep a connection without a request


class _NotYet(BaseHTTPRequestHandler):
    timeout = _SILENT

    def do_GET(self) -> None:
        body = {"status": "starting"} if self.path == "/health" else {"error": "The server is starting."}
        raw = json.dumps(body).encode()
        self.send_response(503)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(raw)), "Retry-After": "5"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def version_string(self) -> str:
        return "gshard-m4"


@contextmanager
def starting(bound: socket.socket) -> Iterator[None]:
    """Answers 503 on a socket that listens; connections that come afterwards are left to the server.

    Args:
        bound: the socket.
    """
    address = bound.getsockname()
    server = ThreadingHTTPServer(address[:2], _NotYet, bind_and_activate=False)
    server.socket.close()
    server.socket, server.daemon_threads, server.block_on_close = bound, True, False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name="starting")
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
