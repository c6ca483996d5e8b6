"""Claim: named models of the paper and of model cards fit machines that need not exist; what a step takes there.

    python benchmarks/paper_models.py [MODEL MACHINE [--no-remat] [--memory-limit 12GiB] [--search] [--compile]]

Plans the training step of a model: loss, gradients and a plain update of donated parameters. The paper's models have
the marks of its section 3.2, the batch of its Table 3 and sentences of 128 tokens (our assumption), and recompute pairs
of layers from 28 layers on. Decoders have a layout, and a batch of a million tokens in texts of 4,096. ``--search``
searches for the plan and the mesh, without marks. ``--compile`` compiles the step with libtpu (``pip install libtpu``;
no TPU is needed) and prints the compiler's own figures for memory and cycles; with ``--search`` and
``--memory-limit``, gshard searches again with less memory if the compiler needs more than the limit, at most twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import numpy as np
from tpu_schedules import estimated_cycles

from gshard.api.jit import jit
from gshard.api.lowered import Lowered
from gshard.api.marks import name
from gshard.api.search import search
from gshard.core.layout import Layout
from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.core.program import format_bytes
from gshard.core.spmd import Recomputed
from gshard.device.cost import Cost, KernelCost
from gshard.device.cost import cost as cost_of
from gshard.device.fusion_model import PRODUCT
from gshard.device.machine import Machine
from gshard.explanation.search_result import SearchResult
from gshard.moe.config import MODELS, TransformerConfig
from gshard.moe.param import Param, shapes
from gshard.moe.transformer import loss, param_specs
from gshard.remat.rematerialise import MemoryLimitError, bytes_of, peak_of
from gshard.search.find import meshes
from gshard.xla.described import described_mesh

# Compiles a program ahead of time with libtpu for a TPU that need not exist, and reads what the compiler tells.

CYCLES_A_SECOND = {"v3": 940e6}


def compiled_by_libtpu(lowered: Lowered, machine: Machine) -> dict[str, str]:
    """What libtpu's compiler says of the program, which may be that it does not fit."""
    try:
        made = lowered.executable.compiled
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"does not fit": str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]}
    cycles = estimated_cycles(made.as_text())
    found = {
        "peak memory": f"{peak_of(made) / 2**30:.2f} GiB",
        "estimated cycles": f"{cycles:,}",
    }
    if machine.kind in CYCLES_A_SECOND and cycles:
        found["estimated step"] = f"{1e3 * cycles / CYCLES_A_SECOND[machine.kind]:.1f} ms"
    return found


# Table 3: "Batch sz. (Tokens)", per side of the translation, by number of experts. The paper does not say how long
# sentences are; ``LENGTH`` tokens is an assumption that only attention notices.
BATCH_TOKENS = {128: 1 << 20, 512: 1 << 20, 2048: 4 << 20, 0: 4 << 20}
LENGTH = 128
# A decoder's batch, ours: a million tokens in texts of 4,096, or more if devices would have none.
DECODER_TOKENS, DECODER_LENGTH = 1 << 20, 4096
# Experts over one axis, tokens over both; a weight is split over all devices, an expert's over those that hold it.
DECODER_AXES = ("data", "experts")
DECODER_LAYOUT = Layout(groups=DECODER_AXES, experts="experts", weights=DECODER_AXES, expert_weights="data",
    tokens=None, model=None, gates=None)  # fmt: skip

_ATTEMPTS = 3  # searches, where the compiler needs more memory than was modelled

