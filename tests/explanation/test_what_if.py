"""What another sharding would cost: priced as the program is that a user gets who writes the mark."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32
from gshard.core.number_text import format_seconds

MESH = gshard.Mesh.abstract(data=4, model=2)


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.mean((jax.nn.relu(gshard.split(x, 0, "data") @ weights[0]) @ weights[1]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


ARGUMENTS = [f32(256, 1024), f32(1024, 256)], f32(2048, 256)


def test_each_row_is_the_program_with_that_mark():
    donating = gshard.jit(step, mesh=MESH, donate_argnums=0)
    found = gshard.explain(donating, *ARGUMENTS)
    rows = {row.mark: row for row in found.instead("weights[0]", "h100:1x8")}
    assert len(rows) == 8, "two dimensions over one axis, the other, both, or not at all, but for what it is"
    assert [row.cost.seconds for row in rows.values()] == sorted(row.cost.seconds for row in rows.values())
    row = rows["gshard.shard(x, P(None, 'model'))"]
    by_hand = gshard.explain(
        gshard.jit(step, mesh=MESH, donate_argnums=0, in_shardings=([P(None, "model"), None], None)), *ARGUMENTS
    )
    assert row.cost.seconds == by_hand.cost("h100:1x8").seconds
    assert row.cost.sent == by_hand.total_bytes
    assert row.seconds == row.cost.seconds - found.cost("h100:1x8").seconds
    assert f"{format_seconds(row.seconds, '+')} a call" in str(row)
    assert row.sharding == "f32[256,1024@model]"


def test_values_inside_can_be_asked_for_too():
    found = gshard.explain(step, *ARGUMENTS, mesh=MESH)
    name = next(row.name for row in found.tensors if " max " in row.name)
    whole = next(row for row in found.instead(name, "h100:1x8") if row.mark == "gshard.replicate(x)")
    assert whole.cost.flops > found.cost("h100:1x8").flops


def test_what_has_a_mark_has_no_other_way():
    found = gshard.explain(step, *ARGUMENTS, mesh=MESH)
    name = next(row.name for row in found.tensors if "gshard_mark" in row.name)
    assert found.instead(name) == ()


def test_names_that_nobody_has_are_refused():
    found = gshard.explain(step, *ARGUMENTS, mesh=MESH)
    for ask in (found.why, found.instead):
        with pytest.raises(gshard.ArgumentError, match=r"(?s)no tensor is called 'weights'.*'weights/0'"):
            ask("weights")


def test_a_value_inside_is_found_by_its_number_and_by_its_line():
    found = gshard.explain(step, *ARGUMENTS, mesh=MESH)
    name = next(row.name for row in found.tensors if " max " in row.name)
    assert found.why(name.split()[0]) == found.why(name)
    place = name.split(" at ")[1].split(" (")[0]
    largest = next(row.name for row in found.tensors if f" at {place} (" in row.name)
    assert found.why(place) == found.why(largest)
