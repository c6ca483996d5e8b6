r"""Lines of text from a file, a pipe or a person, and their translations, one line for each line.

What has come is translated without waiting for more: a file is read in full blocks, a slow pipe line by line.
Nothing is lost when a line cannot be read: those before it are translated first.

>>> list(decoded([b"one\r\n", b"\n", b"two"], "a.txt"))
['one', '', 'two']
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gshard import GShardError
from gshard_m4.errors import CommandError
from gshard_m4.language_names import name_of
from gshard_m4.translate import Translated


class LineError(GShardError):
    """A line of the input is not text."""


def decoded(lines: Iterable[bytes], name: str, *, replace: bool = False) -> Iterator[str]:
    """Lines as text, without their ends and without a byte order mark.

    Args:
        lines: as a binary file gives them.
        name: of the file, for messages.
        replace: put a replacement character for what is not UTF-8, instead of stopping.

    Raises:
        LineError: a line is not UTF-8.
    """
    for number, line in enumerate(lines, 1):
        line = line.rstrip(b"\r\n")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield line.decode("utf-8", "replace" if replace else "strict")
        except UnicodeDecodeError as error:
            near = line[max(error.start - 12, 0) : error.end + 12]
            raise LineError(
                f"line {number} is not UTF-8.",
                where=f"{name}, line {number}, byte {error.start + 1}",
                got=repr(near)[2:-1],
                hint="Convert the file (iconv -t UTF-8), or add --replace-invalid. The lines before are translated.",
            ) from error


def greeting(run: Path, languages: Sequence[str], room: int) -> str:
    """The text before the first prompt: which model, what it reads, and how to leave.

    >>> print(greeting(Path("runs/demo"), ["de", "fr"], 23))
    gshard-m4: runs/demo translates 2 languages into English: German, French.
    Type a sentence of at most 23 tokens and Enter; Ctrl-D leaves. The first one of each length takes some seconds more,
    to compile the search.
    """
    named = ", ".join(map(name_of, languages[:12])) + (
        f" and {len(languages) - 12} more" if len(languages) > 12 else ""
    )
    return (
        f"gshard-m4: {run} translates {len(languages)} languages into English: {named}.\n"
        f"Type a sentence of at most {room} tokens and Enter; Ctrl-D leaves. The first one of each length takes some "
        "seconds more,\nto compile the search."
    )


def typed(prompt: str = "> ") -> Iterator[str]:
    """Lines that a person types, until the end of input (Ctrl-D)."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            print()
            return


def blocks(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    """Groups of as many lines as have come, at least one and at most `size`.

    Raises:
        what ``lines`` raises, after the lines before it.
    """
    come: queue.Queue[str | BaseException | None] = queue.Queue(maxsize=size)

    def read() -> None:
        try:
            for line in lines:
                come.put(line)
        except BaseException as error:
            come.put(error)
        else:
            come.put(None)

    threading.Thread(target=read, daemon=True, name="reader of lines").start()
    block: list[str] = []
    while True:
        try:
            item = come.get(timeout=0.05 if block else None)
        except queue.Empty:
            yield block
            block = []
            continue
        if isinstance(item, str):
            block.append(item)
        if block and (len(block) == size or not isinstance(item, str)):
            yield block
            block = []
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item


def write(translated: Iterable[Translated], first: int, n_best: int, target: TextIO) -> None:
    """Writes one line for each sentence, or ``number ||| translation ||| score`` for each of the n best.

    Args:
        translated: what is written.
        first: the number of the first sentence, from 0.
        n_best: how many of each.
        target: where to.
    """
    for number, of in enumerate(translated, first):
        if n_best == 1:
            target.write(of.text + "\n")
            continue
        for hypothesis in of.hypotheses:
            target.write(f"{number} ||| {hypothesis.text} ||| {hypothesis.score:.6f}\n")
        if not of.hypotheses:
            target.write(f"{number} |||  ||| 0.000000\n")
    target.flush()


class Speed:
    """Counts what is translated, and tells it on standard error: all the time on a terminal, else at the end."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() if live is None else live
        self._since, self.lines, self.tokens, self.cut = time.perf_counter(), 0, 0, 0
        self._unfamiliar, self._unlike = 0, 0  # lines of unknown letters; whose placeholders the model did not write
        self._first: dict[str, str] = {}  # of these

    def add(self, translated: Iterable[Translated]) -> None:
        """Counts some more."""
        for of in translated:
            self.lines, self.tokens, self.cut = self.lines + 1, self.tokens + of.tokens, self.cut + of.cut
            if of.unfamiliar:
                self._unfamiliar += 1
                self._first.setdefault("unfamiliar", f"line {self.lines}")
            if of.lost or of.invented:
                wrong = f"{' '.join(of.lost) or 'none'} put in, {' '.join(of.invented) or 'none'} taken out"
                self._unlike += 1
                self._first.setdefault("unlike", f"line {self.lines}: {wrong}")
        if self._live:
            print(f"\r{self}\x1b[K", end="", file=self._stream, flush=True)

    def end(self, room: int) -> None:
        """Writes the sums, and how many lines had more than `room` tokens."""
        print(f"\r{self}\x1b[K" if self._live else str(self), file=self._stream)
        if self.cut:
            self._tell(self.cut, "line was", "lines were", f"longer than {room} tokens; only the beginning was read")
        if self._unfamiliar:
            which = f"({self._first['unfamiliar']}{', ...' if self._unfamiliar > 1 else ''})"
            what = f"in letters that the model was not trained on {which}: their translations mean nothing"
            self._tell(self._unfamiliar, "line is", "lines are", what)
        if self._unlike:
            what = f"given the placeholders of the source ({self._first['unlike']})"
            what += ", ..." if self._unlike > 1 else ""
            self._tell(self._unlike, "translation was", "translations were", what)

    def _tell(self, count: int, one: str, several: str, what: str) -> None:
        print(f"gshard-m4: {count} {one if count == 1 else several} {what}", file=self._stream)

    def __str__(self) -> str:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        lines = f"{self.lines:,} line{'s' if self.lines != 1 else ''}"
        return (
            f"gshard-m4: {lines}, {self.tokens:,} source tokens in {seconds:.1f} s: "
            f"{self.lines / seconds:,.1f} lines/s, {self.tokens / seconds:,.0f} tokens/s"
        )


def check_files(source: Path | None, target: Path | None) -> None:
    """Refuses an output that is the input.

    Raises:
        CommandError: both are one file.
    """
    if source is not None and target is not None and target.exists() and target.samefile(source):
        raise CommandError("the output would overwrite the input.", where=str(target), hint="Name another file.")


@contextmanager
def reading(path: Path | None, replace: bool, by_hand: bool) -> Iterator[Iterator[str]]:
    """The lines of a file, of standard input, or as they are typed.

    Raises:
        CommandError: the file cannot be read.
    """
    if by_hand:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # arrows and history for input()
        yield typed()
    elif path is None:
        yield decoded(sys.stdin.buffer, "standard input", replace=replace)
    else:
        try:
            file = path.open("rb")
        except OSError as error:
            raise CommandError(f"the input cannot be read: {error.strerror}.", where=str(path)) from error
        with file:
            yield decoded(file, str(path), replace=replace)


@contextmanager
def writing(path: Path | None) -> Iterator[TextIO]:
    """A file to write to, or standard output.

    Raises:
        CommandError: the file cannot be written.
    """
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"the output cannot be written: {error.strerror}.", where=str(path)) from error
    with file:
        yield file
