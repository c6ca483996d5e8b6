"""Rules that users register, for primitives, calls of other languages and callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.core.errors import RuleError
from gshard.language.registry import unregister
from invented import primitive_of

outer_p = primitive_of("custom_outer", lambda x, y: jnp.einsum("ab,bc->ac", x, jnp.tanh(y)))
X = np.random.default_rng(2).standard_normal((7, 5)).astype(np.float32)
Y = np.random.default_rng(3).standard_normal((5, 6)).astype(np.float32)


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    for name in ("custom_outer", "ffi_call", "pure_callback", "tanh"):
        unregister(name)


def outer(x, y):
    return outer_p.bind(x, y)


def test_text_is_all_that_a_primitive_needs():
    gshard.rule("custom_outer")("a b, b c -> a c; add over b")

    def f(x, y):
        return outer(gshard.split(x, 1, 8), y)

    found = gshard.explain(f, X, Y, mesh=8)
    assert (found.lists["gathered"], set(found.bytes_by_kind)) == ((), {"all_reduce"})
    np.testing.assert_allclose(gshard.jit(f, mesh=8, strict=True)(X, Y), X @ np.tanh(Y), rtol=1e-5, atol=1e-5)


def test_the_primitive_itself_may_be_named():
    gshard.rule(outer_p)("a b, b c -> a c; replicate b")
    assert "replicate" in str(gshard.jit(outer, mesh=8).lower(X, Y).program)


def test_a_function_of_the_equation_with_its_own_local():
    seen = []

    @gshard.rule("custom_outer")
    def rule(call):
        make = gshard.rules.RuleMaker()
        (n, k), (_, m) = call.in_shapes
        a, b, c = make.factor(n), make.factor(k, "reduce", "add"), make.factor(m)

        def local(shards, x, y):
            seen.append((x.shape, y.shape, shards.out_shape()))
            return [x @ jnp.tanh(y)]

        return make.rule([[a, b], [b, c]], [[a, c]], local=local)

    result = gshard.jit(lambda x, y: outer(gshard.split(x, 0, 7), y), mesh=7)(X, Y)
    np.testing.assert_allclose(result, X @ np.tanh(Y), rtol=1e-5, atol=1e-5)
    assert ((1, 5), (5, 6), (1, 6)) in seen


def test_a_rule_of_ones_own_is_replaced_and_one_of_ours_only_if_asked():
    gshard.rule("custom_outer")("a b, b c -> a c; replicate a b c")
    gshard.rule("custom_outer")("a b, b c -> a c; add over b")
    assert "add over b" in str(gshard.jit(outer, mesh=8).lower(X, Y).program)
    with pytest.raises(RuleError, match=r"has a rule for primitive 'tanh'[^$]*replace=True"):
        gshard.rule("tanh")("a b -> a b; replicate b")
    assert "replicate" not in str(gshard.jit(jnp.tanh, mesh=8).lower(X).program)
    gshard.rule("tanh", replace=True)("a b -> a b; replicate b")
    assert "a b -> a b; replicate b" in str(gshard.jit(jnp.tanh, mesh=8).lower(X).program)


@pytest.mark.parametrize("rule, message", [
    ("a b -> a b", "is for 1 operand, and there are 2"),
    ("a b, b c -> a; add over b; replicate c", "gives result 0 1 dimension, and it has 2"),
    ("a b, c b -> a c; add over b", "has 'b' be 5 in dimension 1 of operand 0 and 6 in dimension 1 of operand 1"),
    (lambda call: None, "gave NoneType"), (lambda call: call.params["axis"], "failed: KeyError: 'axis'"),
    (lambda call: gshard.rules.RuleMaker().rule([[], []], [[]]), "operand 0: the rule gives it 0 dimensions"),
    (lambda call: gshard.rules.RuleMaker().rule([], []), "it is for 0 operands, and there are 2"),
])  # fmt: skip
def test_a_rule_that_does_not_fit_blames_the_users_line(rule, message):
    gshard.rule("custom_outer")(rule)
    with pytest.raises(RuleError) as error:
        gshard.jit(outer, mesh=8)(X, Y)
    assert f"the rule of 'custom_outer' {message}" in str(error.value).replace("does not fit: ", "")
    assert "at test_users_rules.py:" in str(error.value)
    assert "f32[7,5], f32[5,6] -> [7,6]" in str(error.value)


def test_wrong_sizes_in_a_function_name_dimension_and_factors():

    @gshard.rule("custom_outer")
    def other(call):
        make = gshard.rules.RuleMaker()
        a, b, c, d = (make.factor(n) for n in (7, 5, 4, 2))
        return make.rule([[a, b], [b, c + d]], [[a, c + d]])

    with pytest.raises(RuleError, match=r"operand 1: dimension 1 is 6, and its factors make c=4 \* d=2"):
        gshard.jit(outer, mesh=8)(X, Y)


def test_what_is_no_rule_is_refused_at_once():
    with pytest.raises(RuleError, match="is neither text nor a function"):
        gshard.rule("custom_outer")(3)
    with pytest.raises(RuleError, match="is no primitive"):
        gshard.rule(3)
    for name in ("scan", "cond", "jit", "custom_jvp_call", "remat2"):
        with pytest.raises(RuleError, match="what is inside it is split by itself"):
            gshard.rule(name, replace=True)
    with pytest.raises(RuleError, match="needs one arrow"):
        gshard.rule("custom_outer")("a b")
    with pytest.raises(RuleError, match="'b' is communicated, and nothing says how"):
        gshard.rule("custom_outer")("a b, b c -> a c; communicate b")


def test_callbacks_have_rules_by_function():
    sizes = []

    def rows_on_host(x):
        sizes.append(x.shape)
        return np.sort(x, axis=1)

    def f(x):
        return jax.pure_callback(rows_on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), gshard.split(x, 0, 7))

    gshard.rule("pure_callback", target=rows_on_host)("a b -> a b; replicate b")
    np.testing.assert_array_equal(gshard.jit(f, mesh=7)(X), np.sort(X, axis=1))
    assert set(sizes) == {(1, 5)}


TARGET = "lapack_spotrf_ffi"  # the Cholesky factor of a matrix, in place; of the last two dimensions


@pytest.fixture(autouse=True)
def lapack():
    """JAX looks for LAPACK when it first needs it."""
    jnp.linalg.cholesky(jnp.eye(2))
    yield
    unregister("ffi_call")


def factor(x, method=None):
    """The lower factor: the upper one for LAPACK, which reads columns first."""
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32)
    call = jax.ffi.ffi_call(TARGET, results, vmap_method=method, input_output_aliases={0: 0})
    made, failed = call(x, uplo=np.uint8(ord("U")))
    return jnp.tril(made), failed


def matrices(*batch):
    x = np.random.default_rng(0).standard_normal((*batch, 6, 6)).astype(np.float32)
    return x @ np.swapaxes(x, -1, -2) + 6 * np.eye(6, dtype=np.float32)


def check(partitioned, x):
    made, failed = partitioned(x)
    np.testing.assert_allclose(made, np.linalg.cholesky(x), rtol=1e-4, atol=1e-4)
    assert not np.any(failed)


@pytest.mark.parametrize(("n", "method"), [(8, "sequential"), (13, "sequential_unrolled")])
def test_one_after_the_other_sends_nothing(n, method):
    x = matrices(n)
    partitioned = gshard.jit(lambda x: jax.vmap(lambda x: factor(x, method))(gshard.split(x, 0, 8)), mesh=8)
    check(partitioned, x)
    if n == 8:
        assert not partitioned.lower(x).spmd.collectives


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all"])
def test_with_more_dimensions_it_is_told_until_there_is_a_rule(method):
    x = matrices(8)
    partitioned = gshard.jit(lambda x: jax.vmap(lambda x: factor(x, method))(gshard.split(x, 0, 8)), mesh=8)
    check(partitioned, x)
    gshard.rule("ffi_call", target="somebody_elses")("a -> a")
    assert gshard.explain(partitioned, x).lists["gathered"]
    gshard.rule("ffi_call", target=TARGET)("... a b -> ... a b, ...; replicate a b")
    check(partitioned, x)
    assert not gshard.explain(partitioned, x).lists["gathered"]
    assert not partitioned.lower(x).spmd.collectives
    checked = gshard.testing.check_rule(factor, x, primitive="ffi_call", tolerance=1e-5)
    assert checked == tuple(f"a@{axes}, up to rounding" for axes in ("a", "b", "a,b", "b,a"))
