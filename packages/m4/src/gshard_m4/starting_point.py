"""Starting point: a trained run whose parameters another one begins with (fine-tuning)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gshard import moe
from gshard_m4 import checkpoint, runs
from gshard_m4.config import ModelChoice
from gshard_m4.errors import CommandError, OptionError
from gshard_m4.text import PreparedText

_MAY_DIFFER = ("dropout", "groups")


def starting_point(folder: Path, choice: ModelChoice, text: PreparedText) -> tuple[Path, moe.TransformerConfig]:
    """The checkpoints of a trained run, and its model.

    Args:
        folder: of the run.
        choice: the options of the model that were given; they may change its dropout and its groups.
        text: the text to train on.

    Raises:
        CheckpointError: there is no such run.
        OptionError: the options name another model.
        CommandError: the text was prepared with other vocabularies.
    """
    run = runs.chosen(folder)
    meta = checkpoint.described(run.checkpoints, checkpoint.steps(run.checkpoints)[-1])
    asked, plain = dataclasses.asdict(choice), dataclasses.asdict(ModelChoice())
    if differing := [name for name in asked if asked[name] != plain[name] and name not in _MAY_DIFFER]:
        raise OptionError(
            f"the model is that of {folder}: leave --{differing[0].replace('_', '-')} out "
            "(--dropout and --groups may be given)"
        )
    if meta.get("vocabularies") != text.fingerprint:
        raise CommandError(
            "the text was prepared with other vocabularies than the run.",
            where=str(folder),
            hint="Prepare it with --vocabularies and the folder of the corpus that the run was trained on.",
        )
    return run.checkpoints, moe.TransformerConfig(**meta["model"])
