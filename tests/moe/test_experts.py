"""The MoE layer: three dispatches with one result, and what its marks are."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moe import ModelError, TransformerConfig, expert_layer
from moe import naive

layer = jax.jit(expert_layer, static_argnums=0, compiler_options=naive.FAST)

BASE = TransformerConfig(9, 9, model_dim=6, hidden_dim=10, experts=4, group_size=8, capacity_factor=1.0)


case = functools.partial(naive.case, rows=4, length=6)


@pytest.mark.parametrize("group_size, capacity_factor, routing", [
    (24, 0.5, "lingvo"), (6, math.inf, "paper"), pytest.param(8, 1.0, "paper", marks=pytest.mark.slow),
    pytest.param(None, math.inf, "lingvo", marks=pytest.mark.slow),
])  # fmt: skip
def test_dispatches_agree(routing, group_size, capacity_factor):
    """Values, gradients and metrics; ``blocks`` too where nothing is dropped."""
    config = dataclasses.replace(
        BASE, routing=routing, group_size=group_size, capacity_factor=capacity_factor, dispatch="einsum"
    )
    expected = naive.on_one_device(config, case(config), jax.random.key(5))
    assert float(jnp.abs(expected[0][1][0]).max()) > 0.1
    for dispatch in ("gather", "blocks") if capacity_factor == math.inf else ("gather",):
        other = dataclasses.replace(config, dispatch=dispatch)
        naive.assert_close(naive.on_one_device(other, case(config), jax.random.key(5)), expected)


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_dropped_and_padding_tokens_get_zero(dispatch):
    # Wide enough that no expert answers a token with nothing but zeros.
    config = dataclasses.replace(BASE, capacity_factor=0.5, dispatch=dispatch, hidden_dim=40)
    params, x_BLM, valid_BL = case(config)
    outputs, metrics = layer(config, params, x_BLM, valid_BL)
    zero = np.all(np.asarray(outputs) == 0, axis=-1)
    assert zero[~np.asarray(valid_BL)].all()
    share = zero[np.asarray(valid_BL)].mean()
    assert share > 0
    assert float(metrics["dropped_share"]) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_groups_are_independent(dispatch):
    """What one group holds changes nothing in another, values or gradients."""
    config = dataclasses.replace(BASE, group_size=6, dispatch=dispatch)
    params, x_BLM, _ = case(config)

    @functools.partial(jax.jit, compiler_options=naive.FAST)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def rest(x_BLM):
        outputs = expert_layer(config, params, x_BLM)[0][1:]
        return jnp.sum(outputs**2), outputs

    (_, outputs), gradient = rest(x_BLM)
    np.testing.assert_array_equal(rest(np.concatenate([-3 * x_BLM[:1], x_BLM[1:]]))[0][1], outputs)
    assert (gradient[0] == 0).all()
    assert (gradient[1:] != 0).any()


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_marks_are_those_of_section_3_2(dispatch):
    config = dataclasses.replace(BASE, partitions=4, dispatch=dispatch)
    params, x_BLM, _ = case(config)
    text = str(jax.make_jaxpr(lambda p, x: expert_layer(config, p, x)[0])(params, x_BLM))
    assert text.count("gshard_mark") == 5  # inputs, wg, wi, wo, dispatched
    assert text.count("mark=replicate(x)") == 1
    assert text.count("mark=split(x, 0, 4)") == 4
    plain = str(jax.make_jaxpr(lambda p, x: expert_layer(BASE, p, x)[0])(params, x_BLM))
    assert "gshard_mark" not in plain
    marked, _ = layer(config, params, x_BLM)
    unmarked, _ = layer(dataclasses.replace(BASE, dispatch=dispatch), params, x_BLM)
    np.testing.assert_array_equal(marked, unmarked)


def test_groups_must_be_filled():
    params, x_BLM, _ = case(BASE)
    with pytest.raises(ModelError, match="20 tokens do not fill groups of 8"):
        expert_layer(BASE, params, x_BLM[:, :5])
