"""``gshard-m4 score``: how probable given translations are to a model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gshard import moe
from gshard_m4 import lines, runs
from gshard_m4.config import on_devices
from gshard_m4.corpus import parallel
from gshard_m4.corpus.pair import Pair
from gshard_m4.decode import EOS, PAD, DecodeConfig
from gshard_m4.errors import CommandError
from gshard_m4.text import PreparedText
from gshard_m4.translate import Translator, load


@dataclasses.dataclass(frozen=True)
class Score:
    """Tells how probable given translations are: a line for each pair, with its nats and its tokens.

    Nats are minus the logarithm of the probability that the model gives to the translation, its end included; they are
    the cross entropy of the pair. Of a source that is longer than the model reads, the beginning counts.

    Attributes:
        pairs: parallel text: .tsv (language, foreign, English), .jsonl, .po, or talk.de beside talk.en.
        output: where to write; standard output if not given.
        data: folder of the corpus the model was trained on, for its vocabularies; what the run remembers if not given.
        run: folder of the run; the newest one if not given.
        step: which checkpoint; the newest if not given.
        batch: pairs that are scored together.
    """

    pairs: Annotated[Path, tyro.conf.Positional]
    output: Path | None = None
    data: Path | None = None
    run: Path | None = None
    step: int | None = None
    batch: int = 32

    def __call__(self) -> int:
        """Scores."""
        if self.batch < 1:
            raise CommandError(f"cannot score {self.batch} pairs at a time.", hint="Use --batch 1 or more.")
        read = list(parallel.read(self.pairs))
        bad = [item for item in read if isinstance(item, parallel.BadLine)]
        if bad:
            raise CommandError(
                f"{len(bad):,} of {len(read):,} lines are no pairs.",
                where=f"{self.pairs}:{bad[0].number}",
                got=f"{bad[0].reason}: {bad[0].text[:80]!r}",
                hint="Each line needs a score, so none is left out: repair or remove these lines.",
            )
        pairs = [item for item in read if isinstance(item, Pair)]
        run = runs.chosen(self.run)
        translator = load(run, PreparedText.load(runs.corpus_of(run, self.data)), DecodeConfig(), self.step)
        found, cut = nats(translator, pairs, self.batch)
        with lines.writing(self.output) as target:
            for value, tokens in found:
                target.write(f"{value:.4f}\t{tokens}\n")
        total, count = sum(value for value, _ in found), sum(tokens for _, tokens in found)
        told = f"gshard-m4: {len(found):,} pairs, {total / max(count, 1):.3f} nats a token"
        if cut:
            told += f"; of {cut:,} sources only the beginning of {translator.text.length - 1} tokens was read"
        print(told, file=sys.stderr)
        return 0


def nats(translator: Translator, pairs: Sequence[Pair], batch: int = 32) -> tuple[list[tuple[float, int]], int]:
    """Nats and target tokens of each pair, its end included; and how many sources were too long to be read whole.

    What a pair has does not depend on the pairs beside it: experts have no capacity limit here.

    Args:
        translator: the model and its vocabularies.
        pairs: sources and their translations.
        batch: pairs that are scored together.
    """
    text, room = translator.text, translator.text.length - 1
    model = on_devices(translator.model, 1).dropless()

    @jax.jit
    def of_batch(params: dict, source_BL: jax.Array, target_BT: jax.Array) -> jax.Array:
        before_BT = jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0)))
        logits_BTV, _ = moe.forward(model, params, source_BL, before_BT)
        picked_BT = jnp.take_along_axis(logits_BTV, target_BT[:, :, None], axis=-1)[:, :, 0]
        return jnp.sum(jnp.where(target_BT == PAD, 0.0, jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT), axis=1)

    sources = [text.source_ids(pair.foreign) for pair in pairs]
    cut = sum(len(ids) > room for ids in sources)
    rows = [
        ([*source[:room], EOS], [*text.target_ids(pair.english), EOS])
        for source, pair in zip(sources, pairs, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda at: [len(side) for side in rows[at]])
    found = [(0.0, 0)] * len(rows)
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        sides = [_padded([rows[at][side] for at in some], batch) for side in (0, 1)]
        values_B = np.asarray(of_batch(translator.params, *sides), np.float64)
        for at, value in zip(some, values_B):
            found[at] = float(value), len(rows[at][1])
    return found, cut


def _padded(rows: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """Rows of a power of two of tokens, int32 [count, L]; those that are not there have an end alone."""
    longest = max(map(len, rows))
    found = np.full((count, max(16, 1 << (longest - 1).bit_length())), PAD, np.int32)
    found[:, 0] = EOS
    for row, ids in enumerate(rows):
        found[row, : len(ids)] = ids
    return found
