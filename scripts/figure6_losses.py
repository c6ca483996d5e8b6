"""What each sentence costs a model, and how sure differences are: what scripts/figure6_ablation.py measures.

The cross entropy of a sentence says more of a model than its translation does, and is less of an accident. So models
that a test of a thousand translations cannot tell apart are told apart by the cross entropy of the same sentences.
Sentences that share their English are no independent ones: deviations are those of sums over different English.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gshard import moe
from gshard_m4 import checkpoint, evaluate
from gshard_m4.batches import Batches, Shape, placed
from gshard_m4.config import Run
from gshard_m4.encoded import Encoded
from gshard_m4.evaluate import CLASSES
from gshard_m4.score import ALL
from gshard_m4.text import PreparedText

NORMAL = NormalDist()
ENOUGH = 10  # sentences of a language below which it is left out of a mean
Range = tuple[int, int]
"""At least, and at most."""


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Pairs whose cross entropy is measured.

    Attributes:
        data: the pairs, N of them, in an order in which languages are mixed.
        rows: the places of training pairs in the training data, int64 [N]; None of held-out ones.
    """

    data: Encoded
    rows: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        """Target tokens of each, end included, int64 [N]."""
        return np.diff(self.data.target_at) + 1

    @property
    def english(self) -> np.ndarray:
        """A number for each different English sentence, int64 [N]."""
        ids, at = self.data.target, self.data.target_at
        numbers: dict[bytes, int] = {}
        return np.array(
            [numbers.setdefault(np.asarray(ids[a:b]).tobytes(), len(numbers)) for a, b in itertools.pairwise(at)]
        )

    def of(self, language: str) -> np.ndarray:
        """Which are of a language, bool [N]."""
        return np.asarray(self.data.language) == self.data.languages.index(language)


def training_pairs(batches: Batches, each: int, seed: int = 0) -> Sentences:
    """Pairs of the training text, as many of each language, drawn at random among those that a batch can hold."""
    data, rng = batches.data, np.random.default_rng(seed)
    fits = np.flatnonzero(data.lengths <= batches.length)
    of = np.asarray(data.language)[fits]
    own = [fits[of == number] for number in range(len(data.languages))]
    rows = rng.permutation(np.concatenate([rng.permutation(pairs)[:each] for pairs in own]))
    return Sentences(data.only(rows), rows)


def held_out(text: PreparedText, parts: Sequence[str]) -> Sentences:
    """All sentences of held-out parts that fit the model."""
    examples = [example for part in parts for example in text.examples(None, part)]
    names = tuple(sorted(text.languages))
    order = np.random.default_rng(0).permutation(len(examples))
    examples = [examples[i] for i in order]
    sides, at = [], []
    for vocabulary, lines in (
        (text.source, [e.foreign for e in examples]),
        (text.target, [e.english for e in examples]),
    ):
        ids = vocabulary.encode(lines)
        at.append(np.concatenate([[0], np.cumsum([len(own) for own in ids])]).astype(np.int64))
        sides.append(np.array([i for own in ids for i in own], np.int64))
    language = np.array([names.index(e.language) for e in examples], np.int64)
    data = Encoded(names, language, *sides, *at)
    return Sentences(data.only(np.flatnonzero(data.lengths <= text.length)))


def times_drawn(batches: Batches, steps: int) -> np.ndarray:
    """How often each training pair was in the batches of so many steps, int64 [N]."""
    count = np.zeros(len(batches.data), np.int64)
    for step in range(steps):
        np.add.at(count, batches.pairs(step), 1)
    return count


