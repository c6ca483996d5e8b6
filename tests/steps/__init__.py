"""Training steps in the structures of today's training code, small for tests and at true size for benchmarks.

``STEPS`` holds all by name. Each is a step of Adam with gradient clipping on a ``Model`` (``model.py``), with the
shardings that its weights, state and batch have; what differs is the mesh, what is split over it, how layers are
stacked, dtypes, recomputation, and how gradients are accumulated.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from steps.model import Layout, Model, is_dims, loss

# What dimensions are split over: the weights of fully sharded data parallelism, and what the others add to it.
FSDP = {"batch": "fsdp", "embed": "fsdp", "values": "fsdp"}
TENSOR = {**FSDP, "heads": "tensor", "groups": "tensor", "mlp": "tensor", "vocab": "tensor"}
CONTEXT = {**FSDP, "length": "context"}
EXPERT = {**FSDP, "batch": ("expert", "fsdp"), "expert": "expert"}
STAGE = {**FSDP, "stage": "stage"}
DATA = {"batch": "data"}
RATE, DECAYS, CLIP = 1e-3, (0.9, 0.95), 1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        name: of the step.
        model: what is trained.
        axes: names and sizes of the mesh axes.
        rules: which of them the dimensions are split over.
        batch: sentences or images of a step, and the length of one.
        parts: of the batch, whose gradients are added up in a loop, or which go through a pipeline.
        split_state: what dimensions of the optimizer's state are split over, where that is another.
    """

    name: str
    model: Model
    axes: Mapping[str, int]
    rules: Mapping[str, Any]
    batch: tuple[int, int] = (16, 32)
    parts: int = 1
    split_state: Mapping[str, Any] | None = None

    def mesh(self, devices=None):
        """The mesh over these devices, or the first that there are."""
        count = math.prod(self.axes.values())
        devices = np.asarray(jax.devices()[:count] if devices is None else devices).reshape(tuple(self.axes.values()))
        return jax.sharding.Mesh(devices, tuple(self.axes), axis_types=(jax.sharding.AxisType.Auto,) * len(self.axes))

    def layout(self, devices=None):
        """Its rules, on a mesh."""
        return Layout(self.mesh(devices), self.rules)

    def arguments(self, devices=None):
        """Shapes of the state and of a batch, with their shardings."""
        layout = self.layout(devices)
        state = dataclasses.replace(layout, rules=self.split_state or self.rules)

        def shapes(own, dtype):
            return jax.tree.map(
                lambda dims: jax.ShapeDtypeStruct(tuple(dims.values()), dtype, sharding=own.sharding(list(dims))),
                self.model.dims,
                is_leaf=is_dims,
            )

        examples, length = self.batch
        shape = (examples, length, self.model.patch) if self.model.patch else (examples, length)
        inputs = jax.ShapeDtypeStruct(
            shape,
            "float32" if self.model.patch else "int32",
            sharding=layout.sharding(("batch", "length", "")[: len(shape)]),
        )
        labels = (examples, 1) if self.model.patch else (examples, length)
        labelled = jax.ShapeDtypeStruct(labels, "int32", sharding=layout.sharding(("batch",)))
        count = jax.ShapeDtypeStruct((), "int32", sharding=jax.sharding.NamedSharding(layout.mesh, P()))
        moments = [shapes(state, "float32") for _ in DECAYS]
        return (shapes(layout, self.model.weights), *moments, count), {"inputs": inputs, "labels": labelled}

    def numbers(self, devices=None):
        """Arguments with numbers, the same at every call, where they belong."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def made(x, scale):
            if x.dtype == np.int32:
                found = rng.integers(0, self.model.words, x.shape) if x.shape else np.zeros(())
            else:
                found = scale * rng.standard_normal(x.shape)
            return jax.device_put(jnp.asarray(found, x.dtype), x.sharding)

        (weights, *moments, count), batch = self.arguments(devices)
        scaled = jax.tree.map(lambda x: made(x, 0.1), weights)
        zeros = jax.tree.map(lambda x: made(x, 0.0), moments)
        return (scaled, *zeros, made(count, 0)), jax.tree.map(lambda x: made(x, 1.0), batch)

    def function(self, devices=None):
        """The step, a function of the state and a batch; it gives the next state and the loss."""
        layout, pipeline = self.layout(devices), bool(self.model.stages)

        def value_and_gradients(weights, batch):
            parts = self.parts if pipeline else 1
            return jax.value_and_grad(lambda w: loss(self.model, layout, w, batch, parts))(weights)

        def accumulated(weights, batch):
            split = jax.tree.map(lambda x: x.reshape(-1, self.parts, *x.shape[1:]).swapaxes(0, 1), batch)

            def one(total, part):
                return jax.tree.map(lambda t, x: t + x, total, value_and_gradients(weights, part)), None

            zeros = jnp.zeros(()), jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), weights)
            total, _ = jax.lax.scan(one, zeros, split)
            return jax.tree.map(lambda x: x / self.parts, total)

        def step(state, batch):
            weights, first, second, count = state
            of = accumulated if self.parts > 1 and not pipeline else value_and_gradients
            value, gradients = of(weights, batch)
            gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            length = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
            gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (length + 1e-6)), gradients)
            count = count + 1
            first = jax.tree.map(lambda m, g: DECAYS[0] * m + (1 - DECAYS[0]) * g, first, gradients)
            second = jax.tree.map(lambda m, g: DECAYS[1] * m + (1 - DECAYS[1]) * g * g, second, gradients)
            a, b = (1 - d ** count.astype(jnp.float32) for d in DECAYS)

            def moved(w, m, v):
                return (w.astype(jnp.float32) - RATE * (m / a) / (jnp.sqrt(v / b) + 1e-8)).astype(w.dtype)

            return (jax.tree.map(moved, weights, first, second), first, second, count), value

        return step

    def results(self, devices=None):
        """The shardings of the results: the next state lies as the state does."""
        state, _ = self.arguments(devices)
        return jax.tree.map(lambda x: x.sharding, state), None


def _small():
    one, grid = {"fsdp": 8}, {"fsdp": 4, "tensor": 2}
    two = Model(weights="bfloat16", numbers="bfloat16")
    # As in MaxText: twelve axes, nearly all of size 1.
    names = "data stage fsdp fsdp_transpose sequence context tensor tensor_transpose expert autoregressive"
    twelve = {**dict.fromkeys((*names.split(), "pod", "slice"), 1), "fsdp": 4, "tensor": 2}
    many = {**TENSOR, "batch": ("data", "fsdp", "fsdp_transpose"), "embed": ("fsdp", "sequence", "context"),
            "heads": ("tensor", "tensor_transpose", "autoregressive"), "stage": "stage", "layer": None}  # fmt: skip
    split = {"embed": "data"}
    found = (
        Step("scanned", Model(), one, FSDP),
        Step("scanned along 1", Model(stacked=1), one, FSDP),
        Step("scanned, mixed", Model(numbers="bfloat16"), one, FSDP),
        Step("scanned along 1, bfloat16", dataclasses.replace(two, stacked=1), one, FSDP),
        Step("scanned, 12 layers", Model(layers=12), one, FSDP),
        Step("scanned, tensor", Model(stacked=1), grid, TENSOR),
        Step("scanned, twelve axes", Model(stacked=1), twelve, many),
        Step("scanned, nothing recomputed", Model(remat=""), one, FSDP),
        Step("scanned, products kept", Model(remat="products"), grid, TENSOR),
        Step("scanned, names kept", Model(remat="names"), grid, TENSOR),
        Step("written out", Model(stacked=None), one, FSDP),
        Step("written out, tensor", Model(stacked=None, remat=""), grid, TENSOR),
        Step("accumulated", Model(numbers="bfloat16"), one, FSDP, (32, 32), parts=4),
        Step("data", Model(), {"data": 8}, DATA),
        Step("state split", Model(), {"data": 8}, DATA, split_state=split),
        Step("context", Model(), {"fsdp": 2, "context": 4}, CONTEXT),
        Step("experts", Model(experts=8), {"expert": 4, "fsdp": 2}, EXPERT),
        Step("experts along 1", Model(experts=8, stacked=1), {"fsdp": 8}, FSDP),
        Step("pipeline", Model(layers=4, stages=2), {"stage": 2, "fsdp": 4}, STAGE, (16, 32), parts=4),
        Step("tied, capped, windows", Model(tied=True, softcap=30.0, window=8, groups=4), grid, TENSOR),
        Step("images", Model(patch=48, words=64), one, FSDP),
    )
    return {step.name: step for step in found}


def _true():
    one, grid = {"fsdp": 64}, {"fsdp": 8, "tensor": 8}
    llama = Model(32, 4096, 32, 8, 14336, 128256, numbers="bfloat16")
    large = dataclasses.replace(llama, layers=80, model=8192, heads=64, hidden=28672)
    mixture = dataclasses.replace(llama, words=32000, experts=8)
    gemma = dataclasses.replace(llama, layers=42, model=3584, heads=16, hidden=14336, words=256000, tied=True,
                                softcap=30.0, window=4096)  # fmt: skip
    images = Model(24, 1024, 16, 16, 4096, 1000, numbers="bfloat16", patch=768)
    wide = {name: dataclasses.replace(m, stacked=1, weights="bfloat16") for name, m in (("8B", llama), ("70B", large))}
    found = (
        Step("8B", llama, one, FSDP, (64, 4096)),
        Step("8B, bfloat16, along 1", wide["8B"], one, FSDP, (64, 4096)),
        Step("8B, tensor", llama, grid, TENSOR, (64, 4096)),
        Step("8B, accumulated", llama, one, FSDP, (256, 4096), parts=4),
        Step("70B", large, one, FSDP, (64, 4096)),
        Step("70B, bfloat16, along 1", wide["70B"], one, FSDP, (64, 4096)),
        Step("8x7B, experts", mixture, {"expert": 8, "fsdp": 8}, EXPERT, (64, 4096)),
        Step("9B, tied, capped, windows", gemma, grid, TENSOR, (64, 4096)),
        Step("ViT-L", images, one, FSDP, (4096, 196)),
    )
    return {step.name: step for step in found}


STEPS = _small()
TRUE_SIZES = _true()
