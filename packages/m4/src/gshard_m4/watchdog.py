"""Watchdog: processes that train together hear within two seconds that one of them died, raised or is stuck.

The first process listens; every process, itself included, keeps one connection to it, says twice in a second where it
is, and says goodbye when it is done. A connection that ends without a goodbye is a death. A process that says nothing,
or that the others have left behind for longer than `NAMED`, is named; one that stays so for longer than its phase may
take is stuck. JAX's own runtime tells survivors of a death after 100 seconds, by an abort, and of a stuck process
never.

The first process says to every other one that it is there, as often. One that hears nothing of it, since the network is
cut or that machine is down, names it, and ends by itself once the silence has lasted for its patience.

A process that fails may do so because another one died, and then that one is to be named. Which of the two it was does
not depend on who is heard first: the others are asked whether they are there, and who is gone does not answer.

Messages are lines of JSON, short, and begin with a token of the run; what is not such a line ends a connection.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

LOST, STUCK = 201, 202
"""Exit codes: another process is gone; a process was stuck."""

BEAT = 0.4  # seconds between two messages of a process
NAMED = 1.6  # seconds of silence, or of being behind the others, after which a process is named
_LAST = 0.5  # seconds that the others have to end before the first process does
_LONGEST = 4096  # bytes of a message
_SILENT = "its connection ended: it was killed, or its machine went down"


class Hub:
    """The first process's ear.

    Args:
        host: the address to listen at.
        count: number of processes.
        limits: phase -> seconds that it may take; ``""`` is for all others.
    """

    def __init__(self, host: str, count: int, limits: Mapping[str, float]):
        self.token = secrets.token_hex(16)
        self._limits, self._count = limits, count
        self._server = socket.create_server((host, 0), backlog=count)
        self.port = int(self._server.getsockname()[1])
        self._lock = threading.Lock()
        self._one_less = threading.Condition(self._lock)
        self._lines: dict[int, socket.socket] = {}
        self._closed: set[int] = set()
        self._heard: dict[int, float] = {}
        self._at: dict[int, tuple[int, int, str, float]] = {}  # marks passed, step, phase, since when
        self._behind: dict[int, tuple[int, float]] = {}  # mark, and since when others have been further
        self._gone: set[int] = set()
        self._named: set[int] = set()
        self._failed: dict[int, tuple[str, set[int]]] = {}  # why, and who has not said yet that he is there
        self._over = False
        for work in (self._accept, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self) -> None:
        while len(self._lines) < self._count:
            try:
                line, _ = self._server.accept()
            except OSError:
                break
            threading.Thread(target=self._listen, args=(line,), daemon=True).start()
        self._server.close()

    def _listen(self, line: socket.socket) -> None:
        with line:
            self._listen_to(line)

    def _listen_to(self, line: socket.socket) -> None:
        messages = _messages(line)
        hello: dict[str, Any] = next(messages, {})
        if hello.get("token") != self.token or not isinstance(rank := hello.get("hello"), int):
            return
        with self._lock:
            self._lines[rank] = line
            self._heard[rank] = time.monotonic()
        for message in messages:
            with self._lock:
                self._heard[rank] = time.monotonic()
                self._hear(rank, message)
        with self._lock:
            self._closed.add(rank)
            self._one_less.notify_all()
            if rank not in self._gone:
                reason, _ = self._failed.get(rank, (_SILENT, None))
                self._end(LOST, rank, reason)

    def _hear(self, rank: int, message: Mapping[str, Any]) -> None:
        if "bye" in message:
            self._gone.add(rank)
            for failed in list(self._failed):
                self._is_here(rank, failed)
        elif "failed" in message:
            others = self._lines.keys() - self._gone - {rank}
            self._failed[rank] = str(message["failed"]), others
            self._tell({"asked": rank}, sorted(others))
            self._is_here(rank, rank)
        elif "here" in message:
            self._is_here(rank, message["here"])
        elif "at" in message:
            mark, step, phase = message["at"]
            if self._at.get(rank, (-1,))[0] != mark:
                self._at[rank] = (mark, step, phase, time.monotonic())

    def _is_here(self, rank: int, failed: int) -> None:
        """One that was asked was there after another one had failed; once all were, that one failed by itself."""
        reason, others = self._failed[failed]
        others.discard(rank)
        if not others:
            self._end(LOST, failed, reason)

    def _watch(self) -> None:
        while not self._over:
            time.sleep(BEAT / 2)
            with self._lock:
                now = time.monotonic()
                here = [rank for rank in self._lines if rank not in self._gone]
                furthest = max((self._at[rank][0] for rank in here if rank in self._at), default=0)
                self._tell({"hub": True}, here)
                for rank in here:
                    self._judge(rank, now, furthest)

    def _judge(self, rank: int, now: float, furthest: int) -> None:
        mark, step, phase, since = self._at.get(rank, (0, 0, "start", self._heard[rank]))
        silent = now - self._heard[rank]
        if mark == furthest:
            self._behind.pop(rank, None)
        elif self._behind.get(rank, (-1, now))[0] != mark:
            self._behind[rank] = (mark, now)
        behind = now - self._behind.get(rank, (mark, now))[1]
        limit = self._limits.get(phase, self._limits[""])
        where = f"in {phase!r} of step {step}"
        if max(silent, behind) < NAMED:
            self._named.discard(rank)
        elif rank not in self._named:
            self._named.add(rank)
            what = "has said nothing for" if silent >= NAMED else f"is {where}, and the others have waited for it for"
            self._tell({"late": [rank, f"{what} {max(silent, behind):.1f} s"]}, sorted(self._lines))
        if silent > self._limits[""]:  # whatever the phase: it says where it is from a thread of its own
            self._end(STUCK, rank, f"{_nothing_said(silent)} (it was {where})")
        elif behind > limit:
            self._end(STUCK, rank, f"it has been {where} for {now - since:.0f} s; {limit:.0f} s are allowed")
        elif now - since > 2 * limit:  # no process is behind: all of them wait for each other
            self._end(STUCK, rank, f"like the others, it has been {where} for {now - since:.0f} s")

    def _end(self, code: int, rank: int, reason: str) -> None:
        if not self._over:
            self._over = True
            message = {"end": [code, rank, reason[: _LONGEST // 2]]}
            self._tell(message, sorted(self._lines.keys() - {0}))
            threading.Thread(target=self._end_here, args=(message,), daemon=True).start()

    def _end_here(self, message: Mapping[str, Any]) -> None:
        """Tells process 0, this one, last: it ends at once, and with it JAX's coordinator, which ends all others."""
        with self._one_less:
            self._one_less.wait_for(lambda: self._lines.keys() - self._closed <= {0}, timeout=_LAST)
            self._tell(message, [0])

    def _tell(self, message: Mapping[str, Any], ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._gone and rank in self._lines:
                _send(self._lines[rank], message)

    def close(self) -> None:
        """Listens no more."""
        self._over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._server.close()
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


class Watch:
    """One process's mouth, and its ear for what the hub tells.

    Args:
        address: host and port of the hub.
        token: of the run.
        rank: number of this process.
        hint: what to add when the run ends, such as how to go on.
        leave: ends the process at once with a code.
        patience: seconds without a word of the hub after which this process ends.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        rank: int,
        hint: Callable[[], str] = str,
        leave: Callable[[int], None] = os._exit,
        patience: float = math.inf,
    ):
        self._patience, self._heard = patience, time.monotonic()
        self._rank, self._hint, self._leave = rank, hint, leave
        self._at: tuple[int, int, str] = (0, 0, "start")
        self._line = socket.create_connection(address, timeout=30)
        self._line.settimeout(None)
        self._lock = threading.Lock()
        self._done = self._failing = False
        self._told, self._left = threading.Event(), threading.Event()  # of the end of the run; and has left
        self._say({"token": token, "hello": rank})
        for work in (self._beat, self._listen):
            threading.Thread(target=work, daemon=True).start()

    def at(self, step: int, phase: str) -> None:
        """Says what this process is about to do; all processes say the same things in the same order."""
        self._at = (self._at[0] + 1, step, phase)

    def failed(self, reason: str) -> None:
        """Says that this process is about to end, and why; returns once the others have been told.

        If it was another process that ended first, this one does not return: it ends as the other one demands.

        Args:
            reason: in one line.
        """
        self._failing = True
        if not self._done or self._told.is_set():  # it has not said goodbye
            self._say({"failed": reason[: _LONGEST // 2]})
            self._left.wait()

    def bye(self) -> None:
        """Says that this process is done."""
        if not self._done:
            self._done = True
            self._say({"bye": True})
            self._hang_up()

    def _beat(self) -> None:
        named = False
        while not self._done:
            self._say({"at": self._at})
            time.sleep(BEAT)
            silent = time.monotonic() - self._heard
            if silent >= NAMED and not named:
                print(f"gshard-m4: process 0 has said nothing for {silent:.1f} s", file=sys.stderr, flush=True)
            named = silent >= NAMED
            if silent > self._patience and not self._done:
                self._end(LOST, 0, _nothing_said(silent))

    def _listen(self) -> None:
        for message in _messages(self._line):
            self._heard = time.monotonic()
            if "late" in message and message["late"][0] != self._rank:
                rank, text = message["late"]
                print(f"gshard-m4: process {rank} {text}", file=sys.stderr, flush=True)
            elif "asked" in message:
                self._say({"here": message["asked"]})
            elif "end" in message and not self._done:
                self._end(*message["end"])
        self._line.close()
        if not self._done:
            self._end(LOST, 0, _SILENT)

    def _end(self, code: int, rank: int, reason: str) -> None:
        self._done = True
        self._told.set()
        if rank == self._rank and self._failing and code == LOST:  # it ends by itself
            self._hang_up()
            self._left.set()
            return
        fate = "is stuck" if code == STUCK else "is gone"
        print(f"gshard-m4: process {rank} {fate}: {reason}. {self._hint()}", file=sys.stderr, flush=True)
        if code == STUCK:
            faulthandler.dump_traceback()
        self._leave(code)
        self._left.set()

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            _send(self._line, message)

    def _hang_up(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)


def _nothing_said(seconds: float) -> str:
    return f"it has said nothing for {seconds:.0f} s: it is stopped, or its machine or the network to it is down"


def _send(line: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever listens there learns it from the end of the connection
        line.sendall(json.dumps(message).encode() + b"\n")


def _messages(line: socket.socket) -> Iterator[dict[str, Any]]:
    """The messages that come until the connection ends or one is no message."""
    with line.makefile("rb") as file:
        while True:
            try:
                text = file.readline(_LONGEST + 1)
                message = json.loads(text) if text.endswith(b"\n") else None
            except (OSError, ValueError):
                return
            if not isinstance(message, dict):
                return
            yield message
