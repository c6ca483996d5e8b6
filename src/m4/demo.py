"""The demo: everything once, small enough for two processor cores and a few minutes.

It prepares the quick-start corpus, shows how the training step is partitioned, trains, and says what came of it, in
numbers next to those of translators that know nothing, and in ten translations.

The held-out sentences share no English sentence with the training data. Their cross entropy is compared with that of
word frequencies: what a model would reach that had learnt how often each word occurs, and nothing about the source.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import gshard
from gshard import moe
from m4 import score
from m4.config import Run, TrainConfig
from m4.decode import PAD, DecodeConfig
from m4.train import Result, compile_step, initial_state, make_step, train
from m4.translate import Text, Translator

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What the demo found.

    Attributes:
        before: cross entropy of the held-out sentences before training, nats a token.
        after: the same after training.
        frequencies: the same for a model of word frequencies.
        scores: system -> language -> score; ``model`` and the baselines.
        seconds: of everything.
    """

    before: float
    after: float
    frequencies: float
    scores: Mapping[str, Mapping[str, score.Score]]
    seconds: float


def demo(
    text: Text,
    model: moe.TransformerConfig,
    options: TrainConfig,
    run: Run,
    search: DecodeConfig,
    *,
    sentences: int = 200,
    say: Say = print,
    began: float | None = None,
) -> Report:
    """Plans, trains, evaluates and translates.

    Args:
        text: the prepared corpus.
        model: the model, partitioned over as many devices as it says.
        options: how long to train, and so on.
        run: where the model is saved; must not hold a checkpoint yet.
        search: how to translate.
        sentences: held-out sentences to score, none longer than those of training.
        say: takes each line of what is to be told.
        began: `time.perf_counter()` at the start of what is counted as the demo; now if None.
    """
    began = time.perf_counter() if began is None else began
    say(describe_model(model))
    if model.partitions > 1:
        say(plan_summary(model, options, text.batch(0)))
    held_out = text.held_out()
    frequencies = frequency_cross_entropy(text.target_counts(), held_out)
    result = train(model, options, run, text.batch, held_out, meta={"vocabularies": text.fingerprint})
    before, *_, after = result.held_out.values()
    say(_speed(result))
    say(
        f"\nheld-out cross entropy: {before:.2f} before, {after:.2f} after training; "
        f"word frequencies alone: {frequencies:.2f} nats a token"
    )

    params = jax.device_put(jax.device_get(result.state["params"]), jax.devices()[0])
    translator = Translator(model, params, text, search)
    # Only what a batch can hold: the model has never seen anything longer.
    known = [e for e in text.examples(8 * sentences) if len(text.source_ids(e.source)) < text.length]
    examples = known[:sentences]
    sources, references, languages = ([e[i] for e in examples] for i in (1, 2, 0))
    written = [t.text for t in translator.translate(sources)]
    scores = {"model": score.score(written, references, languages)}
    scores |= score.baselines(sources, references, languages, text.frequent_sentence())
    count = len(set(languages))
    say(f"\n{len(examples)} held-out sentences of {count} languages, with English that training never saw:")
    for name, of_language in scores.items():
        say(f"  {name:<28} {of_language[score.ALL]}")
    say(f"  {scores['model'][score.ALL].signature}")
    say("\nten of them:")
    for at in _spread(len(examples), 10):
        say(f"  [{languages[at]}] {sources[at]}\n    reference: {references[at]}\n    model:     {written[at]}")
    seconds = time.perf_counter() - began
    say(f"\n{seconds / 60:.1f} minutes in all; the model is in {run.directory}")
    return Report(before, after, frequencies, scores, seconds)


def describe_model(model: moe.TransformerConfig) -> str:
    """One line: layers, experts, sizes, number of weights."""
    weights = moe.parameter_count(moe.param_specs(model))
    kind = f"{model.experts} experts in every other layer" if model.experts else "no experts"
    return (
        f"model: {model.encoder_layers} + {model.decoder_layers} layers of {model.model_dim}, {kind}, hidden layers of "
        f"{model.hidden_dim}; {weights / 1e6:.1f} million weights; on {model.partitions} devices"
    )


def plan_summary(model: moe.TransformerConfig, options: TrainConfig, batch: Mapping[str, np.ndarray]) -> str:
    """How the training step is partitioned: what is split, what the devices send, what each one holds."""
    state = jax.eval_shape(lambda: initial_state(model, options.seed))
    mesh = gshard.Mesh.abstract(devices=model.partitions)  # it needs no devices to be planned
    step = compile_step(make_step(model, options), mesh, memory_limit=options.memory_limit, search=options.search)
    found = gshard.explain(step, state, dict(batch))
    split = [row for row in found.tensors if row.is_argument and row.why]
    weights = [row for row in split if "params" in row.name]
    whole, local = found.argument_bytes
    by = f"by {'a search that keeps ' if options.search else ''}the marks of its {model.moe_layers} MoE layers"
    lines = [
        f"\nthe training step, written for one device, on {model.partitions} devices "
        f"({found.equations} operations, partitioned {by}):",
        f"  each device holds {_mib(local)} of the {_mib(whole)} of state and batch; split over the devices are:",
    ]
    lines += [f"    {row.name:<60} {row.sharding}" for row in weights]
    lines.append(f"    and {len(split) - len(weights)} more: the batch, and the optimizer's state of these weights")
    lines.append(f"  at the peak of a step each device holds {_mib(found.cost().peak)}, as modelled")
    if found.spmd.recomputed is not None:
        lines.append(f"  {str(found.spmd.recomputed).splitlines()[0]}")
    lines.append(f"  in one step each device sends {_mib(found.total_bytes)}:")
    for kind, sent in sorted(found.bytes_by_kind.items(), key=lambda pair: -pair[1]):
        times = sum(row.times for row in found.collectives if row.kind == kind)
        lines.append(f"    {kind:<18} {times:>4} times  {_mib(sent):>10}")
    lines.append("  the all-to-alls carry tokens to their experts and back:")
    lines += [f"    {row.times} times {row.shape}  {row.line}" for row in found.collectives if row.kind == "all_to_all"]
    return "\n".join(lines)


def frequency_cross_entropy(counts_V: np.ndarray, batches: Any) -> float:
    """Cross entropy of target tokens under the frequencies of the training data, in nats; add-one smoothed.

    >>> ids = np.array([[3, 4, 0]])
    >>> round(frequency_cross_entropy(np.array([0, 0, 0, 9, 9]), [{"target": ids}]), 3)
    0.833
    """
    probability_V = (counts_V + 1.0) / (counts_V.sum() + len(counts_V))
    ids = np.concatenate([np.asarray(batch["target"]).ravel() for batch in batches])
    return float(-np.mean(np.log(probability_V[ids[ids != PAD]])))


def _speed(result: Result) -> str:
    return (
        f"trained: {result.tokens_per_second:,.0f} target tokens/s, {result.seconds_per_step:.2f} s a step, "
        f"{result.compile_seconds:.0f} s to compile"
    )


def _spread(total: int, count: int) -> list[int]:
    """`count` places spread evenly over `total`."""
    return [i * total // count for i in range(count)] if total > count else list(range(total))


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
