"""Processes: compares the programs of all processes that share a mesh before the first collective.

Each process traces and plans by itself. Where two of them make different programs, the collectives of one wait for
those of the other, for ever. So before a program runs for the first time, its processes compare what identifies it,
through the key-value store of ``jax.distributed``. A difference raises in each of them and shows both programs.

What depends on a clock, as a search with a time limit does, is made by one process and sent to the others.
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

from gshard.core.errors import PlanError
from gshard.core.jax_adapter_dispatch import coordination, own_process

_POLL = 0.2  # seconds between two looks at what others have said
_DIFFERENT = 5.0  # seconds that another process waits with another program, until that is taken for an error
_LOG_AFTER = 60.0  # seconds of waiting, until the log tells of it
_SHOWN = 12  # lines of a difference
_SENT = 1 << 20  # characters of a program that others are shown: the store takes messages of some MiB

_log = logging.getLogger("gshard")


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a mesh that has several.

    Attributes:
        me: this process.
        all: the processes, in order.
        store: the key-value store of ``jax.distributed``.
    """

    me: int
    all: tuple[int, ...]
    store: Any

    @staticmethod
    def of(devices: Sequence[Any] | None) -> Group | None:
        """The processes of these devices; None if it is one, or this one is none of them, or there is no store."""
        found = tuple(sorted({d.process_index for d in devices or ()}))
        store = coordination()
        return Group(own_process(), found, store) if len(found) > 1 and store and own_process() in found else None

    @property
    def _prefix(self) -> str:
        return f"gshard/{'-'.join(map(str, self.all))}"

    def _read(self, folder: str) -> dict[str, str]:
        return {key.rsplit("/", 1)[-1]: value for key, value in self.store.key_value_dir_get(folder)}

    def agree(self, name: str, text: str) -> None:
        """Returns once all processes are about to run the same program.

        Args:
            name: of the program, for messages.
            text: what identifies it.

        Raises:
            PlanError: another process is about to run another program.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        ready = f"{self._prefix}/ready/{digest}/"
        self.store.key_value_set(f"{ready}{self.me}", "", allow_overwrite=True)
        if self._missing(ready) == []:
            return
        mine = f"{self._prefix}/waits/{self.me}/{digest}"
        shown = text[:_SENT]  # the digest is of all of it
        self.store.key_value_set(mine, f"{name}\n{shown}", allow_overwrite=True)
        try:
            self._wait(name, shown, digest, ready)
        finally:
            self.store.key_value_delete(mine)

    def _missing(self, ready: str) -> list[int]:
        present = self._read(ready)
        return [p for p in self.all if str(p) not in present]

    def _wait(self, name: str, text: str, digest: str, ready: str) -> None:
        waiting = _Waiting(name)
        since: dict[int, float] = {}  # when another process was first seen to wait with another program
        while missing := self._missing(ready):
            for p in missing:
                theirs = self._read(f"{self._prefix}/waits/{p}/")
                if not theirs or digest in theirs:
                    since.pop(p, None)
                elif time.monotonic() - since.setdefault(p, time.monotonic()) > _DIFFERENT:
                    time.sleep(10 * _POLL)  # so that the other process finds the difference too
                    raise self._different(name, text, p, next(iter(theirs.values())))
            waiting.once_more(missing)

    def _different(self, name: str, text: str, other: int, theirs: str) -> PlanError:
        called, _, their_text = theirs.partition("\n")
        pairs = difflib.unified_diff(text.splitlines(), their_text.splitlines(), lineterm="", n=0)
        lines = [line for line in pairs if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        shown = [f"process {self.me if line[0] == '-' else other}: {line[1:].strip()}" for line in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            shown.append(f"and {len(lines) - _SHOWN} more lines")
        return PlanError(
            f"process {self.me} is about to run {name}, and process {other} another program, {called}: their "
            "collectives would wait for each other.",
            got="\n  ".join(shown),
            hint="Call the same functions with arguments of the same shapes and shardings, in the same order, on every "
            "process.",
        )

    def from_first(self, name: str, key: str, make: Callable[[], str]) -> str:
        """What the first process makes, on all of them.

        Args:
            name: of the program, for messages.
            key: what identifies it. What was made once for a key is not made again.
            make: called by the first process.
        """
        folder = f"{self._prefix}/made/{hashlib.sha256(key.encode()).hexdigest()[:32]}/"
        waiting = _Waiting(name)
        while not (found := self._read(folder)):
            if self.me == self.all[0]:
                packed = base64.b85encode(zlib.compress(make().encode())).decode()
                self.store.key_value_set(f"{folder}text", packed, allow_overwrite=True)
            else:
                waiting.once_more(self.all[:1])
        return zlib.decompress(base64.b85decode(found["text"])).decode()


class _Waiting:
    """Waits a little, and tells the log when that has lasted long."""

    def __init__(self, name: str) -> None:
        self._name, self._start, self._told = name, time.monotonic(), False

    def once_more(self, missing: Sequence[int]) -> None:
        time.sleep(_POLL)
        if not self._told and time.monotonic() - self._start > _LOG_AFTER:
            self._told = True
            others = ", ".join(map(str, missing))
            _log.warning("gshard: %s has waited %.0f s for process %s to call it too", self._name, _LOG_AFTER, others)