def nats(run: Run, shape: Shape, sentences: Sentences) -> np.ndarray:
    """The cross entropy of each sentence under the newest checkpoint of a run, float64 [N]: nats of all its tokens.

    Args:
        run: the run.
        shape: of the batches, best that which was trained on: where experts are full depends on it. The sentences fit.
        sentences: what is measured, without dropout.
    """
    _, state, meta, _ = checkpoint.restore_newest_sound(run.checkpoints)
    model = dataclasses.replace(moe.TransformerConfig(**meta["model"]), partitions=1)
    params = jax.device_put(state["params"], jax.devices()[0])

    @jax.jit
    def of_tokens(params: dict, source_BL: jax.Array, target_BL: jax.Array) -> jax.Array:
        before_BL = jnp.pad(target_BL[:, :-1], ((0, 0), (1, 0)))
        logits_BLV, _ = moe.forward(model, params, source_BL, before_BL)
        picked_BL = jnp.take_along_axis(logits_BLV, target_BL[:, :, None], axis=-1)[:, :, 0]
        return jnp.where(target_BL == 0, 0.0, jax.nn.logsumexp(logits_BLV, axis=-1) - picked_BL)

    found = np.zeros(len(sentences.data))
    for batch, pairs, row in placed(sentences.data, shape, min(shape.source, shape.target)):
        cost_BL = np.asarray(of_tokens(params, batch["source"], batch["target"]), np.float64)
        ends = sentences.tokens[pairs]
        for number in np.unique(row):
            own = np.flatnonzero(row == number)  # one after the other
            first = np.concatenate([[0], np.cumsum(ends[own])[:-1]])
            found[pairs[own]] = np.add.reduceat(cost_BL[number, : ends[own].sum()], first)
    return found


class Estimate(NamedTuple):
    """A number, and the standard deviation that another choice of sentences gives it."""

    size: float
    deviation: float

    @property
    def half(self) -> float:
        """Half the width of the interval that holds 95 %."""
        return 1.96 * self.deviation

    @property
    def p(self) -> float:
        """The probability that chance makes a number that is nothing as large, either way."""
        if not self.deviation:
            return 1.0 if not self.size else 0.0
        return 2 * NORMAL.cdf(-abs(self.size) / self.deviation)

    def __str__(self) -> str:
        return f"{self.size:+.3f} ± {self.half:.3f}"


class Group(NamedTuple):
    """Sentences of one language, with the factor that their mean has in a sum.

    Attributes:
        factor: of the mean.
        nats: cross entropies, or their differences, float64 [n].
        tokens: of each, int64 [n].
        english: number of the English of each, int64 [n].
    """

    factor: float
    nats: np.ndarray
    tokens: np.ndarray
    english: np.ndarray


def total(groups: Sequence[Group]) -> Estimate | None:
    """The sum of the groups' means for a token, each with its factor; None without groups.

    >>> one = Group(1.0, np.array([2.0, 4.0]), np.array([1, 2]), np.array([0, 1]))
    >>> total([one])
    Estimate(size=2.0, deviation=0.0)
    >>> total([one, one._replace(factor=-1.0)]).size
    0.0
    """
    if not groups:
        return None
    size, influence = 0.0, []
    for group in groups:
        mean = group.nats.sum() / group.tokens.sum()
        size += group.factor * mean
        influence.append(group.factor * (group.nats - mean * group.tokens) / group.tokens.sum())
    _, place = np.unique(np.concatenate([group.english for group in groups]), return_inverse=True)
    return Estimate(float(size), math.sqrt(float((np.bincount(place, np.concatenate(influence)) ** 2).sum())))


class Exposure(NamedTuple):
    """How often the pairs of a class of languages were drawn, those that are too long for any batch left out.

    Attributes:
        pairs: training pairs of the class.
        share: of the pairs in all batches.
        times: that a pair was drawn, mean.
        never: share of the pairs that were not drawn at all.
        english: times that the English of a pair was drawn, with any language, mean.
        unheard: share of the pairs whose English was not drawn at all.
    """

    pairs: int
    share: float
    times: float
    never: float
    english: float
    unheard: float


def english_drawn(data: Encoded, count_N: np.ndarray) -> np.ndarray:
    """How often the English of each pair was drawn, with whatever language, int64 [N].

    Args:
        data: the training pairs.
        count_N: how often each was drawn.
    """
    number_N = Sentences(data).english
    return np.bincount(number_N, count_N)[number_N].astype(np.int64)


