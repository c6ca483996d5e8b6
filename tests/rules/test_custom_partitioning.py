"""Operators that the user partitioned: what their sharding rule says, what ``partition`` takes, what devices run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import BATCHING, ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard.core.errors import PlanError, RuleError
from gshard.testing import assert_proved, check_rule
from harness import normal
from placed import mesh_of, put


def as_it_comes(function, **details):
    """An operator whose partition takes all arrays as they come, all of them alike."""

    def partition(mesh, operands, result):
        own = operands[0].sharding
        return mesh, function, own, tuple(x.sharding for x in operands)

    op = custom_partitioning(lambda *xs: function(*xs))
    op.def_partition(partition=partition, **details)
    return op


def rows_softmax():
    """JAX's softmax with a derivative, both partitioned as attention kernels are: rows may be split, columns not."""

    def of_rows(function, count, rule):
        def partition(mesh, operands, result):
            spec = operands[0].sharding.spec
            own = NamedSharding(mesh, P(*spec[:-1], None))
            return mesh, function, own, (own,) * count

        op = custom_partitioning(lambda *xs: function(*xs))
        op.def_partition(partition=partition, sharding_rule=rule)
        return op

    forward = of_rows(lambda x: jax.nn.softmax(x, -1), 1, "... j -> ... j")
    backward = of_rows(lambda y, g: y * (g - (y * g).sum(-1, keepdims=True)), 2, "... j, ... j -> ... j")

    @jax.custom_vjp
    def softmax(x):
        return forward(x)

    softmax.defvjp(lambda x: (forward(x),) * 2, lambda y, g: (backward(y, g),))
    return softmax


softmax = rows_softmax()


def matmul(**details):
    """A product whose program of one device adds the parts up by itself."""

    def partition(mesh, operands, result):
        (i, k), (_, j) = operands[0].sharding.spec, operands[1].sharding.spec
        shardings = NamedSharding(mesh, P(i, k)), NamedSharding(mesh, P(k, j))
        return mesh, (lambda x, y: lax.psum(x @ y, k) if k else x @ y), NamedSharding(mesh, P(i, j)), shardings

    op = custom_partitioning(lambda x, y: x @ y)
    op.def_partition(partition=partition, **details)
    return op


def rotated():
    """Rows shifted by one, around: a program of one device that permutes, and one that has no way to for columns."""

    def partition(mesh, operands, result):
        rows = operands[0].sharding.spec[0]
        own = NamedSharding(mesh, P(rows))

        def lower(x):
            if not rows:
                return jnp.roll(x, 1, 0)
            n = lax.axis_size(rows)
            last = lax.ppermute(x[-1:], rows, [(i, (i + 1) % n) for i in range(n)])
            return jnp.concatenate([last, x[:-1]], 0)

        return mesh, lower, own, (own,)

    op = custom_partitioning(lambda x: jnp.roll(x, 1, 0))
    op.def_partition(partition=partition, sharding_rule="i j -> i j", permutation_factors=("i",))
    return op


@partial(custom_partitioning, static_argnums=(1,))
def scaled_and_summed(tree, scale):
    return {"scaled": tree["x"] * scale, "sums": tree["x"].sum(1) + tree["y"]}


def _partition_scaled(scale, mesh, operands, result):
    own = operands[0]["x"].sharding
    rows, columns = own.spec
    of_rows = NamedSharding(mesh, P(rows))

    def lower(tree):
        sums = tree["x"].sum(1)
        return {"scaled": tree["x"] * scale, "sums": (lax.psum(sums, columns) if columns else sums) + tree["y"]}

    return mesh, lower, {"scaled": own, "sums": of_rows}, ({"x": own, "y": of_rows},)


def _rule_of_scaled(scale, mesh, operands, results):
    assert (operands[0].shape, len(results)) == ([4, 8], 2)
    return "i j, i -> i j, i"


scaled_and_summed.def_partition(partition=_partition_scaled, sharding_rule=_rule_of_scaled)


SIN = {
    "object": {"sharding_rule": SdyShardingRule((ArrayMapping(BATCHING, "j"),), (ArrayMapping(BATCHING, "j"),))},
    "function": {"sharding_rule": lambda mesh, operands, results: "i j -> i j"},
    "function with details": {
        "sharding_rule": lambda mesh, operands, results: ("(a b) j -> (a b) j", {"a": 4, "b": 1})
    },
    "product": {"sharding_rule": "(a b) j -> (a b) j", "a": 2, "b": 2},
    "whole rows": {"sharding_rule": "i j -> i j", "need_replication_factors": ("i",)},
}
ROWS_AND_COLUMNS = {"a@a", "a@b", "a@a,b", "b@a", "b@b", "b@a,b", "a@a b@b", "a@b b@a"}


