"""The table of rules, their traits, and the notation in which they are written."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from gshard.core.errors import RuleError
from gshard.core.jax_adapter import bind
from gshard.core.program import Constant
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE
from gshard.language.custom import check_without_local, parse
from gshard.language.registry import Call, contradiction, own_rules, rule
from gshard.language.traits import names_where, traits_of
from harness import Row, rows
from invented import invented


def equations(row):
    return [e for e in row.program.block.walk() if e.rule is not None]


@pytest.fixture(scope="module")
def traced():
    """The equations of every row of the table that have a rule."""
    return {row.name: equations(row) for row in rows()}


def check(traced, wrong_with):
    """Fails with all that is wrong with the rule of any equation."""
    assert len(traced) > 400
    wrong = [
        f"{name}: {found}: {e.rule}"
        for name, own in traced.items()
        for e in own
        if e.rule is not None
        for found in wrong_with(e, e.rule)
    ]
    assert not wrong, "\n".join(wrong)


def test_factors_add_up(traced):
    def wrong(e, rule):
        arrays = list(zip((*e.inputs, *e.outputs), (*rule.operands, *rule.results), strict=True))
        for value, dims in arrays:
            if len(value.shape) != len(dims):
                yield f"{value} has {len(dims)} dimensions"
            for n, dim in zip(value.shape, dims, strict=False):
                kinds = {rule.factors[f].kind for f in dim}
                size = math.prod(rule.factors[f].size for f in dim)
                if COMMUNICATE in kinds or (kinds == {REPLICATE} and size != n):
                    if len(dim) != 1:
                        yield "what is communicated (or would be, were it not of keys) is its own dimension"
                    if n > size:
                        yield f"a factor of {size} has {n} elements"
                elif not (rule.masks_itself and REDUCE in kinds) and dim and size != n:
                    yield f"factors of a dimension of {n} multiply to {size}"
            used = [f for dim in dims for f in dim]
            if len(set(used)) != len(used):
                yield f"a factor stands twice in {value}"
        if {f for _, dims in arrays for dim in dims for f in dim} != set(range(len(rule.factors))):
            yield "a factor that no array has"

    check(traced, wrong)


def test_kinds_and_monoids(traced):
    def wrong(e, rule):
        for f, factor in enumerate(rule.factors):
            if factor.kind not in (PARALLEL, REDUCE, COMMUNICATE, REPLICATE):
                yield f"a kind {factor.kind}"
            if (factor.monoid is not None) != (factor.kind == REDUCE):
                yield f"a {factor.kind} factor has the monoid {factor.monoid}"
            # It may be a dimension of some results and be summed over for others, as in a gradient.
            if factor.kind == REDUCE and all(any(f in dim for dim in dims) for dims in rule.results):
                yield f"the factor {f} is reduced and in every result"
            others = {g for g in range(len(rule.factors)) if rule.component[g] != rule.component[f]}
            for dims in (*rule.operands, *rule.results):
                here = {g for dim in dims for g in dim}
                if f in here and here & others:
                    yield "factors of one array do not compete for atoms"
        if rule.flops < 0:
            yield f"{rule.flops} FLOPs"

    check(traced, wrong)


def test_a_primitive_without_a_rule_is_whole_in_every_factor():
    (e,) = equations(Row("invented", "invented", invented, (jnp.ones((4, 3)),)))
    assert e.rule is not None
    assert not e.rule.known
    assert {factor.kind for factor in e.rule.factors} == {REPLICATE}
    assert str(e.rule) == "a b -> c d; replicate a b c d"


def test_a_primitive_has_one_rule():
    before = own_rules()

    def again(call):
        raise AssertionError("never asked")

    with pytest.raises(RuleError, match="'transpose' has a rule already"):
        rule("transpose")(again)
    assert own_rules() == before


FOLLOWED = sorted(names_where(lambda traits: traits.values) & set(own_rules()))
ROWS = [row for row in rows() if row.primitive in FOLLOWED]


DIVIDING = {"div", "rem"}


def some(x, seed):
    """An array of whole numbers that vary in sign, of a value's shape and dtype."""
    low, high = (0, 2) if x.dtype == bool else (-5, 5)
    return np.asarray(np.random.default_rng(seed).integers(low, high, x.shape), x.dtype)


@pytest.mark.parametrize("primitive", FOLLOWED)
def test_values_are_what_the_operator_gives(primitive):
    count = 0
    for row in (row for row in ROWS if row.primitive == primitive):
        for e in row.program.block.walk():
            if e.name != primitive or not all(isinstance(x.dtype, np.dtype) for x in e.inputs):
                continue
            arrays = [np.asarray(x.value) if isinstance(x, Constant) else some(x, i) for i, x in enumerate(e.inputs)]
            if primitive in DIVIDING:
                arrays[1] = np.full_like(arrays[1], 2)
            follow = traits_of(primitive).values
            assert follow is not None
            with np.errstate(all="ignore"):
                made = follow(e.params, *(a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays))
            if made is not None:
                (want,) = bind(e.primitive, e.params, arrays)
                np.testing.assert_array_equal(np.asarray(made).astype(want.dtype), want)
                count += 1
    assert count


def test_names_without_traits_have_the_defaults():
    assert not traits_of("no such primitive").elementwise
    assert traits_of("no such primitive").pure


def call(operands, *results):
    return Call("my_op", {}, tuple(operands), results, ("f4",) * len(operands))


