"""Compares the programs of all processes that share a mesh, before the first collective runs.

Different programs would wait for each other forever, so processes compare a text of each program through the key-value
store of ``jax.distributed``. What depends on a clock is computed by one process and sent to the others.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import hashlib
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard.core.errors import PlanError, listed
from gshard.core.jax_adapter_dispatch import coordination

_POLL = 0.2  # seconds between two reads of the store
_DIFFERENT = 5.0  # seconds for which another process must wait with another program before gshard raises
_LOG_AFTER = 60.0  # seconds of waiting before gshard logs a warning
_SENT = 1 << 20  # characters of a program in the store, which accepts messages of some MiB

_log = logging.getLogger("gshard")


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a mesh with several processes."""

    me: int  # the index of this process
    all: tuple[int, ...]  # the indices of all processes, in order
    store: Any  # the key-value store of ``jax.distributed``

    @staticmethod
    def of(devices: Sequence[Any] | None) -> Group | None:
        """The processes of these devices; None for one process, for other processes, or if there is no store."""
        processes = tuple(sorted({d.process_index for d in devices or ()}))
        store = coordination()
        if len(processes) < 2 or not store or jax.process_index() not in processes:
            return None
        return Group(jax.process_index(), processes, store)

    @property
    def _prefix(self) -> str:
        return f"gshard/{'-'.join(map(str, self.all))}"

    def _read(self, folder: str) -> dict[str, str]:
        return {key.rsplit("/", 1)[-1]: value for key, value in self.store.key_value_dir_get(folder)}

    def agree(self, name: str, text: str) -> None:
        """Waits until all processes are about to run the same program."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        ready = f"{self._prefix}/ready/{digest}/"
        self.store.key_value_set(f"{ready}{self.me}", "", allow_overwrite=True)
        if self._missing(ready) == []:
            return
        own_key = f"{self._prefix}/waits/{self.me}/{digest}"
        sent_text = text[:_SENT]  # the digest covers the whole text
        self.store.key_value_set(own_key, f"{name}\n{sent_text}", allow_overwrite=True)
        try:
            self._wait(name, sent_text, digest, ready)
        finally:
            self.store.key_value_delete(own_key)

    def _missing(self, ready: str) -> list[int]:
        present = self._read(ready)
        return [p for p in self.all if str(p) not in present]

    def _wait(self, name: str, text: str, digest: str, ready: str) -> None:
        waiting = _Waiting(name)
        since: dict[int, float] = {}  # the time at which another process was first seen with another program
        while missing := self._missing(ready):
            for p in missing:
                theirs = self._read(f"{self._prefix}/waits/{p}/")
                if not theirs or digest in theirs:
                    since.pop(p, None)
                elif time.monotonic() - since.setdefault(p, time.monotonic()) > _DIFFERENT:
                    time.sleep(10 * _POLL)  # the other process must also find the difference
                    raise self._different(name, text, p, next(iter(theirs.values())))
            waiting.once_more(missing)

    def _different(self, name: str, text: str, other: int, theirs: str) -> PlanError:
        their_name, _, their_text = theirs.partition("\n")
        difference = difflib.unified_diff(text.splitlines(), their_text.splitlines(), lineterm="", n=0)
        lines = [line for line in difference if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        shown = [f"process {self.me if line[0] == '-' else other}: {line[1:].strip()}" for line in lines]
        return PlanError(
            f"process {self.me} is about to run {name}, and process {other} another program, {their_name}: their "
            "collectives would wait for each other.",
            got="\n  ".join(listed(shown)),
            hint="Call the same functions with arguments of the same shapes and shardings, in the same order, on every "
            "process.",
        )

    def from_first(self, name: str, key: str, make: Callable[[], str]) -> str:
        """A text that the first process computes and sends to the others."""
        folder = f"{self._prefix}/made/{hashlib.sha256(key.encode()).hexdigest()[:32]}/"
        waiting = _Waiting(name)
        while not (entries := self._read(folder)):
            if self.me == self.all[0]:
                packed = base64.b85encode(zlib.compress(make().encode())).decode()
                self.store.key_value_set(f"{folder}text", packed, allow_overwrite=True)
            else:
                waiting.once_more(self.all[:1])
        return zlib.decompress(base64.b85decode(entries["text"])).decode()


class _Waiting:
    """Waits for other processes, and logs a warning after some time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = time.monotonic()
        self._has_logged = False

    def once_more(self, missing: Sequence[int]) -> None:
        """Sleeps before the next read of the store."""
        time.sleep(_POLL)
        if not self._has_logged and time.monotonic() - self._start > _LOG_AFTER:
            self._has_logged = True
            others = ", ".join(map(str, missing))
            _log.warning("gshard: %s has waited %.0f s for process %s to call it too", self._name, _LOG_AFTER, others)
