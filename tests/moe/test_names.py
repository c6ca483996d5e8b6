"""The names of the model: a layout of a few rows is the marks of the paper, and parameters say theirs."""

import dataclasses

import jax

import gshard
from gshard import moe
from gshard.moe import TransformerConfig, expert_layer, expert_specs

CONFIG = TransformerConfig(48, 32, model_dim=8, hidden_dim=24, heads=2, head_dim=4, experts=8, group_size=12,
    encoder_layers=2, decoder_layers=2, capacity_factor=2.0, partitions=8)  # fmt: skip
ROWS = gshard.Layout(groups="devices", experts="devices", tokens=None, model=None, gates=None)


def shardings_of(lowered):
    return [lowered.plan.shardings[v].dims for v in lowered.program.block.values()]


def gradient(config):
    def loss(params, batch):
        return moe.loss(config, params, batch)[0]

    return jax.grad(loss)


def test_a_layout_is_the_marks_of_the_paper():
    """Every value of the gradient has the sharding that the marks give it."""
    marked = dataclasses.replace(CONFIG, dispatch="einsum")
    params = moe.shapes(moe.param_specs(CONFIG))
    batch = {key: jax.ShapeDtypeStruct((24, length), "int32") for key, length in (("source", 8), ("target", 12))}
    by_marks = gshard.jit(gradient(marked), mesh=8).lower(params, batch)
    named = gshard.jit(gradient(dataclasses.replace(marked, partitions=1)), mesh=8, layout=ROWS)
    by_layout = named.lower(params, batch)
    assert shardings_of(by_marks) == shardings_of(by_layout)
    assert any(any(dims) for dims in shardings_of(by_layout))


def test_the_layer_is_the_same_program():
    config = dataclasses.replace(CONFIG, dispatch="gather", partitions=1)
    params, x_BLM = moe.shapes(expert_specs(config)), jax.ShapeDtypeStruct((8, 12, 8), "float32")

    def run(params, x_BLM):
        return expert_layer(config, params, x_BLM, key=jax.random.key(2))[0]

    def marked(params, x_BLM):
        return expert_layer(dataclasses.replace(config, partitions=8), params, x_BLM, key=jax.random.key(2))[0]

    lowered = gshard.jit(run, mesh=8, layout=ROWS).lower(params, x_BLM)
    by_marks = gshard.jit(marked, mesh=8).lower(params, x_BLM)
    assert [c.kind for c in lowered.spmd.collectives if c.bytes].count("all_to_all") == 2
    assert shardings_of(lowered) == shardings_of(by_marks)
    assert str(lowered.spmd.jaxpr) == str(by_marks.spmd.jaxpr)


def test_parameters_say_their_names():
    specs = moe.param_specs(CONFIG)
    layout = gshard.Layout(model="data", experts="model", heads="model", hidden=None, vocabulary="model")
    f = lambda params: jax.tree.map(lambda w: w * 2, gshard.name(params, moe.names(specs)))  # noqa: E731
    lowered = gshard.jit(f, mesh={"data": 2, "model": 4}, layout=layout).lower(moe.shapes(specs))
    data, model = lowered.mesh.atoms_of["data"], lowered.mesh.atoms_of["model"]
    axes = {"model": data, "experts": model, "heads": model, "vocabulary": model}
    for value, spec in zip(lowered.program.block.inputs, jax.tree.leaves(specs), strict=True):
        found, expected = lowered.plan.sharding(value).dims, tuple(axes.get(name, ()) for name in spec.dims)
        open_dims = [name not in (*axes, "hidden") for name in spec.dims]
        assert [f for f, o in zip(found, open_dims, strict=True) if not o] == [
            e for e, o in zip(expected, open_dims, strict=True) if not o
        ]