@pytest.mark.parametrize("text, operands, result, printed", [
    ("a b, b c -> a c; add over b", [(7, 5), (5, 3)], (7, 3), "a b, b c -> a c; add over b=5"),
    ("row in, in out->row out;  max over in", [(7, 5), (5, 3)], (7, 3), "a b, b c -> a c; max over b=5"),
    ("(a b) c -> a b c; a=2", [(6, 5)], (2, 3, 5), "(a b) c -> a b c"),
    ("(a b) -> b a", [(6,)], (3, 2), "(a b) -> b a"),
    ("(a b) -> a; replicate b=2", [(6,)], (3,), "(a b) -> a; replicate b"),
    ("a b -> a; add over b=5", [(7, 5)], (7,), "a b -> a; add over b=5"),
    ("... a, a -> ... a", [(2, 3, 4), (4,)], (2, 3, 4), "a b c, c -> a b c"),
    ("... a -> ...; add over a", [(4,)], (), "a -> (); add over a=4"),
    ("... a -> ... b; replicate a b", [(3, 4)], (3, 9), "a b -> a c; replicate b c"),
    ("a (), () -> a", [(), ()], (3,), None), ("a, () -> a", [(3,), ()], (3,), "a, () -> a"),
    ("a 1 -> a", [(3, 1)], (3,), "a 1 -> a"), ("a -> a; communicate a", [(6,)], (4,), "a -> a; communicate a"),
    (" -> a; replicate a", [], (4,), " -> a; replicate a"),
    ("a b, c -> a, c; min over b, xor over c", [(2, 3), (3,)], (2,), None),
    ("a b c -> c; add over a b", [(2, 3, 4)], (4,), "a b c -> c; add over a=2; add over b=3"),
])  # fmt: skip
def test_text_is_read(text, operands, result, printed):
    if printed is None:
        with pytest.raises(RuleError):
            parse(text)
        return
    one = call(operands, result)
    rule = parse(text).rule(one)
    assert str(rule) == printed
    if "communicate" not in text:
        assert contradiction(rule, one) is None


def test_what_a_rule_prints_is_read_as_the_same_rule():
    for row in rows():
        for e in row.program.block.walk():
            if e.rule is None or not all((*(x.shape for x in e.inputs), *(x.shape for x in e.outputs))):
                continue
            one = Call(e.name, {}, tuple(x.shape for x in e.inputs), tuple(x.shape for x in e.outputs), ())
            sizes = "".join(f"; {n}={f.size}" for n, f in zip(e.rule.names, e.rule.factors))
            if contradiction(e.rule, one) is not None or any(
                not dim and n != 1 for x, t in zip(one.in_shapes, e.rule.operands) for n, dim in zip(x, t)
            ):
                continue
            # What the notation has no words for: dimensions that stand in no result and are not reduced.
            found = read_again(str(e.rule) + sizes, one)
            assert found == str(e.rule) or "in no result" in found, row.name


def read_again(text, one):
    try:
        return str(parse(text).rule(one))
    except RuleError as error:
        return error.what


@pytest.mark.parametrize("text, message", [
    ("a b", "needs one arrow"), ("a -> b -> c", "needs one arrow"),
    ("a b -> a c; add over d", "no array has a factor 'd'"), ("a b -> a", "'b' stands in no result"),
    ("a b -> a b; add over b", "'b' is reduced and stands in a result"),
    ("a b -> a; sum over b", "'sum over b' says nothing of a factor"),
    ("a b -> a; add over b; replicate b", "'b' is of two kinds"), ("a a -> a", "'a' stands twice in one array"),
    ("a b -> a b; a=x", "'x' is no size"), ("(a b -> a b", "is no array"), ("a, -> a", "an array is missing"),
    ("a+ -> a", "is no array"), ("(... a) -> a", "'...' is a dimension by itself"),
])  # fmt: skip
def test_text_that_is_no_rule(text, message):
    with pytest.raises(RuleError) as error:
        parse(text)
    assert message in str(error.value)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a -> a b", "'b' stands in a result only"),
        ("a -> a; communicate a", "'a' is communicated, and nothing says how"),
    ],
)
def test_text_that_needs_a_local(text, message):
    with pytest.raises(RuleError, match=message):
        check_without_local(parse(text))


@pytest.mark.parametrize("text, operands, result, message", [
    ("a b -> a b", [(2, 3), (2, 3)], (2, 3), "is for 1 operand, and there are 2"),
    ("a, b -> a", [(2,), (2,)], (2,), None),
    ("a b -> a b", [(2, 3, 4)], (2, 3), "gives operand 0 2 dimensions, and it has 3"),
    ("a b -> b a", [(2, 3)], (2, 3), "has 'b' be 3 in dimension 1 of operand 0 and 2 in dimension 0 of result 0"),
    ("(a b) -> a b", [(7,)], (2, 3), "has dimension 0 of operand 0 be a=2 * b=3, and it is 7"),
    ("(a b) -> (a b)", [(6,)], (6,), "leaves the size of 'a' open"),
    ("... a, ... a -> ... a", [(2, 3), (3,)], (2, 3), "different numbers of dimensions: 1 in operand 0, 0 in"),
    ("a 1 -> a", [(2, 3)], (2,), "has dimension 1 of operand 0 be 1, and it is 3"),
    ("a b -> a b; b=4", [(2, 3)], (2, 3), "has 'b' be 4 in the text and 3 in dimension 1 of operand 0"),
])  # fmt: skip
def test_text_that_does_not_fit(text, operands, result, message):
    if message is None:
        with pytest.raises(RuleError, match="'b' stands in no result"):
            parse(text)
        return
    with pytest.raises(RuleError) as error:
        parse(text).rule(call(operands, result))
    assert message in str(error.value)
    assert "equation: my_op f4[" in str(error.value)