def exposure(
    batches: Batches, count_N: np.ndarray, english_N: np.ndarray, classes: Mapping[str, str]
) -> dict[str, Exposure]:
    """How often the pairs of each class, and of all languages, were drawn.

    Args:
        batches: that they were drawn for.
        count_N: how often each training pair was drawn.
        english_N: how often its English was.
        classes: of the languages.
    """
    data, found = batches.data, {}
    for name in (*CLASSES, ALL):
        codes = [i for i, code in enumerate(data.languages) if name in (classes[code], ALL)]
        own = np.isin(data.language, codes) & (data.lengths <= batches.length)
        if own.any():
            count, english = count_N[own], english_N[own]
            found[name] = Exposure(
                int(own.sum()), float(count.sum() / count_N.sum()), float(count.mean()), float((count == 0).mean()),
                float(english.mean()), float((english == 0).mean()),
            )  # fmt: skip
    return found


def classes_of(pairs: Mapping[str, int]) -> dict[str, str]:
    """high, medium or low for each language, as `gshard_m4.evaluate.resource_classes` has them.

    >>> classes_of({"de": 9, "fr": 7, "af": 1, "nl": 3})
    {'de': 'high', 'fr': 'medium', 'nl': 'medium', 'af': 'low'}
    """
    ordered = sorted(pairs, key=lambda code: (-pairs[code], code))
    of = {code: evaluate.OfLanguage(pairs[code], 1, 0.0, 0.0, "") for code in ordered}
    return evaluate.resource_classes(evaluate.Results("", of, (0.0, 0.0), ""))


@dataclasses.dataclass(frozen=True)
class Found:
    """What was measured.

    Attributes:
        sets: name -> its sentences: training pairs, known and new English.
        classes: language -> high, medium or low.
        pairs: language -> its training pairs.
        drawn: temperature -> how often each pair of the set of training pairs was drawn, int64 [N].
        english: temperature -> how often its English was drawn, with whatever language, int64 [N].
        exposures: temperature -> class -> how often its pairs were drawn, all of them.
        nats: temperature, model, set -> cross entropy of each sentence, float64 [N].
    """

    sets: Mapping[str, Sentences]
    classes: Mapping[str, str]
    pairs: Mapping[str, int]
    drawn: Mapping[float, np.ndarray]
    english: Mapping[float, np.ndarray]
    exposures: Mapping[float, Mapping[str, Exposure]]
    nats: Mapping[tuple[float, str, str], np.ndarray]

    def groups(
        self, factor: float, temperature: float, models: Mapping[str, float], of: str, resource: str,
        times: Range | None = None, english: Range | None = None, languages: Sequence[str] | None = None,
    ) -> list[Group]:  # fmt: skip
        """The languages of a class, which all count alike, as groups whose sum is the mean of the class.

        Args:
            factor: of the mean.
            temperature: that the models were trained under.
            models: name -> factor of its cross entropy: 1 and -1 for a difference of the same sentences.
            of: the set.
            resource: the class.
            times: of training pairs only those drawn at least and at most so often.
            english: of training pairs only those whose English was drawn so often.
            languages: of the class only these.
        """
        sentences = self.sets[of]
        codes = [code for code in self.languages(resource) if languages is None or code in languages]
        cost = sum(weight * self.nats[temperature, name, of] for name, weight in models.items())
        found = []
        for code in codes:
            own = sentences.of(code)
            for asked, drawn in ((times, self.drawn), (english, self.english)):
                if asked is not None:
                    own = own & (drawn[temperature] >= asked[0]) & (drawn[temperature] <= asked[1])
            if own.sum() >= ENOUGH:
                found.append((cost[own], self._tokens[of][own], self._numbers[of][own]))
        return [Group(factor / len(found), *group) for group in found]

    def languages(self, resource: str) -> list[str]:
        """Those of a class, or all."""
        return [code for code in self.classes if resource in (self.classes[code], ALL)]

    def enough(self, temperature: float, of: str, resource: str, times: Sequence[Range]) -> list[str]:
        """The languages of a class that have enough training pairs drawn so often, for each of some such ranges."""
        drawn, sentences = self.drawn[temperature], self.sets[of]
        return [
            code
            for code in self.languages(resource)
            if all((sentences.of(code) & (drawn >= a) & (drawn <= b)).sum() >= ENOUGH for a, b in times)
        ]

    @functools.cached_property
    def _numbers(self) -> dict[str, np.ndarray]:
        return {name: sentences.english for name, sentences in self.sets.items()}

    @functools.cached_property
    def _tokens(self) -> dict[str, np.ndarray]:
        return {name: sentences.tokens for name, sentences in self.sets.items()}
