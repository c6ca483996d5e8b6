"""Claim: sentences that join a search under way are answered sooner, and more of them, than batch after batch.

A model of the size of the demo with random weights, whose endings are made as random as its words: lengths of
translations are spread like those of text, and every step costs what it costs in a trained model. Two ways to search
take turns in this process, behind the queue of ``m4 serve``:

    batches      whoever has come is searched for together, and the next batch begins when all of it has ended
    continuous   whoever comes takes the place of one that has ended

First how many sentences a second each translates if all are there at once; then latencies, for sentences that come at
random times (a Poisson process), at shares of what batches can do. Printed is a table for ``docs/serving.md``.

    python benchmarks/serving.py [--sentences 200] [--batch 16]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from gshard import moe
from m4.config import ModelChoice
from m4.decode import EOS, DecodeConfig
from m4.serve.batcher import Batcher
from m4.stream import InBatches, Search
from m4.translate import Translated, Translator

VOCABULARY, LENGTH = 4000, 64
LOADS = (0.25, 0.5, 0.8, 1.2)


class Numbers:
    """A text is numbers; number n is word n of both vocabularies."""

    languages = MappingProxyType({"de": 1})
    source_vocabulary = target_vocabulary = VOCABULARY
    length = LENGTH

    def source_ids(self, sentence: str) -> list[int]:
        return [int(word) for word in sentence.split()]

    def english(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@dataclasses.dataclass(frozen=True, slots=True)
class InTurns(Translator):
    """The same translator, one batch after the other."""

    def search(self, steps: int = 8) -> Search:
        return InBatches(self.model, self.params, self.options, None, self.batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=200, help="sentences of each measurement")
    parser.add_argument("--batch", type=int, default=16, help="places of a search")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, in turns")
    options = parser.parse_args()

    model = ModelChoice("demo").transformer(VOCABULARY, VOCABULARY)
    params = moe.init(model, jax.random.key(0))
    params["target_embedding"] = 4.0 * params["target_embedding"]
    params["target_embedding"] = params["target_embedding"].at[EOS].multiply(2.2)
    made: dict[str, Any] = {}
    for name, kind in (("batches", InTurns), ("continuous", Translator)):
        made[name] = kind(model, params, Numbers(), DecodeConfig(placeholders=False), options.batch)
    rng = np.random.default_rng(1)
    texts = sentences(rng, options.sentences)

    done = {name: of.translate(texts) for name, of in made.items()}  # compiles
    assert [of.text for of in done["batches"]] == [of.text for of in done["continuous"]], "the same translations"
    lengths = [len(of.text.split()) for of in done["continuous"]]
    print(f"{len(texts)} sentences of {spread([len(of.split()) for of in texts])} tokens")
    print(f"translations of {spread(lengths)} tokens; {options.batch} places, a beam of 4\n")

    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, of in made.items():
            began = time.perf_counter()
            of.translate(texts)
            seconds[name].append(time.perf_counter() - began)
    rate = {name: len(texts) / statistics.median(of) for name, of in seconds.items()}
    ratio = statistics.median(b / c for b, c in zip(seconds["batches"], seconds["continuous"], strict=True))
    print(f"all at once: batches {rate['batches']:.1f}, continuous {rate['continuous']:.1f} sentences/s: {ratio:.2f}\n")

    print("| sentences/s | of what batches can do | | answered/s | median | 95 % | 99 % |")
    print("|---|---|---|---|---|---|---|")
    for load in LOADS:
        asked = load * rate["batches"]
        arrivals = np.cumsum(rng.exponential(1 / asked, len(texts)))
        for name, of in made.items():
            answered, latencies = asyncio.run(under_load(of, texts, arrivals))
            parts = (f"{np.percentile(latencies, share) * 1000:,.0f} ms" for share in (50, 95, 99))
            print(f"| {asked:.1f} | {load:.0%} | {name} | {answered:.1f} | {' | '.join(parts)} |", flush=True)


def sentences(rng: np.random.Generator, count: int) -> list[str]:
    """Texts of lengths like those of interfaces and manuals: many short ones, few long ones."""
    lengths = np.clip(np.exp(rng.normal(2.2, 0.8, count)), 2, LENGTH - 2).astype(int)
    return [" ".join(map(str, rng.integers(3, VOCABULARY, length))) for length in lengths]


def spread(lengths: Sequence[int]) -> str:
    """Median, and the middle 80 %."""
    low, middle, high = np.percentile(lengths, (10, 50, 90))
    return f"{low:.0f} to {high:.0f} (median {middle:.0f})"


async def under_load(translator: Translator, texts: Sequence[str], arrivals: np.ndarray) -> tuple[float, list[float]]:
    """Sentences answered a second, and the seconds that each took."""
    batcher = Batcher(translator, limit=len(texts), wait=0.005)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(text: str, comes: float) -> float:
        await asyncio.sleep(began + comes - loop.time())
        asked = loop.time()
        found: list[Translated] = await batcher.translate([text])
        assert found[0].hypotheses
        return loop.time() - asked

    latencies = list(await asyncio.gather(*(one(text, float(at)) for text, at in zip(texts, arrivals, strict=True))))
    answered = len(texts) / (loop.time() - began)
    await batcher.close()
    return answered, latencies


if __name__ == "__main__":
    main()
