"""Claim: sentences that join a search under way are answered sooner, and more of them, than batch after batch.

A trained run (``make demo`` makes one) translates the sentences of its own test, in two ways that take turns in this
process, behind the queue of ``gshard-m4 serve``:

    batches      whoever has come is searched for together, and the next batch begins when all of it has ended
    continuous   whoever comes takes the place of one that has ended

First how many sentences a second each translates if all are there at once; then latencies, for sentences that come at
random times (a Poisson process), at shares of what batches can do. Printed is a table for m4's page on serving.

    python benchmarks/serving.py [--run runs/demo] [--sentences 300] [--batch 16]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np

from gshard_m4 import runs
from gshard_m4.decode import DecodeConfig
from gshard_m4.serve.batcher import Batcher
from gshard_m4.stream import Found, Search, Sentence
from gshard_m4.text import PreparedText
from gshard_m4.translate import Translated, Translator, load

LOADS = (0.25, 0.5, 0.8, 1.2)


class InBatches(Search):
    """Goes on with those that it has until all of them have ended; others come after them."""

    def __init__(self, of: Translator):
        super().__init__(of.model, of.params, of.options, of.batch, steps=1 << 20)
        self._later: list[tuple[Hashable, Sentence]] = []

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._later)

    def add(self, ticket: Hashable, sentence: Sentence) -> None:
        if self.room(sentence.width):
            super().add(ticket, sentence)
        else:
            self._later.append((ticket, sentence))

    def step(self, *, more: bool = False) -> list[Found]:
        found = super().step()
        later, self._later = self._later, []
        for of in later:
            self.add(*of)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class InTurns(Translator):
    """The same translator, one batch after the other."""

    def search(self, steps: int = 8) -> Search:
        return InBatches(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the trained run; otherwise the newest")
    parser.add_argument("--data", type=Path, help="its corpus, where it is not where it was")
    parser.add_argument("--sentences", type=int, default=300, help="sentences of each measurement")
    parser.add_argument("--batch", type=int, default=16, help="places of a search")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, in turns")
    options = parser.parse_args()

    run = runs.chosen(options.run)
    trained = load(run, PreparedText.load(runs.corpus_of(run, options.data)), DecodeConfig(), batch=options.batch)
    given = trained.model, trained.params, trained.text, trained.options, trained.batch
    made: dict[str, Translator] = {"batches": InTurns(*given), "continuous": Translator(*given)}
    texts = [example[1] for example in trained.text.examples(options.sentences)]

    done = {name: of.translate(texts) for name, of in made.items()}  # compiles
    assert [of.text for of in done["batches"]] == [of.text for of in done["continuous"]], "the same translations"
    print(f"{len(texts)} sentences of {spread([len(trained.text.source_ids(text)) for text in texts])} tokens")
    lengths = [len(of.text.split()) for of in done["continuous"]]
    print(f"translations of {spread(lengths)} words; {options.batch} places, a beam of {trained.options.beam}\n")

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
    rng = np.random.default_rng(1)
    for part in LOADS:
        asked = part * rate["batches"]
        answered: dict[str, list[float]] = {name: [] for name in made}
        latencies: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(options.rounds):
            arrivals = np.cumsum(rng.exponential(1 / asked, len(texts)))
            for name, of in made.items():
                a_second, each = asyncio.run(under_load(of, texts, arrivals))
                answered[name].append(a_second)
                latencies[name] += each
        for name in made:
            parts = (f"{np.percentile(latencies[name], share) * 1000:,.0f} ms" for share in (50, 95, 99))
            a_second = statistics.median(answered[name])
            print(f"| {asked:.1f} | {part:.0%} | {name} | {a_second:.1f} | {' | '.join(parts)} |", flush=True)


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
