"""Defines how a pipeline processes micro-batches, as ``gshard.pipeline`` states it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a pipeline."""

    over: int | str | tuple[str, ...]  # the mesh axes, or the number of parts, over which the stages are split
    micro_batches: int  # the number of parts of the batch
    rounds: int = 1  # how often each micro-batch passes all stages. In each round a stage runs other layers.

    def turns(self, stages: int) -> int:
        """The number of turns: in each turn every stage processes one micro-batch, or repeats one (the bubble)."""
        return self.micro_batches * self.rounds + stages - 1

    def bubble(self, stages: int) -> float:
        """The part of the turns in which a stage repeats a micro-batch.

        >>> Schedule("stage", micro_batches=6).bubble(stages=3)
        0.25
        """
        return (stages - 1) / self.turns(stages)

    def __str__(self) -> str:
        rounds = f", rounds={self.rounds}" if self.rounds > 1 else ""
        return f"pipeline(x, {self.over!r}, micro_batches={self.micro_batches}{rounds})"
