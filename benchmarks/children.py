"""Children: programs that are measured in processes of their own, so that one that dies loses nothing but itself.

A child is started with the names of programs, and prints a JSON object on a line for each side of each that it has
measured, ``{"name": ..., "side": ..., ...}``, and one with the side ``end`` after the last of a program.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 400  # after which a child that says nothing is stopped
FATAL = re.compile(r"[FE]\d{4} |[\w.]*Error\b")  # what a child says last

Sides = dict[str, dict[str, Any]]


def measured(
    names: Sequence[str], command: Sequence[str], sides: Sequence[str], show: Callable[[str, Sides], None]
) -> dict[str, Sides]:
    """Has children measure programs, and shows each; one that dies is followed by another.

    Args:
        names: of the programs.
        command: what starts a child; the names follow.
        sides: in the order in which they are measured.
        show: is given a name and what was measured.

    Returns:
        what was measured, by name and side. Of a program in which a child died: the sides before that, and for the one
        that it was at ``error``, its last words.
    """
    waiting = list(names)
    found: dict[str, Sides] = {name: {} for name in names}
    while waiting:
        message = _one_child(waiting, command, found, show)
        if waiting:  # it died in the first of them; what it tried last is not tried again, nor what would have followed
            name = waiting.pop(0)
            side = next(s for s in sides if s not in found[name])
            found[name][side] = {"error": message}
            show(name, found[name])
    return found


def _one_child(
    waiting: list[str], command: Sequence[str], found: dict[str, Sides], show: Callable[[str, Sides], None]
) -> str:
    """Measures programs, taking them off the list, until all are done or the process dies; its last words."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen([*command, *waiting], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        watch = threading.Timer(SECONDS, process.kill)
        watch.start()
        for line in process.stdout:
            watch.cancel()
            watch = threading.Timer(SECONDS, process.kill)
            watch.start()
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            name, side = row.pop("name"), row.pop("side")
            if side == "end":
                waiting.remove(name)
                show(name, found[name])
            else:
                found[name][side] = row
        watch.cancel()
        process.wait()
        errors.seek(0)
        last = [text for text in errors.read().splitlines() if FATAL.match(text)]
    return last[-1][:200] if last else f"ended with {process.returncode}"
