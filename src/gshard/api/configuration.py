"""Configuration: one configuration of a training step, with the plan that was found for it, and what runs it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from gshard.api.built_step import BuiltStep, built_by
from gshard.api.jit import Jitted, jit
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import put_all, user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.number_text import format_seconds
from gshard.core.plan import Plan, local_bytes
from gshard.core.program import format_bytes
from gshard.device.cost import Cost
from gshard.device.machine import Machine
from gshard.explanation.search_result import SearchResult
from gshard.planning.saved_plan import SavedPlan
from gshard.search.builder_choices import text_of
from gshard.search.pipeline import PricedPlan
from gshard.tracing.by_jax import name_of

_FORMAT = 1
_FIELDS = tuple("format keywords fixed machine axes memory_limit global_batch own host plan".split())


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configuration:
    """A configuration of a training step: keywords of the builder, a mesh, a plan, and where the state is.

    Attributes:
        built: the step, as the builder returned it, and its arguments.
        mesh: the mesh of the plan.
        plan: the plan.
        machine: as ``gshard.jit`` takes it.
        memory_limit: bytes that a device may hold, if values are recomputed to keep to it; None if nothing is.
        global_batch: examples of a step; None if unknown.
        found: the search that found the plan; None for a configuration that was loaded.
    """

    built: BuiltStep
    mesh: Mesh
    plan: Plan | SavedPlan
    machine: str | Machine | None
    memory_limit: int | None = None
    global_batch: int | None = None
    found: SearchResult | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the builder."""
        return dict(self.built.keywords)

    @property
    def step(self) -> Callable[..., Any]:
        """The function that ``jit`` partitions: the builder's step; with a state on the host, one that fetches it."""
        return self.built.step

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments, as the builder returned them; those on the host have this memory in their shardings."""
        return self.built.arguments

    @property
    def recomputes(self) -> bool:
        """Whether gshard recomputes values so that the step fits, besides what the builder's step recomputes."""
        return self.memory_limit is not None

    @property
    def cost(self) -> Cost:
        """The modelled cost of a step on each device.

        Raises:
            ArgumentError: the configuration was loaded.
        """
        return self.search_result.cost

    @property
    def chosen(self) -> PricedPlan:
        """The plan with its cost, as the search has it."""
        return self.search_result.best.chosen

    @property
    def seconds(self) -> float:
        """Modelled seconds of a step."""
        return self.cost.seconds

    @property
    def examples_per_second(self) -> float | None:
        """Examples of all devices in a second; None if the global batch is unknown."""
        return None if self.global_batch is None or not self.seconds else self.global_batch / self.seconds

    @functools.cached_property
    def bytes_on_host(self) -> int:
        """Bytes that each device keeps in the memory of the host."""
        plan = self.search_result.plan
        program, first = plan.program, len(plan.program.captured)
        inputs = (program.block.inputs[first + i] for i, _ in self.built.host)
        return sum(local_bytes(v, plan.shardings[v], plan.mesh) for v in inputs)

    def jit(self, mesh: MeshLike = None) -> Jitted[..., Any]:
        """The partitioned step, as ``gshard.jit`` returns it.

        Args:
            mesh: devices with the axes of the plan's mesh: a JAX mesh, or ``{"data": 8}``. By default the first devices
                that JAX has, if there are enough; otherwise it can be lowered, but not run.

        Raises:
            ArgumentError: a framework jits the step.
            MeshError: the mesh has other axes.

        The state of a configuration with ``built.host`` has to be in the memory of the host: see ``place``.
        """
        if self.found is not None:
            self.found.refuse_framework()
        made = self.step if isinstance(self.step, Jitted) else jit(self.step, **self.built.own)
        return made.running(self.plan, self.mesh if mesh is None else mesh, self.machine, self.memory_limit)

    def place(self, *args: Any, mesh: MeshLike = None) -> tuple[Any, ...]:
        """Moves arguments to where the plan has them: shards to their devices, and a state on the host to its memory.

        Args:
            args: arrays in the structure of ``arguments``.
            mesh: as for ``jit``.

        Returns:
            the arguments. What is in place already is not copied.

        Raises:
            ArgumentError: they have another structure, or the mesh has no devices.
        """
        jitted = self.jit(mesh)
        if Mesh.of(jitted.options.mesh).devices is None:
            raise ArgumentError(
                "there are no devices to place arguments on.",
                user_line(),
                f"mesh: {self.mesh}",
                f"Give a mesh of {self.mesh.size} devices: mesh={dict(self.mesh.axes)}.",
            )
        lowered = jitted.lower(*self.arguments)
        (leaves, tree), (_, known) = self.built.leaves(args), self.built.leaves(self.arguments)
        if len(args) != len(self.arguments) or tree != known:
            raise ArgumentError(
                "these are not the arguments of the step.",
                user_line(),
                f"their structure: {tree}"[:300],
                f"Give arrays in the structure of configuration.arguments: {known}"[:300],
            )
        return self.built.with_leaves(args, put_all(leaves, lowered.argument_shardings), tree)

    def save(self, path: str | Path) -> None:
        """Writes the configuration, for ``Configuration.load`` in any process.

        Raises:
            ArgumentError: a keyword has a value that JSON cannot hold.
        """
        machine = self.machine if isinstance(self.machine, str) else None
        data = {
            "format": _FORMAT, "keywords": self.keywords, "machine": machine, "axes": list(self.mesh.axes),
            "memory_limit": self.memory_limit, "global_batch": self.global_batch, "own": dict(self.built.own),
            "fixed": dict(self.built.fixed), "host": self.built.host, "plan": json.loads(self._saved.as_json()),
        }  # fmt: skip
        try:
            text = json.dumps(data)
        except TypeError as error:
            raise ArgumentError(
                f"this configuration cannot be saved: {error}.",
                user_line(),
                text_of(self.keywords),
                "Let the builder take numbers and names, and look up the objects itself.",
            ) from None
        Path(path).write_text(text + "\n", "utf-8")

    @property
    def _saved(self) -> SavedPlan:
        saved = SavedPlan.checked(self.plan)
        assert saved is not None
        return saved

    @staticmethod
    def load(path: str | Path, step_builder: Callable[..., Any], machine: str | Machine | None = None) -> Configuration:
        """Reads a configuration that ``save`` wrote, and builds its step again.

        Args:
            path: the file.
            step_builder: the builder that ``gshard.configure`` was given. It is called with the saved keywords.
            machine: by default the machine that the file names, or that of the devices.

        Raises:
            ArgumentError: the file is of another kind, or the builder returns no step.

        ``jit`` of the result raises a PlanError if the builder makes another program than the saved one.
        """
        data = _read(Path(path))
        made = built_by(step_builder, data["keywords"], data["fixed"], data["own"])
        if made is None:
            what = f"{name_of(step_builder)} returns None for the saved keywords."
            raise ArgumentError(what, user_line(), text_of(data["keywords"]))
        made = made.with_host(dict(data["host"])) if data["host"] else made
        mesh = Mesh.abstract(**{name: int(size) for name, size in data["axes"]})
        available = tuple(jax.devices())
        if len(available) >= mesh.size:
            mesh = dataclasses.replace(mesh, devices=available[: mesh.size])
        plan = SavedPlan.of_json(json.dumps(data["plan"]))
        return Configuration(made, mesh, plan, machine or data["machine"], data["memory_limit"], data["global_batch"])

    @property
    def search_result(self) -> SearchResult:
        """The search that found the plan.

        Raises:
            ArgumentError: the configuration was loaded.
        """
        if self.found is None:
            raise ArgumentError(
                "a configuration that was loaded has no costs.",
                user_line(),
                hint="gshard.explain(configuration.jit(), *configuration.arguments).cost() prices it.",
            )
        return self.found

    def __str__(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.mesh.axes)
        if self.found is None:
            return f"{self.built.text}; mesh {axes}"
        memory = f"peak {format_bytes(self.cost.peak)}, {format_bytes(self.cost.sent)} sent by each device"
        return f"{format_seconds(self.seconds)} a step: {self.built.text}; mesh {axes}; {memory}"

    __repr__ = __str__


def _read(path: Path) -> dict[str, Any]:
    """The data of a saved configuration."""
    hint = "Give a file that Configuration.save wrote."
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is no saved configuration: {error}.", user_line(), hint=hint) from None
    if not isinstance(data, dict) or any(name not in data for name in _FIELDS) or data["format"] != _FORMAT:
        raise ArgumentError(f"{path} is no saved configuration of this version.", user_line(), hint=hint)
    return data
