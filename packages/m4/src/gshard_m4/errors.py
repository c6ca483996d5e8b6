"""Errors of commands, data, checkpoints and training, in the layout of ``gshard.GShardError``.

An ``exit_code`` is that of the command that the error ends; others end with 2.
"""

from __future__ import annotations

from gshard import GShardError


class CommandError(GShardError):
    """What was asked for on the command line cannot be done."""


class OptionError(GShardError):
    """A value that an option cannot have. No ``ValueError``: the reader of command lines would tell that one itself."""


class CorpusError(GShardError):
    """There is no text to work with, or a file of it cannot be read."""


class VocabularyError(GShardError):
    """A vocabulary cannot be learnt from this text, or is not the one that was learnt."""


class CheckpointError(GShardError):
    """A checkpoint cannot be written, is not there, is damaged, or belongs to another model."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, truncated, changed, or does not belong to it."""

    exit_code = 5


class TrainError(GShardError):
    """Training cannot start, or cannot go on."""


class NotFiniteError(TrainError):
    """The loss or the gradient was infinite or not a number, too often."""

    exit_code = 4
