"""Resumable: parts of a measurement, each in a process of its own, and a file that says which are finished.

    state = State(Path("runs/gpu/state.json"), {"dry_run": False})
    over = run([Part("machine", ("scripts/gpu_checks.py", "machine"), 60)], state, minutes=9)

A part is a script that writes what it found as JSON to the file named by ``--found``. What is finished is not run
again. A part that fails is written down with its last lines, does not stop the others, and is run again only when
asked for. What is stopped because the time of all is over is not written down: the next call begins it anew.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src", ROOT / "packages" / "m4" / "src"
AGAIN = 75  # exit code: there is more to do
LAST_LINES = 12  # that are kept of what a part that failed has printed
FATAL = re.compile(r"F\d{4} |F0000|.*Check failed|Fatal Python error")  # how C++ says that it ends the process
SAVING = 10  # seconds at the end of a slice in which nothing is begun
DONE, FAILED = "done", "failed"

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing to measure.

    Attributes:
        name: what the state calls it.
        command: a script, relative to the repository, and its arguments.
        seconds: after which it has failed.
        environment: what differs from that of the script that runs it.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class State:
    """What is finished, in a file that is whole at any moment."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Reads the file if it is there.

        Args:
            path: of the file.
            settings: what all of its parts have in common; a file of other settings is refused.

        Raises:
            SystemExit: the file is of other settings.
        """
        self.path, self.settings = path, dict(settings)
        self.parts: dict[str, Found] = {}
        if path.exists():
            read = json.loads(path.read_text("utf-8"))
            if read["settings"] != self.settings:
                sys.exit(f"{path} is of {read['settings']}, not of {self.settings}: give another folder")
            self.parts = read["parts"]

    def found(self, name: str) -> Found | None:
        """What a part found; None if it is not finished or has failed."""
        entry = self.parts.get(name, {})
        return entry["found"] if entry.get("state") == DONE else None

    def put(self, name: str, entry: Found) -> None:
        """Writes down a part that has ended."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        self.parts[name] = {**entry, "at": now}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"settings": self.settings, "parts": self.parts}, indent=1), "utf-8")
        beside.replace(self.path)


def run(
    parts: Sequence[Part],
    state: State,
    minutes: float,
    *,
    retry: bool = False,
    after: Callable[[], None] = lambda: None,
) -> bool:
    """Runs what is not finished, in order.

    Args:
        parts: all that there is to do.
        state: what is finished.
        minutes: after which no more is done.
        retry: whether what has failed is run again.
        after: called when a part has ended.

    Returns:
        whether everything has ended. If not, the time is over.
    """
    begin, first = time.monotonic(), True
    for part in parts:
        ended = state.parts.get(part.name, {}).get("state")
        if ended == DONE or (ended == FAILED and not retry):
            continue
        left = 60 * minutes - (time.monotonic() - begin) - SAVING
        if left < part.seconds / 2 and not first:
            return False
        entry = attempt(part, min(left, part.seconds))
        if entry is None and not (first and left < part.seconds):
            return False
        # What does not fit into a whole slice never will.
        state.put(part.name, entry or _failed(f"took longer than {left:.0f} seconds, a whole slice", left))
        first = False
        after()
    return True


def attempt(part: Part, seconds: float) -> Found | None:
    """Runs a part; None if it was stopped before its own time was over."""
    print(f"{part.name} ...", end=" ", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, log = Path(folder) / "found.json", Path(folder) / "log"
        script, *arguments = part.command
        line = [sys.executable, str(ROOT / script), *arguments, "--found", str(found), "--seconds", f"{seconds:.0f}"]
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                line, stdout=file, stderr=subprocess.STDOUT, env=_environment(part.environment), start_new_session=True
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
        taken = time.monotonic() - begin
        print(f"{taken:.0f} s", end="", flush=True)
        if process.returncode == 0 and found.exists():
            print(flush=True)
            return {"state": DONE, "seconds": round(taken, 1), "found": json.loads(found.read_text("utf-8"))}
        stopped = taken >= seconds
        if stopped and seconds < part.seconds:
            print(", the time is over", flush=True)
            return None
        print(", failed", flush=True)
        said = f"took longer than {seconds:.0f} seconds" if stopped else f"ended with {process.returncode}"
        lines = [text for text in log.read_text("utf-8", errors="replace").splitlines() if text.strip()]
        return _failed("\n".join([said, *_telling(lines)]), taken)


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """The last lines of a log; where C++ ended the process, its message with the line before it, and not the stack."""
    fatal = next((i for i, line in enumerate(lines) if FATAL.match(line)), None)
    return lines[-LAST_LINES:] if fatal is None else lines[max(fatal - 1, 0) : fatal + 3]


def _failed(error: str, taken: float) -> Found:
    home = os.path.expanduser("~")
    told = error.replace(str(ROOT), ".").replace(sys.prefix, "PYTHON").replace(home, "~")
    return {"state": FAILED, "seconds": round(taken, 1), "error": told}


def _environment(differs: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([*map(str, SOURCES), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **differs}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a part is told on its command line.

    Attributes:
        arguments: what its command has after the name.
        tiny: whether it is to be over soon, and its figures mean nothing.
        until: the moment (``time.monotonic``) at which it should have ended.
    """

    arguments: tuple[str, ...]
    tiny: bool
    until: float

    def goes_on(self, share: float = 0.8) -> bool:
        """Whether there is time for more: a part of the time is kept for ending."""
        return time.monotonic() < self.until - (1 - share) * self._given

    _given: float = 0.0


def answer(parts: Mapping[str, Callable[[Asked], Found]]) -> None:
    """The ``main`` of a script of parts: runs the one that the command line names, and writes what it found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=parts)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    asked = Asked(tuple(given.arguments), given.tiny, time.monotonic() + given.seconds, given.seconds)
    given.found.write_text(json.dumps(parts[given.part](asked)), "utf-8")
