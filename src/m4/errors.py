"""Errors of the data side, in the layout of ``gshard.GShardError``: what, where, what was given, the way out."""

from __future__ import annotations

from gshard import GShardError


class CorpusError(GShardError):
    """There is no text to work with, or a file of it cannot be read."""


class VocabularyError(GShardError):
    """A vocabulary cannot be learnt from this text, or is not the one that was learnt."""
