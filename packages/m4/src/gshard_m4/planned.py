"""Planned: a model and its training step in words, before anything is trained.

``gshard explain gshard_m4.planned:newest_step --mesh 8 --html step.html`` makes a page of the step of the newest run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import gshard
from gshard import moe
from gshard_m4 import checkpoint, runs
from gshard_m4.config import TrainConfig, devices_of, mesh_of, on_devices
from gshard_m4.disk import mib
from gshard_m4.step import compile_step, initial_state, make_step
from gshard_m4.text import PreparedText

_PARTS = 8


def newest_step() -> tuple[Callable[..., Any], Any, Any]:
    """The training step of the newest run, with the shapes of its state and a batch: what ``gshard explain`` takes.

    Its marks ask for 8 parts where it was trained on fewer devices, which computes the same numbers.

    Raises:
        CheckpointError: there is no run in the folder ``runs``.
        CorpusError: its corpus is gone.
    """
    run = runs.chosen(None)
    meta = checkpoint.described(run.checkpoints, checkpoint.steps(run.checkpoints)[-1])
    model, options = moe.TransformerConfig(**meta["model"]), TrainConfig(**meta["train"])
    model = on_devices(model, max(devices_of(model), _PARTS))
    text = PreparedText.load(runs.corpus_of(run))
    state = jax.eval_shape(lambda: initial_state(model, options.seed))
    batch = {name: jax.ShapeDtypeStruct(ids.shape, ids.dtype) for name, ids in text.batch(0).items()}
    return make_step(model, options), state, batch


def describe_model(model: moe.TransformerConfig) -> str:
    """One line: layers, experts, sizes, number of weights."""
    weights = moe.parameter_count(moe.param_specs(model))
    devices = devices_of(model)
    copies = f", {model.replicas} replicas of the experts" if model.replicas > 1 else ""
    kind = f"{model.experts} experts in every other layer" if model.experts else "no experts"
    return (
        f"model: {model.encoder_layers} + {model.decoder_layers} layers of {model.model_dim}, {kind}, hidden layers of "
        f"{model.hidden_dim}; {weights / 1e6:.1f} million weights; on {devices} "
        f"device{'' if devices == 1 else 's'}{copies}"
    )


def plan_summary(model: moe.TransformerConfig, options: TrainConfig, batch: Mapping[str, np.ndarray]) -> str:
    """How the training step is partitioned: what is split, what the devices send, what each one holds."""
    state = jax.eval_shape(lambda: initial_state(model, options.seed))
    axes = mesh_of(model)
    mesh = gshard.Mesh.abstract(**(axes if isinstance(axes, dict) else {"devices": axes}))  # without any devices
    step = compile_step(make_step(model, options), mesh, memory_limit=options.memory_limit, search=options.search)
    found = gshard.explain(step, state, dict(batch))
    split = [row for row in found.tensors if row.is_argument and row.why]
    weights = [row for row in split if "params" in row.name]
    whole, local = found.argument_bytes
    by = f"by {'a search that keeps ' if options.search else ''}the marks of its {model.moe_layers} MoE layers"
    lines = [
        f"\nthe training step, written for one device, on {devices_of(model)} devices "
        f"({found.source.size}, partitioned {by}):",
        f"  each device holds {mib(local)} of the {mib(whole or 0)} of state and batch; split over the devices are:",
    ]
    lines += [f"    {row.name:<60} {row.sharding}" for row in weights]
    lines.append(f"    and {len(split) - len(weights)} more: the batch, and the optimizer's state of these weights")
    lines.append(f"  at the peak of a step each device holds {mib(found.cost().peak)}, as modelled")
    if found.spmd.recomputed is not None:
        lines.append(f"  {str(found.spmd.recomputed).splitlines()[0]}")
    lines.append(f"  in one step each device sends {mib(found.total_bytes)}:")
    for kind, sent in sorted(found.bytes_by_kind.items(), key=lambda pair: -pair[1]):
        times = sum(row.times for row in found.collectives if row.kind == kind)
        lines.append(f"    {kind:<18} {times:>4} times  {mib(sent):>10}")
    lines.append("  the all-to-alls carry tokens to their experts and back:")
    lines += [f"    {row.times} times {row.shape}  {row.line}" for row in found.collectives if row.kind == "all_to_all"]
    return "\n".join(lines)