# Figure 8's classes by the function that a kernel comes from; collectives have their own.
_CLASSES = {
    r"(attention|rotary)\.py": "attention",
    r"\(_run_experts|ragged\.py:\d+ \(answered": "MoE feed-forward",
    r"feed_forward\.py:\d+ \(feed_forward": "feed-forward",
    r"(gating|dispatch|experts|ragged|sorted_rows)\.py": "gating, dispatch tables",
    r"transformer\.py": "embedding, softmax, loss",
    r"\(update\)": "update",
}


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """One model on one machine."""

    name: str  # of the model
    config: TransformerConfig  # the model
    parameters: int  # number of weights
    batch: tuple[int, int]  # sentences of a step and their length
    cost: Cost  # time, bytes and memory of a step
    replicated: int  # replicated, distributed: bytes of a device's weights that all hold, and that are split
    distributed: int
    collectives: dict[str, tuple[int, int]]  # for each kind how often and how many bytes a device sends
    recomputed: Recomputed | None = None  # what a limit of memory made the step recompute
    found: SearchResult | None = None  # the plan, if it was searched
    compiled: dict[str, str] = dataclasses.field(default_factory=dict)  # what libtpu makes of it, by name, if asked for

    @property
    def activations(self) -> int:
        """Bytes of everything that is no weight, at the peak."""
        return self.cost.peak - self.replicated - self.distributed

    @property
    def roofline_seconds(self) -> float:
        """What the products alone take at the machine's peak rate: the roofline of figure 8."""
        products = sum(k.flops * k.times for k in self.cost.kernels if k.kind == PRODUCT)
        return products / self.cost.machine.peak("bf16")

    @property
    def seconds_by_class(self) -> dict[str, float]:
        """Seconds of a step by the classes of figure 8."""
        found: dict[str, float] = {}
        for k in self.cost.kernels:
            name = _class_of(k)
            found[name] = found.get(name, 0.0) + k.total_seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        gib = 2**30
        found = self.cost
        verdict = "fits" if found.fits else "does not fit"
        lines = [
            f"{self.name}: {self.parameters / 1e9:.4g}B parameters, batch {self.batch[0]:,} x {self.batch[1]}"
            f"{' a side' if self.config.encoder_layers else ''}, "
            f"{self.config.dtype} activations, {'with' if self.config.remat else 'without'} recomputed layers",
            f"on {found.machine}",
            "",
            f"memory of a device   {found.peak / gib:.2f} GiB of {found.machine.memory / gib:.0f}: {verdict}",
            f"  replicated weights {self.replicated / gib:8.2f} GiB",
            f"  distributed weights{self.distributed / gib:8.2f} GiB",
            f"  activations        {self.activations / gib:8.2f} GiB (and gradients, batch)",
            "",
            f"step                 {found.seconds * 1e3:.1f} ms (roofline, nothing overlaps), "
            f"{found.flops / 1e12:.2f} TFLOP a device",
            f"  products, peak rate {1e3 * self.roofline_seconds:.1f} ms: "
            f"{100 * self.roofline_seconds / found.seconds:.0f} % of the step",
        ]
        lines += [
            f"  {name:<26} {s * 1e3:8.1f} ms {100 * s / found.seconds:5.1f} %"
            for name, s in self.seconds_by_class.items()
        ]
        lines += ["", "collectives of a step, bytes that each device sends"]
        lines += [f"  {kind:<20} x{n:<5} {size / gib:8.3f} GiB" for kind, (n, size) in self.collectives.items()]
        if self.recomputed is not None:
            lines += ["", str(self.recomputed)]
        if self.found is not None:
            lines += ["", "searched, without a mark", *(f"  {line}" for line in str(self.found).splitlines())]
        if self.compiled:
            lines += ["", "compiled by libtpu"]
            lines += [f"  {name:<20} {value}" for name, value in self.compiled.items()]
        return "\n".join(lines)


def _class_of(k: KernelCost) -> str:
    if k.name == "all_to_all":
        return "MoE dispatch and combine"
    if k.kind == "collective":
        return "AllReduce of gradients" if k.name == "all_reduce" else k.name
    return next((name for pattern, name in _CLASSES.items() if re.search(pattern, k.line)), "other")


