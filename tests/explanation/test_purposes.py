"""What collectives are for, in a block with tensor parallelism and FSDP, as someone who knows Megatron calls it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import P

import gshard

array = jax.ShapeDtypeStruct
BLOCK = {
    "qkv": array((3, 1024, 16, 64), "float32"), "out": array((16, 64, 1024), "float32"),
    "up": array((1024, 4096), "float32"), "down": array((4096, 1024), "float32"),
}  # fmt: skip
MEGATRON_AND_FSDP = {
    "*/qkv": P(None, "data", "model"), "*/out": P("model", None, "data"),
    "*/up": P("data", "model"), "*/down": P("model", "data"),
}  # fmt: skip


def block(x: Any, p: Any) -> Any:
    q, k, v = jnp.einsum("btd,cdhk->cbthk", x, p["qkv"])
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / 8, -1)
    x = x + jnp.einsum("bhts,bshk,hkd->btd", scores, v, p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def step(params: Any, x: Any) -> Any:
    params, x = gshard.shard_by_path(params, MEGATRON_AND_FSDP), gshard.split(x, 0, "data")

    def loss(params: Any) -> Any:
        y = x
        for p in params:
            y = block(y, p)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def purposes(rows: int, **mesh: int) -> dict[tuple[str, str], str]:
    x, on = array((rows, 512, 1024), "float32"), gshard.Mesh.abstract(**mesh)
    explained = gshard.explain(step, [BLOCK] * 2, x, mesh=on)
    assert sum(row.bytes for row in explained.purposes) == explained.total_bytes
    assert sum(row.times for row in explained.purposes) == sum(row.times for row in explained.collectives)
    assert str(explained.purposes).count("\n") == len(explained.purposes) - 1
    return {(row.kind, row.axes): row.purpose for row in reversed(explained.purposes)}  # the largest of a kind


def test_tensor_parallelism_beside_fsdp() -> None:
    found = purposes(2, data=2, model=4)
    assert found["all_reduce", "model"].startswith("sums partial results of products (tensor parallelism: row-parallel")
    assert found["all_gather", "data"] == "gathers weights for products (FSDP, ZeRO-3)"
    assert found["reduce_scatter", "data"] == "sums gradients of weights, one shard for each device (FSDP, ZeRO)"


def test_large_batches_gather_weights_instead() -> None:
    """Where activations are larger than weights, weights marked over the tensor axis are gathered over it."""
    found = purposes(256, data=2, model=4)
    assert found["all_gather", "model"] == (
        "gathers weights over an axis that splits no input: this costs less than moving activations"
    )


@pytest.mark.parametrize(
    ("mark", "kind", "purpose"),
    [
        (lambda p: p, "all_reduce", "sums gradients over the batch (data parallelism)"),
        (lambda p: gshard.split(p, 0, "data"), "all_gather", "gathers weights for products (FSDP, ZeRO-3)"),
    ],
)
def test_data_parallelism(mark: Any, kind: str, purpose: str) -> None:
    def ours(p: Any, x: Any) -> Any:
        p, x = mark(p), gshard.split(x, 0, "data")
        return jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p) ** 2))(p)

    shapes = array((256, 256), "float32"), array((4096, 256), "float32")
    explained = gshard.explain(ours, *shapes, mesh=gshard.Mesh.abstract(data=8))
    assert (kind, purpose) in [(row.kind, row.purpose) for row in explained.purposes]
