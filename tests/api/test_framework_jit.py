"""Functions that frameworks jit are explained as those of ``jax.jit``, with the names and the lines of the user."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
SPLIT = NamedSharding(MESH, P("data"))
OPTIMIZER = optax.adam(1e-2)


class MLP(nnx.Module):
    """Two layers, and a counter of keys, which is no weight."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(nnx.gelu(self.up(x))))


def nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def eqx_step(model: Any, state: Any, x: Any, kind: str) -> Any:
    loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - x) ** 2))(model)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss, kind


def placed(tree: Any) -> Any:
    """The arrays of a pytree: matrices cut over the mesh, others on every device."""
    where = lambda x: SPLIT if np.ndim(x) == 2 else NamedSharding(MESH, P())  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, where(x)) if isinstance(x, jax.Array) else x, tree)


def of_nnx() -> tuple[Any, tuple[Any, ...], set[str]]:
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    nnx.update((model, optimizer), placed(nnx.state((model, optimizer))))
    arguments = model, optimizer, placed(jnp.ones((64, 32)))
    return nnx.jit(nnx_step, donate_argnames=("model", "optimizer")), arguments, {"up.kernel", "down.kernel"}


def of_equinox() -> tuple[Any, tuple[Any, ...], set[str]]:
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))  # its activation function is a leaf too
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    arguments = placed(model), placed(state), placed(jnp.ones((64, 32))), "train"
    return eqx.filter_jit(eqx_step, donate="all"), arguments, {"layers[0].weight", "layers[1].weight"}


FRAMEWORKS = {"nnx": of_nnx, "equinox": of_equinox}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_is_explained_with_the_names_of_the_user(framework: str) -> None:
    f, arguments, weights = FRAMEWORKS[framework]()
    found = gshard.explain(f, *arguments)
    assert isinstance(found, gshard.CompiledExplanation)
    assert found.attributed == 1
    assert {row.line.partition(":")[0] for row in found.collectives} == {"test_framework_jit.py"}
    rows = {row.array for row in found.collectives}
    names = [a.name.removesuffix(".value") for a in found.arguments]
    for weight in weights:
        assert f"model.{weight}" in names
    assert rows & weights
    assert any("gradient of" in array for array in rows)
    assert not any("states[" in name or "first" in name for name in names)
    lowered = f.lower(*arguments)
    for stage in lowered, lowered.compile():
        assert gshard.explain(stage).bytes_by_kind == found.bytes_by_kind


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gshard_partitions_it_where_it_is_told_to(framework: str) -> None:
    f, arguments, weights = FRAMEWORKS[framework]()
    for options in ({"partitioner": "gshard"}, {"mesh": MESH, "machine": "h100"}, {"memory_limit": "1GiB"}):
        found = gshard.explain(f, *arguments, **options)
        assert isinstance(found, gshard.Explanation)
        assert found.total_bytes > 0
        names = [row.array for row in found.collectives]
        assert any(any(weight in name for weight in weights) for name in names), names
    with pytest.raises(gshard.ArgumentError, match="takes donate_argnums for a function of arrays only"):
        gshard.explain(f, *arguments, donate_argnums=0, partitioner="gshard")
    with pytest.raises(gshard.MeshError, match="is left to XLA: its arguments are on devices"):
        gshard.explain(f, *arguments, mesh=4)


def test_in_a_block_a_function_of_jax_is_explained_as_gshard_partitions_it() -> None:
    f, x = jax.jit(lambda x: x.sum()), jax.ShapeDtypeStruct((64, 32), "float32", sharding=SPLIT)
    with gshard.instead_of_jit(mesh=MESH):
        assert isinstance(gshard.explain(f, x), gshard.Explanation)
        assert isinstance(gshard.explain(f, x, partitioner="xla"), gshard.CompiledExplanation)


def test_a_limit_on_what_it_sends_names_the_weight() -> None:
    f, arguments, _ = of_nnx()
    with pytest.raises(AssertionError, match=r"up\.kernel"):
        gshard.testing.assert_collectives(f, arguments, all_gather=0)