@pytest.mark.parametrize("name", SIN)
def test_every_split_is_what_the_operator_is(name):
    found = check_rule(as_it_comes(jnp.sin, **SIN[name]), normal(4, 8), mesh={"a": 2, "b": 2})
    if name == "whole rows":
        assert {x[0] for x in found} == {"b"}
    elif name in ("product", "function with details"):  # a is the major factor of the rows, c the columns
        assert {"a@", "c@"} <= {x[:2] for x in found}
    else:
        assert {x.replace("b,a", "a,b") for x in found} == ROWS_AND_COLUMNS


@pytest.mark.parametrize("details", [{"reduction_factors": ("k",)}, {}], ids=["declared", "found"])
def test_a_program_of_one_device_adds_its_parts(details):
    op = matmul(sharding_rule="i k, k j -> i j", **details)
    found = check_rule(op, normal(4, 8), normal(8, 4), mesh={"a": 2, "b": 2}, tolerance=1e-5)
    assert any("b@a" in x for x in found)
    assert any(x.startswith("a@") for x in found)
    mesh = mesh_of(a=2, b=4)
    partitioned = gshard.jit(op, mesh=mesh)
    x, y = put(normal(16, 24), mesh, None, "b"), normal(24, 8)
    assert_proved(partitioned, (x, y))
    assert {c.kind for c in partitioned.lower(x, y).spmd.collectives} == {"all_reduce"}


def combined(combine, function, after):
    """Rows reduced by a program of one device that combines its results, and does something with them."""

    def partition(mesh, operands, result):
        i, k = operands[0].sharding.spec

        def lower(x):
            found = function(x, 1)
            return after(combine(found, k) if k else found)

        return mesh, lower, NamedSharding(mesh, P(i)), (operands[0].sharding,)

    op = custom_partitioning(lambda x: after(function(x, 1)))
    op.def_partition(partition=partition, sharding_rule="i k -> i", reduction_factors=("k",))
    return op


def identity(x):
    return x


@pytest.mark.parametrize(
    "op, expected",
    [
        (combined(lax.psum, jnp.sum, identity), {"all_reduce"}),
        (combined(lax.pmax, jnp.max, identity), {"all_reduce"}),
        (combined(lax.psum, jnp.sum, jnp.sin), {"all_reduce"}),
    ],
    ids=["sum", "max", "sine of a sum"],
)
@pytest.mark.one_in(2)
def test_results_that_a_program_combines(op, expected):
    check_rule(op, normal(4, 8), mesh={"a": 2, "b": 2}, tolerance=1e-5)
    mesh = mesh_of(a=8)
    run = gshard.jit(lambda x: gshard.split(op(x), 0, "a"), mesh=mesh)
    x = normal(16, 24)
    for spec in ((None, "a"), (), ("a",)):
        assert_proved(run, (put(x, mesh, *spec),))
    assert {c.kind for c in run.lower(put(x, mesh, None, "a")).spmd.collectives} == expected


def test_what_is_declared_as_reduced_and_is_not_added_stays_whole():
    """A program of one device that adds nothing gives wrong sums under ``jax.jit``; here the factor is not split."""

    def partition(mesh, operands, result):
        i = operands[0].sharding.spec[0]
        return mesh, lambda x: x.sum(1), NamedSharding(mesh, P(i)), (operands[0].sharding,)

    op = custom_partitioning(lambda x: x.sum(1))
    op.def_partition(partition=partition, sharding_rule="i k -> i", reduction_factors=("k",))
    mesh = mesh_of(a=8)
    x = put(normal(6, 16), mesh, None, "a")
    assert_proved(gshard.jit(op, mesh=mesh), (x,))


def test_programs_that_permute_and_trees_and_static_arguments():
    found = check_rule(rotated(), normal(4, 8), mesh={"a": 2, "b": 2})
    assert {x.replace("b,a", "a,b") for x in found} == {"a@a", "a@b", "a@a,b"}
    tree = {"x": normal(4, 8), "y": normal(4)}
    found = check_rule(lambda t: scaled_and_summed(t, 3.0), tree, mesh={"a": 2}, tolerance=1e-5)
    assert set(found) == {"a@a", "b@a"}


