"""Training: the loop around the step of `gshard_m4.step`, its checkpoints, metrics and evaluations.

A step depends on the state and the batch alone, and the batch on the number of the step. So a run that is interrupted
and resumed from a checkpoint computes the same numbers as one that was not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard import moe
from gshard_m4 import checkpoint
from gshard_m4.config import PLACE, Run, TrainConfig, devices_of, mesh_of
from gshard_m4.errors import NotFiniteError as NotFiniteError
from gshard_m4.errors import TrainError as TrainError
from gshard_m4.lock import locked
from gshard_m4.metrics import MetricsLog
from gshard_m4.processes import Alone, Draw
from gshard_m4.progress import Progress
from gshard_m4.saver import Saver
from gshard_m4.step import Batch as Batch
from gshard_m4.step import State as State
from gshard_m4.step import compile_step as compile_step
from gshard_m4.step import held_out_cross_entropy as held_out_cross_entropy
from gshard_m4.step import initial_state as initial_state
from gshard_m4.step import make_evaluation as make_evaluation
from gshard_m4.step import make_step as make_step

_AS_IT_WAS = {field.name: field.default for field in dataclasses.fields(moe.TransformerConfig)}
"""What a model was before it could be anything else: older checkpoints do not name every choice."""


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
        steps: the number of steps taken, those of earlier runs included.
        taken: the number of steps taken in this call; 0 if the run had taken all of them before.
    """

    state: State
    held_out: dict[int, float]
    tokens_per_second: float
    seconds_per_step: float
    compile_seconds: float
    stopped: bool
    steps: int
    taken: int


def train(
    model: moe.TransformerConfig,
    options: TrainConfig,
    run: Run,
    batch: Draw,
    held_out: Iterable[Batch] = (),
    *,
    meta: Mapping[str, Any] | None = None,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    show: Progress | None = None,
    group: Alone | None = None,
    start: Path | None = None,
) -> Result:
    """Trains a model and saves it.

    Args:
        model: the model; it is trained on the devices of ``mesh_of(model)``.
        options: length, learning rate and so on.
        run: where checkpoints and metrics go.
        batch: step -> the batch of that step, always the same; B and L are those of every step. Where several
            processes train, it also takes the number of a process and their count, and gives that one's rows.
        held_out: batches that are measured and not trained on.
        meta: what is saved beside the parameters, such as which vocabularies they belong to.
        resume: go on from the newest sound checkpoint of `run` if there is one.
        stop: asked after every step; once true, the state is saved and the run ends.
        show: where progress is shown; a new one for standard output if None.
        group: the processes that train together; this one alone if None.
        start: checkpoints of another run of the same model, whose parameters the first step begins with; the moments
            of the optimizer and the learning rate start from zero. A resumed run ignores this.

    Raises:
        TrainError: the run's folder has a checkpoint and `resume` is false, or another process trains there; the
            checkpoint was made by another model; a batch does not divide into micro-batches; the processes that train
            together were given different settings.
        NotFiniteError: the loss or the gradient was not finite in more than ``options.skip_limit`` steps.
        CheckpointError: a checkpoint cannot be written or read.
    """
    group = group or Alone()
    with locked(run.lock) if group.first else nullcontext():
        loop = _Loop(model, options, run, batch, list(held_out), dict(meta or {}), group, start)
        return loop.run(resume, stop, show)


