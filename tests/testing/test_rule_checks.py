"""The check of rules: true ones pass, and lies of every sort are found and named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.core.errors import RuleError
from gshard.language.registry import unregister
from gshard.testing import check_rule
from invented import invented, primitive_of

X = np.random.default_rng(4).standard_normal((7, 10)).astype(np.float32)

softmax_p = primitive_of("told_softmax", lambda x: jax.nn.softmax(x, axis=1))
total_p = primitive_of("told_total", lambda x: jnp.sum(x, axis=1))
placed_p = primitive_of("told_placed", lambda x: x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None])
squares_p = primitive_of("told_squares", lambda x: x * x)
shifted_p = primitive_of("told_shifted", lambda x: jnp.roll(x, 1, axis=0))


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    for p in (softmax_p, total_p, placed_p, squares_p, shifted_p):
        unregister(p.name)


def lie(primitive, rule, x=X):
    """What is said of a rule that is not true."""
    gshard.rule(primitive)(rule)
    with pytest.raises(RuleError) as error:
        check_rule(lambda x: primitive.bind(x), x, primitive=primitive)
    text = str(error.value)
    assert f"the rule of '{primitive.name}'" in text
    assert "at test_rule_checks.py:" in text
    return text


def test_true_rules_pass():
    for primitive, rule, splits in (
        (softmax_p, "a b -> a b; replicate b", 4),
        (total_p, "a b -> a; add over b", 10),
        (placed_p, "a b -> a b; replicate a", 4),
        (squares_p, "a b -> a b", 10),
    ):
        gshard.rule(primitive)(rule)
        found = check_rule(lambda x, p=primitive: p.bind(x), X, primitive=primitive)
        assert len(found) == len(set(found)) == splits


def test_a_dimension_that_is_mixed_is_not_parallel():
    text = lie(softmax_p, "a b -> a b")
    assert "is not true of factor 'b': split, it computes something else" in text
    assert "rule: a b -> a b; split b@a" in text
    assert "result 0: element [0, 0] is" in text
    assert "of 70 differ" in text
    assert "Do elements along 'b' meet?" in text


def test_the_wrong_monoid():
    text = lie(total_p, "a b -> a; max over b")
    assert "is not true of factor 'b'" in text
    assert "Are parts along 'b' combined by 'max'?" in text


def test_where_a_part_begins_matters():
    assert "is not true of factor 'a'" in lie(placed_p, "a b -> a b")


def test_a_lie_about_several_factors_at_once():
    """Each alone would be right: elements are only counted over both."""
    count = primitive_of("told_count", lambda x: jnp.full_like(x, min(x.shape[0], 3) * min(x.shape[1], 3)))
    text = lie(count, "a b -> a b", X[:4, :4])
    unregister("told_count")
    assert "factor" in text


def test_padding_that_is_not_masked():
    """Ten elements over three devices: two of twelve are padding."""

    def rule(call):
        make = gshard.rules.RuleMaker()
        a, b = make.factor(call.in_shapes[0][0]), make.factor(call.in_shapes[0][1], "reduce", "add")
        return make.rule([[a, b]], [[a]], masks_itself=True)

    text = lie(total_p, rule)
    assert "split b@b" in text
    assert "element [0] is nan on device 0" in text
    assert "parts along b are padded" in text


def test_what_passes_uncombined_must_be_linear():
    def rule(call):
        make = gshard.rules.RuleMaker()
        dims = make.parallel(call.in_shapes[0])
        return make.rule([dims], [dims], linear=[("add", (0,))])

    text = lie(squares_p, rule)
    assert "is not true of add in operands [0]" in text
    assert "Leave it out of linear." in text


def test_a_local_that_forgets_its_neighbour():
    rule = gshard.rule(shifted_p)
    rule("a b -> a b; communicate a", local=lambda shards, x: shards.bind(x))
    with pytest.raises(RuleError, match=r"not true of factor 'a'[^$]*Does local fetch all"):
        check_rule(lambda x: shifted_p.bind(x), X[:6], primitive="told_shifted", mesh=2)

    def local(shards, x):
        atoms = shards.atoms(0)
        if not atoms:
            return shards.bind(x)
        parts = shards.mesh.count(atoms)
        if shards.note is not None:
            shards.note("collective_permute", atoms, x[-1:].nbytes if told else 0, x[-1:])
        last = lax.ppermute(x[-1:], atoms, [(i, (i + 1) % parts) for i in range(parts)])
        return [jnp.concatenate([last, x[:-1]])]

    told = True
    rule("a b -> a b; communicate a", local=local)
    assert check_rule(lambda x: shifted_p.bind(x), X[:6], primitive="told_shifted", mesh=2)
    with pytest.raises(RuleError, match="parts along a are padded"):
        check_rule(lambda x: shifted_p.bind(x), X, primitive="told_shifted", mesh=2)
    told = False
    with pytest.raises(RuleError, match=r"what it does not report[^$]*'collective_permute': 40, 'all_gather': 120\}"):
        check_rule(lambda x: shifted_p.bind(x), X[:6], primitive="told_shifted", mesh=2)


def test_a_local_of_the_wrong_shape_or_that_fails():
    gshard.rule(squares_p)("a b -> a b", local=lambda shards, x: [x[:1]])
    with pytest.raises(RuleError, match=r"made a part of shape \(1, 10\)"):
        check_rule(lambda x: squares_p.bind(x), X)
    gshard.rule(squares_p)("a b -> a b", local=lambda shards, x: [x / 0 + undefined])  # noqa: F821
    with pytest.raises(RuleError, match="failed on shards"):
        check_rule(lambda x: squares_p.bind(x), X)


def test_what_there_is_nothing_to_check_of():
    with pytest.raises(RuleError, match=r"has no equation of primitive 'sin'[^$]*it has: cos"):
        check_rule(jnp.cos, X, primitive="sin")
    with pytest.raises(RuleError, match="'sin' outside of its loops"):
        check_rule(lambda x: lax.map(jnp.sin, x), X, primitive="sin")
    with pytest.raises(RuleError, match="primitive 'invented' has no rule"):
        check_rule(invented, X)
    assert check_rule(lambda x: jnp.linalg.cholesky(x @ x.T + 9 * np.eye(7)), X, primitive="cholesky") == ()


def test_operands_may_be_made_inside_and_results_may_be_keys():
    assert check_rule(lambda x: jnp.cumsum(jnp.sin(x).T @ x, 0), X, primitive="cumsum", most=4)
    keys = jax.random.split(jax.random.key(3), 7)
    assert check_rule(lambda k: jnp.broadcast_to(k[:, None], (7, 4)), keys, primitive="broadcast_in_dim", most=4)
    assert check_rule(lambda x: jnp.where(x > 0, x, 2.0), X, mesh=gshard.Mesh.abstract(x=4), most=5)


def test_a_mesh_of_ones_own():
    found = check_rule(jnp.cumsum, X[0], primitive="cumsum", mesh=4)
    assert {"a@devices", "a@devices.0", "a@devices.1,devices.0"} <= set(found)