def test_partition_may_demand_shardings():
    def partition(mesh, operands, result):
        own, turned = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P("b", "a"))
        return mesh, lambda x, y: x + y.T, own, (own, turned)

    op = custom_partitioning(lambda x, y: x + y.T)
    op.def_partition(partition=partition, sharding_rule="i j, k l -> i j")
    assert check_rule(op, normal(4, 8), normal(8, 4), mesh={"a": 2, "b": 2}) == ("a@a b@b",)
    mesh = mesh_of(a=2, b=4)
    x, y = put(normal(16, 8), mesh, "b"), normal(8, 16)
    np.testing.assert_array_equal(gshard.jit(op, mesh=mesh)(x, y), np.asarray(x) + y.T)


def test_without_a_sharding_rule_every_device_computes_the_whole():
    op = as_it_comes(jnp.sin)
    mesh = mesh_of(a=2, b=4)
    partitioned = gshard.jit(op, mesh=mesh)
    for x in (put(normal(16, 8), mesh, "a", "b"), normal(16, 8), put(normal(16, 8), mesh, None, "b")):
        near(partitioned(x), np.sin(np.asarray(x)))
    assert "has no sharding_rule" in str(gshard.explain(partitioned, put(normal(16, 8), mesh, "a", "b")))


INSIDE = {
    "gradient": jax.grad(lambda x: (softmax(x) ** 2).sum()),
    "scan": lambda x: lax.scan(lambda c, _: (softmax(c) + c, None), x, None, 3)[0],
    "cond": lambda x: lax.cond(x[0, 0] > 0, softmax, lambda x: x * 2, x),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_of_loops_and_derivatives(name):
    x, f = normal(16, 8), INSIDE[name]
    want = jax.jit(f)(x)
    mesh = mesh_of(a=2, b=4)
    partitioned = gshard.jit(f, mesh=mesh)
    for spec in ((("a", "b"),), ("b", "a"), ()):  # a history: arguments come otherwise at each call
        near(partitioned(put(x, mesh, *spec)), want)
    split = put(x, mesh, "a")
    sent = [c for c in partitioned.lower(split).spmd.collectives if c.kind != "all_reduce"]  # a predicate is summed
    assert not sent, "rows are split for nothing"
    assert not gshard.explain(partitioned, split).lists["gathered"]


def test_a_program_that_names_the_axis_takes_no_part_of_it():
    x, y = normal(16, 8), normal(8, 4)

    def partition(mesh, operands, result):
        spec = operands[0].sharding.spec
        own = NamedSharding(mesh, P(spec[0]))
        return mesh, lambda x: x + lax.psum(jnp.zeros(()), "a"), own, (own,)

    op = custom_partitioning(lambda x: x + 0.0)
    op.def_partition(partition=partition, sharding_rule="i j -> i j")
    near(gshard.jit(lambda x: op(gshard.split(x, 0, 4)), mesh=mesh_of(a=8))(x), x)
    near(gshard.jit(lambda x: op(x @ y), mesh=mesh_of(a=8))(put(x, mesh_of(a=8), "a")), x @ y)


def test_uneven_arrays_are_whole_and_told():
    op = as_it_comes(jnp.sin, sharding_rule="i j -> i j")
    x = normal(9, 5)
    partitioned = gshard.jit(lambda x: op(gshard.split(x, 0, 8)), mesh=mesh_of(a=8))
    near(partitioned(x), np.sin(x))
    (told,) = gshard.explain(partitioned, x).lists["gathered"]
    assert "no axis of the mesh divides a dimension of it" in told
    some = gshard.jit(lambda x: op(gshard.split(x, 0, 8)), mesh=mesh_of(a=8))
    near(some(normal(12, 5)), np.sin(normal(12, 5)))  # four of eight devices could
    even = gshard.jit(lambda x: op(x), mesh=mesh_of(a=3))
    split = put(x, mesh_of(a=3), "a")
    near(even(split), np.sin(x))
    assert not even.lower(split).spmd.collectives


def test_a_refusal_is_told_with_its_reason():
    def partition(mesh, operands, result):
        raise NotImplementedError("on one device only")

    op = custom_partitioning(jnp.sin)
    op.def_partition(partition=partition, sharding_rule="i j -> i j")
    mesh = mesh_of(a=8)
    x = put(normal(16, 8), mesh, "a")

    def f(x):
        return op(x) * 2

    near(gshard.jit(f, mesh=mesh)(x), np.sin(np.asarray(x)) * 2)
    (told,) = gshard.explain(gshard.jit(f, mesh=mesh), x).lists["gathered"]
    assert "partition raises NotImplementedError: on one device only" in told
    assert "test_custom_partitioning.py" in told
    with pytest.raises(PlanError, match="'custom_partitioning' cannot be split"):
        gshard.jit(f, mesh=mesh, strict=True)(x)


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"sharding_rule": "i j k -> i j k"}, "gives operand 0 3 dimensions, and it has 2"),
        ({"sharding_rule": "i j, k -> i j"}, "is for 2 operands, and there are 1"),
        ({"sharding_rule": "(i k) j -> (i k) j", "i": 3, "k": 2}, r"dimension 0 of operand 0 be i=?3?"),
        ({"sharding_rule": lambda mesh, operands, results: 3}, "neither text nor an SdyShardingRule"),
        ({"sharding_rule": lambda mesh, operands, results: 1 / 0}, "failed: ZeroDivisionError"),
        ({"returns": lambda mesh, own: (mesh, jnp.sin, own)}, "returned what is not asked of it"),
        ({"returns": lambda mesh, own: (mesh, jnp.sin, own, (own, own))}, "returned what is not asked of it"),
        ({"returns": lambda mesh, own: (mesh, jnp.sin, own, (None,))}, "return shardings"),
        (
            {"returns": lambda mesh, own: (mesh, jnp.sin, NamedSharding(mesh, P(None, None, "a")), (own,))},
            "more dimensions than its array has",
        ),
    ],
)
def test_mistakes_have_the_line_of_the_call(details, message):
    returns = details.get("returns", lambda mesh, own: (mesh, jnp.sin, own, (own,)))
    op = custom_partitioning(jnp.sin)
    rule = details.get("sharding_rule", "i j -> i j")
    sizes = {k: v for k, v in details.items() if k not in ("returns", "sharding_rule")}
    op.def_partition(partition=lambda mesh, x, y: returns(mesh, x[0].sharding), sharding_rule=rule, **sizes)
    mesh = mesh_of(a=8)
    with pytest.raises(RuleError, match=message) as caught:
        gshard.jit(lambda x: op(x) + 1, mesh=mesh)(put(normal(16, 8), mesh, "a"))
    assert caught.value.where
    assert "test_custom_partitioning.py" in caught.value.where


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (3, 2)])
def test_a_mesh_that_cuts_the_devices_otherwise_is_refused(shape):
    other, mesh = mesh_of(a=shape[0], b=shape[1]), mesh_of(a=2, b=3)
    own = NamedSharding(other, P("a", "b"))
    op = custom_partitioning(lambda x: x)
    op.def_partition(
        partition=lambda *_: (other, lambda x: x + 10 * lax.axis_index("a") + lax.axis_index("b"), own, (own,)),
        sharding_rule="i j -> i j",
    )
    x, jitted = put(normal(6, 6), mesh, "a", "b"), gshard.jit(op, mesh=mesh)
    if shape == (3, 2):
        with pytest.raises(gshard.ShardingError, match="cuts its devices otherwise"):
            jitted(x)
    else:
        at = np.indices((6, 6)) // (6 // np.array(shape)).reshape(2, 1, 1)
        near(jitted(x) - x, 10 * at[0] + at[1])