class _Loop:
    """One call of `train`."""

    def __init__(
        self,
        model: moe.TransformerConfig,
        options: TrainConfig,
        run: Run,
        batch: Draw,
        held_out: Sequence[Batch],
        meta: Mapping[str, Any],
        group: Alone,
        start: Path | None,
    ):
        self.begin_with = start
        self.model, self.options, self.where, self.batch = model, options, run, batch
        self.described = {"model": dataclasses.asdict(model), "train": dataclasses.asdict(options), **meta}
        self.group = group
        self.compiled: Any = compile_step(
            make_step(model, options), mesh_of(model), memory_limit=options.memory_limit, search=options.search
        )
        self.take = group.runs(self.compiled)
        self.evaluate = group.runs(compile_step(make_evaluation(model), mesh_of(model), donate=False))
        self.held_out = held_out
        self.measured: dict[int, float] = {}

    def run(self, resume: bool, stop: Callable[[], bool], show: Progress | None) -> Result:
        """From the first step to the last."""
        options, run, group = self.options, self.where, self.group
        shown = show or Progress(options.steps, options.log_every, quiet=not group.first)
        shown.note("making the first state ..." if not resume else "reading the newest checkpoint, if there is one ...")
        state = self._start(resume)
        first = done = int(state["step"])
        group.agree(self._settings(first))
        best = self._best_before(first)
        worse = 0
        seconds: list[float] = []
        tokens: list[float] = []
        stopped = False
        saved_at = time.perf_counter()
        events = run.events if options.tensorboard else None
        with (
            MetricsLog(run.metrics, first, events) if group.first else nullcontext() as log,
            Saver(run.checkpoints, options.keep) as saver,
            shown as bar,
        ):
            if self.held_out:
                group.at(first, "evaluation")
                bar.note("compiling the evaluation of held-out text ...")
                self._measure(first, state)
                bar.note(f"held-out cross entropy before: {self.measured[first]:.3f} nats a token")
            for step in range(first, options.steps):
                begin = time.perf_counter()
                group.at(step, "batch")
                taken = self._checked(group.batch(self.batch, step), step)
                group.at(step, "first step" if step == first else "step")
                if step == first:
                    bar.note(f"compiling the training step for {_devices(devices_of(self.model))} ...")
                before = int(state["skipped"])
                state, metrics = self.take(state, taken)
                values = {name: float(value) for name, value in metrics.items()}
                seconds.append(time.perf_counter() - begin)
                tokens.append(values["tokens"])
                record = {"seconds": round(seconds[-1], 4), **values}
                if values["skipped"] > before:
                    self._skipped(taken, values, step, bar)

                done = step + 1
                stopped, save_due = group.any(stop(), self._save_due(done, saved_at))
                last = stopped or done == options.steps
                score = None
                if self.held_out and (last or (options.evaluate_every and done % options.evaluate_every == 0)):
                    group.at(step, "evaluation")
                    score = record["held_out"] = self._measure(done, state)
                    worse = 0 if score < best else worse + 1
                    better = "the best so far" if score < best else f"not better for {worse} evaluations"
                    bar.note(f"held-out cross entropy after {done} steps: {score:.3f} nats a token, {better}")
                if log is not None:
                    log.write(step, record)
                bar.update(done, record)
                improved = score is not None and score < best
                if last or improved or save_due:
                    group.at(step, "checkpoint")
                    saver.save(done, state, self.described, score)
                    saved_at = time.perf_counter()
                best = min(best, math.inf if score is None else score)
                if stopped:
                    break
            group.at(done, "checkpoint")

        timed = seconds[1:] or seconds or [math.nan]
        return Result(
            state=state,
            held_out=self.measured,
            tokens_per_second=sum(tokens[1:] or tokens) / sum(timed),
            seconds_per_step=float(np.median(timed)),
            compile_seconds=seconds[0] if seconds else 0.0,
            stopped=stopped,
            steps=done,
            taken=len(seconds),
        )

    def _save_due(self, done: int, saved_at: float) -> bool:
        """Whether this process would save now: the number of steps decides, or the minutes since the last save."""
        options = self.options
        if options.save_every is None:
            return time.perf_counter() - saved_at >= 60 * options.save_minutes
        return options.save_every > 0 and done % options.save_every == 0

    def _measure(self, done: int, state: State) -> float:
        self.measured[done] = held_out_cross_entropy(self.evaluate, state["params"], self.held_out)
        return self.measured[done]

    def _start(self, resume: bool) -> State:
        """The state to go on from."""
        run, options = self.where, self.options
        saved = checkpoint.steps(run.checkpoints)
        if saved and not resume:
            raise TrainError(
                f"the run has a checkpoint of step {saved[-1]} already.",
                where=str(run.checkpoints),
                hint="Add --resume to go on from it, or name another folder.",
            )
        like = self._lying(jax.eval_shape(lambda: initial_state(self.model, options.seed)))
        if not saved:
            fresh = initial_state(self.model, options.seed, like)
            if self.begin_with is None:
                return fresh
            step, trained, _ = checkpoint.restore(self.begin_with, like=like, tell=_passed_over)
            if self.group.first:
                print(f"begins with the parameters of step {step} in {self.begin_with}")
            return {**fresh, "params": trained["params"]}
        step, state, before = checkpoint.restore(run.checkpoints, None, like, self._same_run, _passed_over)
        was, now = before.get("temperature"), self.described.get("temperature")
        if self.group.first and None not in (was, now) and was != now:
            print(
                f"languages were drawn with a temperature of {was:g} up to step {step}, and are drawn with {now:g} "
                f"from here on; --temperature {was:g} goes on as before"
            )
        return dict(state)

    def _settings(self, first: int) -> dict[str, Any]:
        """What decides the numbers of this run, by name: all that several processes must have in common."""
        named = {
            f"{part}.{name}": value
            for part in ("model", "train")
            for name, value in self.described[part].items()
            if name not in ("log_every", "tensorboard")
        }
        rest = {name: value for name, value in self.described.items() if name not in ("model", "train")}
        return {**rest, **named, "the version of JAX": jax.__version__, "the first step": first}

    def _lying(self, like: State) -> State:
        """Where each array of the state lies, so that a device makes or reads its own part only.

        A state that lies elsewhere would come back from the first step otherwise than it was given, where a dimension
        does not divide among the devices, and the second step would be compiled again.
        """
        if devices_of(self.model) == 1:
            return like
        leaves, tree = jax.tree.flatten(like)
        batch = self.group.batch(self.batch, 0)  # a process then draws only its own rows of it
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
        expected = self.compiled.lower(like, shapes).argument_shardings
        lying = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, expected)]
        return dict(jax.tree.unflatten(tree, lying))

    def _same_run(self, saved: Mapping[str, Any]) -> None:
        """Refuses to go on with another model or other text, naming the first setting that differs."""
        changeable = {*PLACE, "dispatch", "remat"}  # how the model runs, not what it is
        for name, what in (("vocabularies", "vocabularies"), ("only", "languages")):
            if saved.get(name) != self.described.get(name):
                raise TrainError(
                    f"the checkpoint was made with other {what}.",
                    where=str(self.where.checkpoints),
                    got=f"{saved.get(name)} there, {self.described.get(name)} here",
                    hint="Use the corpus and the languages of the first run, or name another folder.",
                )
        ours = json.loads(json.dumps(self.described["model"]))
        theirs = {name: value for name, value in _AS_IT_WAS.items() if name in ours} | saved.get("model", {})
        for of in (theirs, ours):  # what the groups come to: those of older runs had no number of their own
            if of.get("experts") and of.get("group_size") is None:
                of["groups"] = of.get("groups") or of.get("partitions", 1) * of.get("replicas", 1)
        for name in sorted((theirs.keys() | ours.keys()) - changeable - {"groups"}):
            if theirs.get(name) != ours.get(name):
                raise TrainError(
                    f"the checkpoint was made by another model: {name} is {theirs.get(name)!r} there and "
                    f"{ours.get(name)!r} here.",
                    where=str(self.where.checkpoints),
                    hint="Use the settings of the first run, or name another folder.",
                )
        if theirs.get("groups") != ours.get("groups"):
            raise TrainError(
                f"the run routes its tokens in {theirs.get('groups')} groups, and here there would be "
                f"{ours.get('groups')}: other tokens would find an expert full.",
                where=str(self.where.checkpoints),
                hint=f"Add --groups {theirs.get('groups')}, or name another folder.",
            )

    def _best_before(self, first: int) -> float:
        """The best score of the steps that are kept."""
        step = checkpoint.best(self.where.checkpoints) if first else None
        if step is None:
            return math.inf
        return checkpoint.score(self.where.checkpoints, step)

    def _checked(self, batch: Batch, step: int) -> Batch:
        rows = len(batch["target"])
        if rows % self.options.accumulate:
            raise TrainError(
                f"the {rows} rows of batch {step} cannot be dealt out to {self.options.accumulate} micro-batches.",
                hint="Choose a number for --accumulate that divides the rows of every batch.",
            )
        return batch

    def _skipped(self, batch: Batch, values: Mapping[str, float], step: int, bar: Progress) -> None:
        """Tells of a step whose numbers were not finite, keeps its batch, and ends the run if there were too many."""
        path = self.where.skipped / f"{step:08d}.npz"
        if self.group.first:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, source=batch["source"], target=batch["target"])
        name = next((n for n in ("loss", "gradient_norm") if not math.isfinite(values[n])), "loss")
        what = f"the {name.replace('_', ' ')} is {values[name]} at step {step}."
        count = int(values["skipped"])
        if count <= self.options.skip_limit:
            bar.note(f"{what} Step skipped ({count} of at most {self.options.skip_limit}); its batch is kept in {path}")
            return
        saved = checkpoint.steps(self.where.checkpoints)
        raise NotFiniteError(
            f"{what} That makes {count} steps that were not finite.",
            where=str(path),
            got=", ".join(f"{key} {value:.4g}" for key, value in values.items()),
            hint=(f"Look at that batch; resume from step {saved[-1]} with " if saved else "Start again with ")
            + "a smaller learning_rate, or a longer warm-up.",
        )


def _passed_over(damaged: checkpoint.CheckpointError) -> None:
    print(f"passed over: {damaged}")


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"
