"""Primitives that are made of others: what is opened, what is not, and that each of them runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard.tracing.trace import trace
from invented import primitive_of

RNG = np.random.default_rng(4)
X = RNG.standard_normal((8, 6)).astype(np.float32)
PLACES = np.stack([RNG.integers(0, 32, 96), RNG.integers(0, 24, 96)], 1)


def made_of(name, function, several=False):
    """A primitive as other packages write them: evaluated and lowered by one function."""
    made = Primitive(name)
    made.multiple_results = several
    made.def_impl(function)

    def shaped(*avals, **params):
        found = jax.eval_shape(lambda *xs: function(*xs, **params), *avals)
        as_aval = lambda s: jax.core.ShapedArray(s.shape, s.dtype)  # noqa: E731
        return list(map(as_aval, found)) if several else as_aval(found)

    made.def_abstract_eval(shaped)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=several))
    return made


class Tree:
    """Structured parameters, and a place in which the structure of the results is kept, as ``filter_primitive`` has."""

    def __init__(self, function, like):
        self.leaves, self.structure = jax.tree.flatten(like)
        self.function, self.result = function, None  # type: Any, Any

    def __call__(self, *leaves):
        found, structure = jax.tree.flatten(self.function(jax.tree.unflatten(self.structure, leaves)))
        assert self.result is None or self.result == structure
        self.result = structure
        return found


def _strict(x, *, like):
    if jax.eval_shape(lambda v: v, x) != like:
        raise ValueError("not the structure it was made for")
    return x * 2


def _grown(x):
    return jax.lax.while_loop(lambda v: v.sum() < 9, lambda v: v * 2 + 1, jnp.abs(x))


any_p = made_of("other_any", jnp.any)
same_p = made_of("other_same", lambda x: x * 1)
strict_p = made_of("other_strict", _strict)
both_p = made_of("other_both", lambda x, y, axis: [jnp.cumsum(x, axis), x @ y], several=True)
outer_p = made_of("other_outer", lambda x: jnp.sin(same_p.bind(x)) + any_p.bind(x > 1))
tree_p = made_of("other_tree", lambda *xs, tree: tree(*xs), several=True)
smaller_p = made_of("other_smaller", lambda x: x[0] + smaller_p.bind(x[1:]) if len(x) > 1 else x[0])
loop_p = made_of("other_loop", _grown)
rows_p = made_of("other_rows", jax.vmap(_grown))
ad.primitive_jvps[same_p] = lambda xs, ts: (same_p.bind(*xs), same_p.bind(*ts))
ad.primitive_transposes[same_p] = lambda ct, x: [same_p.bind(ct)]
batching.primitive_batchers[loop_p] = lambda xs, ds: (rows_p.bind(jnp.moveaxis(xs[0], ds[0], 0)), 0)


def structured(x):
    tree = Tree(lambda t: {"sum": t["a"] + t["b"][0], "more": [t["a"] * 3]}, {"a": x, "b": [x]})
    results = tree_p.bind(x, x, tree=tree)
    return jax.tree.unflatten(tree.result, results)


def in_a_scan(x):
    return jax.lax.scan(lambda c, row: (c + same_p.bind(row), any_p.bind(c > row)), jnp.zeros(x.shape[1]), x)


def product(d, x):
    return sparse.BCOO((d, PLACES), shape=(32, 24)) @ x


def dense(x):
    kept = sparse.BCOO.fromdense(x, nse=48)
    return kept.todense(), (kept.T @ x), kept.sum(0).todense()


PROGRAMS = [
    ("any", lambda x: any_p.bind(x > 2), (X,)),
    ("identity", lambda x: same_p.bind(x) + 1, (X,)),
    ("structures compared", lambda x: strict_p.bind(x + 1, like=jax.eval_shape(lambda v: v, x)), (X,)),
    ("several results, a parameter", lambda x: both_p.bind(x, X.T, axis=1), (X,)),
    ("made of others made of others", outer_p.bind, (X,)),
    ("itself on smaller arrays", smaller_p.bind, (X,)),
    ("trees", structured, (X,)),
    ("gradient", jax.grad(lambda x: (same_p.bind(x) ** 2).sum()), (X,)),
    ("in a scan", in_a_scan, (X,)),
    ("sparse product", product, (RNG.standard_normal(96).astype(np.float32), RNG.standard_normal((24, 16)))),
    ("sparse and dense", dense, (X,)),
]  # fmt: skip


@pytest.mark.parametrize("name, function, arguments", PROGRAMS, ids=[name for name, _, _ in PROGRAMS])
@pytest.mark.one_in(3)
def test_what_is_opened_is_partitioned(name, function, arguments):
    jitted = gshard.jit(function, mesh=8, in_shardings=tuple(P("devices") for _ in arguments), strict=True)
    assert jitted.lower(*arguments).plan.gathered == ()
    near(jitted(*arguments), jax.jit(function)(*arguments))


def test_nothing_is_sent_that_its_parts_do_not_send():
    sends = lambda f: gshard.explain(lambda x: f(gshard.split(x, 0, 8)), X, mesh=8).total_bytes  # noqa: E731
    assert sends(lambda x: same_p.bind(x)) == 0
    assert sends(lambda x: any_p.bind(x > 2)) == sends(lambda x: jnp.any(x > 2)) > 0


def names(f, *args):
    return [e.name for e in trace(f, *args).block.walk()]


def test_what_is_not_opened():
    kernel_p = primitive_of("other_kernel", lambda x: x * 2)  # a lowering of its own
    assert names(kernel_p.bind, X) == ["other_kernel"]
    itself_p = Primitive("other_itself")  # evaluated by compiling itself
    itself_p.def_impl(lambda x: jax.jit(itself_p.bind)(x))
    itself_p.def_abstract_eval(lambda x: x)
    assert names(itself_p.bind, X) == ["other_itself"]
    wrong_p = made_of("other_wrong", lambda x: x.astype(jnp.int32))  # its function makes another type than it says
    wrong_p.def_abstract_eval(lambda x: x)
    assert names(wrong_p.bind, X) == ["other_wrong"]
    host_p = Primitive("other_host")  # numbers are needed
    host_p.def_impl(lambda x: np.sin(np.asarray(x)))
    host_p.def_abstract_eval(lambda x: x)
    assert names(host_p.bind, X) == ["other_host"]
    custom_p = made_of("other_custom", lambda x: x + 1)
    assert names(custom_p.bind, X) == ["add"]
    gshard.rule("other_custom")("a b -> a b")
    assert names(custom_p.bind, X) == ["other_custom"]


def test_one_that_is_only_evaluated_is_opened():
    bare_p = Primitive("other_bare")
    bare_p.def_impl(lambda x: jnp.cos(x))
    bare_p.def_abstract_eval(lambda x: x)
    np.testing.assert_allclose(gshard.jit(bare_p.bind, mesh=8, strict=True)(X), np.cos(X), rtol=1e-5)