def training_step(
    config: TransformerConfig, marked: Callable[[Any], Any] = lambda gradients: gradients
) -> Callable[..., Any]:
    """Loss, gradients and the update of float32 parameters; ``marked`` may put marks on the gradients."""

    def update(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    def step(params: Any, batch: Any, number: Any) -> tuple[Any, Any]:
        key = jax.random.fold_in(jax.random.key(0), number)
        (value, _), grads = jax.value_and_grad(lambda p: loss(config, p, batch, key=key), has_aux=True)(params)
        return update(params, marked(grads)), value

    return step


def arguments(config: TransformerConfig, sentences: int, length: int) -> tuple[Any, ...]:
    """Shapes of parameters, batch and step number."""
    sides = ("source", "target") if config.encoder_layers else ("target",)
    batch = {name: jax.ShapeDtypeStruct((sentences, length), jnp.int32) for name in sides}
    return shapes(param_specs(config)), batch, jax.ShapeDtypeStruct((), jnp.int32)


def configured(name: str, topology: str, remat: bool | str | None = None) -> tuple[TransformerConfig, Machine]:
    """A named model for all devices of a machine."""
    config = MODELS[name]
    machine = Machine.of(topology, None if ":" in topology else config.experts or 2048)
    deep = config.encoder_layers + config.decoder_layers >= 28
    # Marks ask for as many partitions as there are devices; a decoder has a layout.
    partitions = machine.size if config.encoder_layers else 1
    # Table 1's model of a trillion weights keeps them in float32 and computes in bfloat16.
    return dataclasses.replace(config, partitions=partitions, remat=deep if remat is None else remat), machine


def mesh_for(config: TransformerConfig, machine: Machine, compiled: bool = False) -> Mesh:
    """The devices of a machine as a model has them: in one axis, or for a decoder in ``data`` and ``experts``."""
    if config.encoder_layers:
        return described_mesh(machine) if compiled else Mesh.abstract(devices=machine.size)
    experts = math.gcd(config.experts or 1, machine.size)
    if not compiled:
        return Mesh.abstract(data=machine.size // experts, experts=experts)
    devices = described_mesh(machine).devices
    assert devices is not None, "a topology has devices"
    return Mesh.of(jax.sharding.Mesh(np.reshape(devices, (-1, experts)), DECODER_AXES))


def _named(step: Callable[..., Any], config: TransformerConfig) -> Callable[..., Any]:
    """The step with the names of ``DECODER_LAYOUT`` at its arguments."""

    def called(spec: Param) -> str:
        weights = "expert_weights" if "experts" in spec.dims else "weights"
        return " ".join(weights if dim == "model" else dim for dim in spec.dims)

    names = jax.tree.map(called, param_specs(config))
    return lambda params, batch, *rest: step(name(params, names), name(batch, {"target": "groups _"}), *rest)


def lower(
    config: TransformerConfig,
    mesh: Mesh,
    tokens_of_device: int | None = None,
    memory_limit: int | str | None = None,
    machine: Machine | None = None,
    found: SearchResult | None = None,
    marked: Callable[[Any], Any] = lambda gradients: gradients,
) -> tuple[Lowered, tuple[int, int]]:
    """The training step for a mesh of ``mesh_for``, and its batch: the usual one, or so many tokens a side a device.

    With a memory limit, ``machine`` tells what recomputing takes. ``found`` is the plan, if it was searched. ``marked``
    may put marks on the gradients.
    """
    batch = _batch(config, mesh.size, tokens_of_device)
    step = training_step(config, marked)
    options: dict[str, Any] = {} if found is None else {"plan": found.plan}
    if found is None and not config.encoder_layers:
        step, options = _named(step, config), {"layout": DECODER_LAYOUT}
    made = jit(step, mesh=mesh, donate_argnums=0, memory_limit=memory_limit, **options)
    lowered = made.lower(*arguments(config, *batch))
    target = dataclasses.replace(lowered.target, machine=machine)
    return dataclasses.replace(lowered, target=target), batch


def searched(
    config: TransformerConfig,
    mesh: Mesh,
    machine: Machine,
    tokens_of_device: int | None = None,
    memory_limit: int | str | None = None,
) -> tuple[TransformerConfig, SearchResult]:
    """The model without its marks or layout, and the plan that search finds, on these devices in one or two axes."""
    sentences, length = batch = _batch(config, mesh.size, tokens_of_device)
    group = config.tokens_of_a_group(sentences * length) if config.experts else None
    bare = dataclasses.replace(config, group_size=group, partitions=1)
    found = search(
        jax.jit(training_step(bare), donate_argnums=0),
        *arguments(bare, *batch),
        mesh=list(meshes(mesh.size, mesh.devices)),
        machine=machine,
        memory_limit=memory_limit,
        budget_seconds=math.inf,  # every computer finds the same
    )
    return bare, found


def lowered_as_searched(
    config: TransformerConfig,
    mesh: Mesh,
    machine: Machine,
    tokens_of_device: int | None,
    memory_limit: int | str | None,
    compiled: bool,
    tell: Callable[[str], None],
) -> tuple[TransformerConfig, Lowered, tuple[int, int], SearchResult]:
    """The searched step; if the compiler needs more than the limit, the search runs again with less."""
    room = None if memory_limit is None else bytes_of(memory_limit)
    attempts = _ATTEMPTS if compiled and room is not None else 1
    while True:
        bare, found = searched(config, mesh, machine, tokens_of_device, room)
        limit = int(found.best.limit) if memory_limit is None else bytes_of(memory_limit)
        lowered, batch = lower(bare, found.mesh, tokens_of_device, limit, machine, found)
        attempts -= 1
        try:
            if attempts:
                lowered.executable  # noqa: B018  what does not fit fails here
            return bare, lowered, batch, found
        except MemoryLimitError as error:
            if not error.needed:
                raise
            room = found.cost.peak * limit // error.needed
            needed, less = format_bytes(error.needed), format_bytes(room)
            tell(f"the compiler needs {needed}, more than {format_bytes(limit)}: searching again, for {less}")


def _batch(config: TransformerConfig, devices: int, tokens_of_device: int | None) -> tuple[int, int]:
    if config.encoder_layers:
        usual, length = BATCH_TOKENS[config.experts], LENGTH
    else:
        usual, length = max(DECODER_TOKENS, devices * DECODER_LENGTH), DECODER_LENGTH
    return (tokens_of_device * devices if tokens_of_device else usual) // length, length


def plan(
    name: str,
    topology: str,
    *,
    remat: bool | None = None,
    tokens_of_device: int | None = None,
    memory_limit: int | str | None = None,
    search_plan: bool = False,
    compiled: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> PlannedModel:
    """Plans a named model for a machine."""
    config, machine = configured(name, topology, remat)
    mesh = mesh_for(config, machine, compiled)
    found = None
    if search_plan:
        config, lowered, batch, found = lowered_as_searched(
            config, mesh, machine, tokens_of_device, memory_limit, compiled, tell
        )
    else:
        lowered, batch = lower(config, mesh, tokens_of_device, memory_limit, machine)
    plan = lowered.plan
    weights = [
        (v.bytes, local_bytes(v, plan.shardings[v], plan.mesh))
        for v in plan.program.block.inputs
        if v.shape and str(v.dtype).startswith("float")
    ]
    collectives: dict[str, tuple[int, int]] = {}
    for c in lowered.spmd.collectives:
        n, size = collectives.get(c.kind, (0, 0))
        collectives[c.kind] = (n + c.times, size + c.total_bytes)
    costs = cost_of(lowered.spmd, machine, lowered.donated)
    return PlannedModel(
        name,
        config,
        sum(whole for whole, _ in weights) // 4,
        batch,
        costs,
        sum(local for whole, local in weights if local == whole),
        sum(local for whole, local in weights if local < whole),
        dict(sorted(collectives.items(), key=lambda pair: -pair[1][1])),
        lowered.spmd.recomputed,
        found,
        compiled_by_libtpu(lowered, machine) if compiled else {},
    )


def main() -> None:
    """Prints one planned model; without arguments the paper's largest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="MoE(2048E, 36L)")
    parser.add_argument("machine", nargs="?", default="v3:32x32")
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--memory-limit")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    found = plan(
        options.model,
        options.machine,
        remat=options.remat,
        memory_limit=options.memory_limit,
        search_plan=options.search,
        compiled=options.compile,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(found)


if __name__ == "__main__":
    main()
