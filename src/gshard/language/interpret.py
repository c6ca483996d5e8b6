"""Runs a block on arrays, without splitting or moving them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.core.jax_adapter import as_if_at, bind
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms
from gshard.core.program import Block, Constant, Equation, Value
from gshard.core.sharding import Sharding
from gshard.language.per_device import renamed
from gshard.language.region import REGIONS


class Interpreter:
    """Runs blocks on whole arrays. It is an ``Emitter`` for regions. Subclasses may run equations in other ways."""

    devices: Sequence[Any] | None = None

    def sharding(self, value: Value | Constant) -> Sharding:
        """The replicated sharding."""
        return Sharding.replicated(len(value.shape))

    def move(
        self, value: Value | Constant, array: Any, target: Sharding, equation: Equation, trip_count: int = 1
    ) -> Any:
        """Returns the array unchanged."""
        return array

    def combine(self, flag: Any, monoid: str, atoms: Atoms, equation: Equation) -> Any:
        """Returns the flag unchanged."""
        return flag

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation without a body.

        The types in the body of a ``shard_map`` contain the user's mesh, so the body is traced again.
        """
        if "check_vma" not in e.params:
            return bind(e.primitive, e.params, inputs)
        mesh, specs = e.params["mesh"], list(e.params["out_specs"])
        body = renamed(e.params["jaxpr"], {str(axis): (str(axis),) for axis in mesh.shape})
        mapped = jax.shard_map(body, mesh=mesh, in_specs=e.params["in_specs"], out_specs=specs, check_vma=False)
        return list(mapped(*inputs))

    def region(self, e: Equation, arrays: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation with bodies."""
        return REGIONS[e.name].emit(e, self, arrays)

    def run(self, block: Block, arrays: Sequence[Any], trip_count: int = 1) -> list[Any]:
        """Runs a block."""
        env: dict[Value, Any] = dict(zip(block.inputs, arrays, strict=True))
        self.evaluate(block.equations, env)
        return [jnp.asarray(value_of(v, env)) for v in block.outputs]

    def evaluate(self, equations: Iterable[Equation], env: dict[Value, Any]) -> None:
        """Runs equations in order."""
        for e in equations:
            with as_if_at(e.source_info), jax.named_scope(e.name), in_context(e.context):
                inputs = [value_of(v, env) for v in e.inputs]
                if e.rule is not None:
                    results = self.equation(e, inputs)
                else:
                    results = self.region(e, [jnp.asarray(x) for x in inputs])
            env.update(zip(e.outputs, results, strict=True))


def value_of(v: Value | Constant, env: Mapping[Value, Any]) -> Any:
    """The array of a value, or the value of a constant."""
    return v.value if isinstance(v, Constant) else env[v]
