"""``gshard-m4 checkpoint``: lists, verifies and exports what a run has saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gshard_m4 import checkpoint, runs
from gshard_m4.disk import mib
from gshard_m4.errors import CheckpointError, DamagedError
from gshard_m4.export import export


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Lists, verifies or exports the checkpoints of a run.

    Attributes:
        action: ``list`` names the steps, ``verify`` reads every file of them against its SHA-256, ``export`` writes the
            parameters of one as a safetensors file.
        run: folder of the run; the newest one if not given.
        step: which step; all of them, or the newest sound one for ``export``, if not given.
        output: the file that ``export`` writes.
    """

    action: Annotated[Literal["list", "verify", "export"], tyro.conf.Positional]
    run: Path | None = None
    step: int | None = None
    output: Path = Path("model.safetensors")

    def __call__(self) -> int:
        """Does it; 5 if a step is damaged."""
        run = runs.chosen(self.run)
        if self.action == "export":
            step = export(run, self.output, self.step)
            print(f"wrote the parameters of step {step} to {self.output}")
            return 0
        steps = checkpoint.steps(run.checkpoints)
        if self.step not in (None, *steps):
            raise CheckpointError(
                f"there is no step {self.step}.",
                where=str(run.checkpoints),
                got=f"steps: {', '.join(map(str, steps))}",
                hint="Name one of these, or another run.",
            )
        best, damaged = checkpoint.best(run.checkpoints), 0
        for step in steps if self.step is None else [self.step]:
            folder = run.checkpoints / f"{step:08d}"
            told = mib(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
            if self.action == "verify":
                try:
                    checkpoint.verify(folder)
                    told += "  sound"
                except CheckpointError as error:
                    damaged += 1
                    told += f"  {error.what}"
            print(f"step {step:>8}  {told}{'  best' if step == best else ''}")
        return DamagedError.exit_code if damaged else 0
