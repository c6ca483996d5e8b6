"""What explain says of operands that are gathered because moving other arrays sends less."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import gshard
from gshard.explanation.warnings import moved_instead

MESH = gshard.Mesh.abstract(fsdp=8, tensor=8)


def layer(wi: Any, wo: Any, x: Any) -> Any:
    """A feed-forward layer with weights split over both axes, as for tensor parallelism."""
    wi, wo = gshard.shard(wi, P("fsdp", "tensor")), gshard.shard(wo, P("tensor", "fsdp"))
    x = gshard.split(x, 0, ("fsdp", "tensor"))
    hidden = gshard.shard(jax.nn.gelu(x @ wi), P("fsdp", None, "tensor"))
    return gshard.split(hidden @ wo, 0, ("fsdp", "tensor"))


def arrays(batch: int, length: int, model: int) -> list[Any]:
    shapes = (model, model), (model, model), (batch, length, model)
    return [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]


def test_small_weights_are_gathered_and_both_numbers_are_said() -> None:
    found = gshard.explain(layer, *arrays(64, 4096, 4096), mesh=MESH)
    rows = moved_instead(found.plan)
    weight, activation, part = 4096 * 4096 * 2 // 8, 8 * 4096 * 4096 * 2, 4096 * 4096 * 2 // 64
    for row in rows:
        assert (row.operand, row.axes, row.times) == ("bf16[4096,4096]", "tensor", 1)
        assert row.sent == 7 * part + 7 * weight + activation // 8 * 7 // 8
        assert row.stayed == 7 * part + activation * 7 // 8, "one reduce-scatter or all-gather of the activation"
    assert sum(row.sent for row in rows) == found.total_bytes
    text = found.format(tensors=0)
    assert text.count("1 product with bf16[4096,4096]: it is gathered over tensor") == 2
    assert "59.5 MiB instead of 227.5 MiB" in text


def test_equal_products_of_a_loop_are_one_row() -> None:
    def layers(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (layer(w, w.T, x), None), x, ws)[0]

    stack = jax.ShapeDtypeStruct((3, 4096, 4096), "bfloat16")
    rows = moved_instead(gshard.explain(layers, stack, arrays(64, 4096, 4096)[2], mesh=MESH).plan)
    assert [(row.operand, row.times) for row in rows] == [("bf16[4096,4096]", 3)] * 2


def test_weights_that_stay_are_not_mentioned() -> None:
    """Activations are smaller than weights: they are gathered, and results reduce-scattered, as Megatron does."""

    def f(wi: Any, wo: Any, x: Any) -> Any:
        wi, wo, x = gshard.shard(wi, P(None, "tensor")), gshard.shard(wo, P("tensor")), gshard.split(x, 0, "tensor")
        return gshard.split(jax.nn.gelu(x @ wi) @ wo, 0, "tensor")

    found = gshard.explain(f, *arrays(64, 8, 4096), mesh=gshard.Mesh.abstract(tensor=8))
    assert [row.kind for row in found.collectives] == ["all_gather", "reduce_scatter"]
    assert moved_instead(found.plan) == ()
    assert "operands gathered" not in found.format(tensors=0)


def test_fully_sharded_weights_are_not_mentioned() -> None:
    def fsdp(w: Any, x: Any) -> Any:
        w, x = gshard.split((w, x), 0, "fsdp")
        return x @ w

    found = gshard.explain(fsdp, *arrays(64, 4096, 4096)[1:], mesh=MESH)
    assert found.bytes_by_kind["all_gather"]
    assert moved_instead(found.plan) == ()
