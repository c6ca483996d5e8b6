"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

_BAR = 10  # columns of the bar
_TIMES = 20  # columns of the slash, the time that is left, and the blanks between


def fitting(parts: Sequence[str], room: int) -> str:
    """The first of some parts, as many as there are columns for; the first one at least.

    >>> fitting(["loss 2.500", "900 tokens/s", "cross entropy 2.1"], 26)
    'loss 2.500  900 tokens/s'
    """
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > room:
            break
        text += f"  {part}"
    return text


class Progress:
    """Shows how training goes: speed, losses, dropped tokens and how evenly the experts are used.

    Args:
        steps: steps until the end.
        every: steps between lines where no bar can be drawn.
        stream: where to write; standard output if None.
        quiet: whether to show nothing at all.
    """

    def __init__(self, steps: int, every: int, stream: TextIO | None = None, *, quiet: bool = False):
        self._steps, self._every, self._quiet = steps, every, quiet
        self._stream = stream or sys.stdout
        console = Console(file=self._stream)
        self._bar: Bar | None = None
        if console.is_terminal and not quiet:
            columns = (
                BarColumn(_BAR),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                TextColumn("{task.fields[numbers]}"),
            )
            self._room = console.width - _BAR - 2 * len(str(steps)) - _TIMES
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task("training", total=steps, numbers="")
        self._tokens, self._since = 0.0, time.perf_counter()

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Writes a line above the bar."""
        if self._quiet:
            return
        if self._bar:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def update(self, done: int, values: Mapping[str, float]) -> None:
        """Shows the numbers of the step that has just been taken.

        Args:
            done: steps taken so far.
            values: metrics of the step; see `gshard_m4.train`.
        """
        self._tokens += values["tokens"]
        elapsed = time.perf_counter() - self._since
        if self._quiet or (not self._bar and done % self._every and done != self._steps):
            return
        numbers = [f"loss {values['loss']:.3f}", f"{self._tokens / max(elapsed, 1e-9):5,.0f} tokens/s"]
        if values.get("skipped"):
            numbers.append(f"skipped {values['skipped']:.0f}")
        numbers.append(f"cross entropy {values['cross_entropy']:.3f}")
        if values["aux_loss"]:  # not of a dense model
            numbers += [f"aux {values['aux_loss']:.2f}", f"dropped {100 * values['dropped_share']:.1f}%"]
            numbers.append(f"load entropy {values['load_entropy']:.2f}")
        if not self._bar and "gradient_norm" in values:
            numbers += [f"gradient {values['gradient_norm']:.2f}", f"rate {values['learning_rate']:.4f}"]
        if self._bar:
            self._bar.update(self._task, completed=done, numbers=fitting(numbers, self._room))
        else:
            print(f"step {done:>6}/{self._steps}  {'  '.join(numbers)}", file=self._stream, flush=True)
        if done % self._every == 0:
            self._tokens, self._since = 0.0, time.perf_counter()