def test_in_a_shard_map_it_is_its_function():
    mesh = mesh_of(a=2, b=4)
    mapped = jax.shard_map(softmax, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    x = put(normal(16, 8), mesh, "a")
    partitioned = gshard.jit(lambda x: mapped(x) + 1, mesh=mesh)
    near(partitioned(x), jax.nn.softmax(np.asarray(x), -1) + 1)
    assert not partitioned.lower(x).spmd.collectives


def test_planned_without_devices():
    program = gshard.jit(lambda x: softmax(gshard.shard(x, P("a"))), mesh=gshard.Mesh.abstract(a=64))
    assert not program.lower(jax.ShapeDtypeStruct((128, 8), jnp.float32)).spmd.collectives


@pytest.mark.parametrize(("bias", "heads"), [(None, 4), ((1, 8, 128, 128), 8)])
def test_attention_of_cudnn(monkeypatch, bias, heads):
    """Batch and heads are split and nothing is sent but the sums of the bias's gradient."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    mesh = mesh_of(a=2, b=4)

    def given(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def f(q, k, v, *bias):
        return jax.nn.dot_product_attention(q, k, v, *bias, implementation="cudnn", is_causal=not bias)

    query, key = (given((8, 128, n, 64), "a", None, "b") for n in (8, heads))
    arrays = [query, key, key] + ([given(bias, *(a if n > 1 else None for a, n in zip("ab", bias)))] if bias else [])
    whole = lambda *xs: f(*xs).astype(jnp.float32).sum()  # noqa: E731
    function = jax.grad(whole, tuple(range(len(arrays))))
    found = gshard.explain(gshard.jit(function, mesh=mesh, strict=True), *arrays)
    assert set(found.bytes_by_kind) <= ({"all_reduce"} if bias else set())
