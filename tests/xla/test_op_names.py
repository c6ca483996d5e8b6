"""What the name stacks in the metadata of compiled programs tell."""

import jax
import jax.numpy as jnp
import pytest

from gshard.xla.hlo_parser import read_module
from gshard.xla.op_names import Origin, origin_of


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/dot_general", Origin("dot_general")),
        ("jit(f)/decoder/layers_0/mlp/dot_general", Origin("dot_general", "decoder/layers_0/mlp")),
        ("jit(f)/jvp(decoder)/layers_0/add", Origin("add", "decoder/layers_0")),
        ("jit(f)/transpose(jvp(decoder))/layers_0/add", Origin("add", "decoder/layers_0", True)),
        ("jit(f)/transpose(jvp(jit(take_along_axis)))/scatter-add", Origin("scatter-add", "", True)),
        ("jit(f)/vmap(mlp)/while/body/closed_call/mul", Origin("mul", "mlp")),
        ("jit(f)/jvp()/checkpoint/rematted_computation/attn/exp", Origin("exp", "attn", False, True)),
        ("jit(f)/attn/BTNH,BSNH->BNTS/dot_general", Origin("dot_general", "attn")),
        ("jit(f)/mlp/mul;mlp/add", Origin("mul", "mlp")),
        ("jit(f)/checkpoint/(rematted_computation/mlp/dot:mlp/dot)", Origin("dot", "mlp", False, True)),
        ("broadcast.32", Origin("broadcast")),
        ("", Origin()),
    ],
)  # fmt: skip
def test_a_name_stack(op_name, expected):
    assert origin_of(op_name) == expected


def test_those_that_jax_writes():
    def loss(w, x):
        def layer(x, w):
            with jax.named_scope("mlp"):
                return jnp.tanh(x @ w), None

        with jax.named_scope("decoder"):
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
        return x.sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).compile().as_text()
    module = read_module(text)
    found = {origin_of(m.op_name) for c in module.computations.values() for m in c.instructions.values() if m.op_name}
    products = {o for o in found if o.operation == "dot_general"}
    assert {o.module for o in products} == {"decoder/mlp"}
    assert {(o.is_backward, o.is_recomputed) for o in products} >= {(False, False), (True, False)}
    assert "tanh" in {o.operation for o in found}
