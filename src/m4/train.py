"""Training: one pure step, compiled in one place, and the loop around it.

`train_step` is written for one device: gradients of the model's loss, then Adafactor. `compile_step` is the only
place that knows of devices: it hands the step to `gshard.jit`, which partitions it as the marks in the MoE layers ask.

A step depends on the state and the batch alone, dropout and the coins of the second expert included (their key is
folded from the seed and the number of the step), and the batch on the number of the step. So a run that is
interrupted and resumed from a checkpoint computes the same numbers as one that was not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard import moe
from m4 import checkpoint, optimizer
from m4.config import Run, TrainConfig
from m4.progress import Progress

Batch = Mapping[str, Any]
"""``source`` and ``target``, int32 [B, L]: ids, 0 where padded; targets end in 1."""

State = dict[str, Any]
"""``params``, ``moments`` of the optimizer, and ``step``, the number of steps taken, int32."""


class TrainError(gshard.GShardError):
    """Training cannot start, or cannot go on."""


class NotFiniteError(TrainError):
    """The loss or the gradient is infinite or not a number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a run came to.

    Attributes:
        state: the last state, on its devices.
        held_out: step -> cross entropy in nats for each target token of held-out text.
        tokens_per_second: target tokens, padding not counted, without the first step, which compiles.
        seconds_per_step: median, without the first step.
        compile_seconds: how long the first step took.
        stopped: whether the run was asked to stop before its last step.
    """

    state: State
    held_out: dict[int, float]
    tokens_per_second: float
    seconds_per_step: float
    compile_seconds: float
    stopped: bool


def initial_state(model: moe.TransformerConfig, seed: int) -> State:
    """Parameters before the first step."""
    return {
        "params": moe.init(model, jax.random.key(seed)),
        "moments": optimizer.init(moe.param_specs(model)),
        "step": jnp.int32(0),
    }


def make_step(model: moe.TransformerConfig, options: TrainConfig) -> Callable[[State, Batch], tuple[State, Any]]:
    """The update as a pure function of state and batch; metrics are float32 scalars."""
    specs = moe.param_specs(model)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(options.seed), state["step"])

        def objective(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return moe.loss(model, params, dict(batch), key=key, label_smoothing=options.label_smoothing)

        (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state["params"])
        params, moments = optimizer.update(
            grads, state["moments"], state["params"], state["step"], specs, options.optimizer
        )
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        state = {"params": params, "moments": moments, "step": state["step"] + 1}
        return state, {**metrics, "gradient_norm": norm}

    return train_step


def make_evaluation(model: moe.TransformerConfig) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Cross entropy and number of target tokens of a batch: no dropout, no coins, no smoothing."""

    def evaluation_step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        _, metrics = moe.loss(model, params, dict(batch), key=None, label_smoothing=0.0)
        return metrics["cross_entropy"], metrics["tokens"]

    return evaluation_step


def compile_step(step: Callable[..., Any], devices: int, *, donate: bool = True) -> Callable[..., Any]:
    """Makes `step` run on the first `devices` devices.

    Args:
        step: a function of a state and a batch, written for one device.
        devices: their number; more than one partitions the step.
        donate: whether the new state may take the memory of the old one.
    """
    donated = (0,) if donate else ()
    if devices == 1:
        return jax.jit(step, donate_argnums=donated)
    return gshard.jit(step, mesh=devices, donate_argnums=donated)  # type: ignore[no-any-return]


def held_out_cross_entropy(evaluate: Callable[..., Any], params: Any, batches: Iterable[Batch]) -> float:
    """Mean over the tokens of all batches, in nats."""
    total = tokens = 0.0
    for batch in batches:
        value, count = evaluate(params, batch)
        total += float(value) * float(count)
        tokens += float(count)
    return total / max(tokens, 1.0)


def train(
    model: moe.TransformerConfig,
    options: TrainConfig,
    run: Run,
    batch: Callable[[int], Batch],
    held_out: Iterable[Batch] = (),
    *,
    meta: Mapping[str, Any] | None = None,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    show: Progress | None = None,
) -> Result:
    """Trains a model and saves it.

    Args:
        model: the model; it is trained on ``model.partitions`` devices.
        options: length, learning rate and so on.
        run: where checkpoints and metrics go.
        batch: step -> the batch of that step, always the same; B and L are those of every step.
        held_out: batches that are measured and not trained on.
        meta: what is saved beside the parameters, such as which vocabularies they belong to.
        resume: go on from the newest sound checkpoint of `run` if there is one.
        stop: asked after every step; once true, the state is saved and the run ends.
        show: where progress is shown; a new one for standard output if None.

    Raises:
        TrainError: the run's folder has a checkpoint and `resume` is false; the checkpoint was made by another model.
        NotFiniteError: the loss or the gradient is not finite. Nothing of the bad step is saved.
        CheckpointError: a checkpoint cannot be written or read.
    """
    described = {"model": dataclasses.asdict(model), "train": dataclasses.asdict(options), **(meta or {})}
    state = _start(model, options, run, described, resume)
    first = int(state["step"])
    take = compile_step(make_step(model, options), model.partitions)
    evaluate = compile_step(make_evaluation(model), model.partitions, donate=False)
    held_out = list(held_out)
    measured: dict[int, float] = {}
    seconds: list[float] = []
    tokens: list[float] = []
    stopped = False

    with _metrics_file(run, first) as log, show or Progress(options.steps, options.log_every) as bar:
        if held_out:
            measured[first] = held_out_cross_entropy(evaluate, state["params"], held_out)
            bar.note(f"held-out cross entropy before: {measured[first]:.3f} nats a token")
        for step in range(first, options.steps):
            begin = time.perf_counter()
            state, metrics = take(state, batch(step))
            values = {name: float(value) for name, value in metrics.items()}
            seconds.append(time.perf_counter() - begin)
            tokens.append(values["tokens"])
            _check_finite(values, step, run)
            record = {"step": step, "seconds": round(seconds[-1], 4), **values}

            done = step + 1
            stopped = stop()
            last = stopped or done == options.steps
            if held_out and (last or (options.evaluate_every and done % options.evaluate_every == 0)):
                measured[done] = record["held_out"] = held_out_cross_entropy(evaluate, state["params"], held_out)
                bar.note(f"held-out cross entropy after {done} steps: {measured[done]:.3f} nats a token")
            log.write(json.dumps(record) + "\n")
            bar.update(done, record)
            if last or (options.save_every and done % options.save_every == 0):
                checkpoint.save(run.checkpoints, done, state, described)
                checkpoint.prune(run.checkpoints, options.keep)
            if stopped:
                break

    timed = seconds[1:] or seconds or [math.nan]
    return Result(
        state=state,
        held_out=measured,
        tokens_per_second=sum(tokens[1:] or tokens) / sum(timed),
        seconds_per_step=float(np.median(timed)),
        compile_seconds=seconds[0] if seconds else 0.0,
        stopped=stopped,
    )


def _start(
    model: moe.TransformerConfig, options: TrainConfig, run: Run, described: Mapping[str, Any], resume: bool
) -> State:
    """The state to go on from."""
    saved = checkpoint.steps(run.checkpoints)
    if saved and not resume:
        raise TrainError(
            f"the run has a checkpoint of step {saved[-1]} already.",
            where=str(run.checkpoints),
            way_out="Add --resume to go on from it, or name another folder.",
        )
    if not saved:
        return initial_state(model, options.seed)
    like = jax.eval_shape(lambda: initial_state(model, options.seed))
    _, state, meta, damaged = checkpoint.restore_newest_sound(run.checkpoints, like, check=_same_run(described, run))
    for error in damaged:
        print(f"passed over: {error}")
    return dict(state)


def _same_run(described: Mapping[str, Any], run: Run) -> Callable[[Mapping[str, Any]], None]:
    """Refuses to go on with another model, naming the first setting that differs."""

    def check(saved: Mapping[str, Any]) -> None:
        changeable = {"partitions", "dispatch", "remat"}  # how the model runs, not what it is
        theirs, ours = saved.get("model", {}), json.loads(json.dumps(described["model"]))
        for name in sorted((theirs.keys() | ours.keys()) - changeable):
            if theirs.get(name) != ours.get(name):
                raise TrainError(
                    f"the checkpoint was made by another model: {name} is {theirs.get(name)!r} there and "
                    f"{ours.get(name)!r} here.",
                    where=str(run.checkpoints),
                    way_out="Use the settings of the first run, or name another folder.",
                )

    return check


def _check_finite(values: Mapping[str, float], step: int, run: Run) -> None:
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(values[name]):
            saved = checkpoint.steps(run.checkpoints)
            raise NotFiniteError(
                f"the {name.replace('_', ' ')} is {values[name]} at step {step}.",
                got=", ".join(f"{key} {value:.4g}" for key, value in values.items()),
                way_out=(f"Resume from step {saved[-1]} with " if saved else "Start again with ")
                + "a smaller learning_rate, or a longer warm-up.",
            )


def _metrics_file(run: Run, first: int) -> IO[str]:
    """The metrics log, cut back to the steps before `first`."""
    path: Path = run.metrics
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if first and path.exists():
            with path.open(encoding="utf-8") as old:
                kept = list(itertools.islice(old, first))
        path.write_text("".join(kept), "utf-8")
        return path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise TrainError(
            f"the metrics cannot be written: {error.strerror}.",
            where=str(path),
            way_out="Name a folder that can be written to.",
        ) from error
