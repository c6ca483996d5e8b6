"""Rules as text: what they read as, what they print as again, and what is refused, in whose words."""

import pytest

from gshard.core.errors import RuleError
from gshard.language.notation import check_without_local, parse
from gshard.language.registry import Call, contradiction
from harness import rows


def call(operands, *results):
    return Call("my_op", {}, tuple(operands), results, ("f4",) * len(operands))


@pytest.mark.parametrize(
    "text, operands, result, printed",
    [
        ("a b, b c -> a c; add over b", [(7, 5), (5, 3)], (7, 3), "a b, b c -> a c; add over b=5"),
        ("row in, in out->row out;  max over in", [(7, 5), (5, 3)], (7, 3), "a b, b c -> a c; max over b=5"),
        ("(a b) c -> a b c; a=2", [(6, 5)], (2, 3, 5), "(a b) c -> a b c"),
        ("(a b) -> b a", [(6,)], (3, 2), "(a b) -> b a"),
        ("(a b) -> a; replicate b=2", [(6,)], (3,), "(a b) -> a; replicate b"),
        ("a b -> a; add over b=5", [(7, 5)], (7,), "a b -> a; add over b=5"),
        ("... a, a -> ... a", [(2, 3, 4), (4,)], (2, 3, 4), "a b c, c -> a b c"),
        ("... a -> ...; add over a", [(4,)], (), "a -> (); add over a=4"),
        ("... a -> ... b; replicate a b", [(3, 4)], (3, 9), "a b -> a c; replicate b c"),
        ("a (), () -> a", [(), ()], (3,), None),
        ("a, () -> a", [(3,), ()], (3,), "a, () -> a"),
        ("a 1 -> a", [(3, 1)], (3,), "a 1 -> a"),
        ("a -> a; communicate a", [(6,)], (4,), "a -> a; communicate a"),
        (" -> a; replicate a", [], (4,), " -> a; replicate a"),
        ("a b, c -> a, c; min over b, xor over c", [(2, 3), (3,)], (2,), None),
        ("a b c -> c; add over a b", [(2, 3, 4)], (4,), "a b c -> c; add over a=2; add over b=3"),
    ],
)
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


@pytest.mark.parametrize(
    "text, message",
    [
        ("a b", "needs one arrow"),
        ("a -> b -> c", "needs one arrow"),
        ("a b -> a c; add over d", "no array has a factor 'd'"),
        ("a b -> a", "'b' stands in no result"),
        ("a b -> a b; add over b", "'b' is reduced and stands in a result"),
        ("a b -> a; sum over b", "'sum over b' says nothing of a factor"),
        ("a b -> a; add over b; replicate b", "'b' is of two kinds"),
        ("a a -> a", "'a' stands twice in one array"),
        ("a b -> a b; a=x", "'x' is no size"),
        ("(a b -> a b", "is no array"),
        ("a, -> a", "an array is missing"),
        ("a+ -> a", "is no array"),
        ("(... a) -> a", "'...' is a dimension by itself"),
    ],
)
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


@pytest.mark.parametrize(
    "text, operands, result, message",
    [
        ("a b -> a b", [(2, 3), (2, 3)], (2, 3), "is for 1 operand, and there are 2"),
        ("a, b -> a", [(2,), (2,)], (2,), None),
        ("a b -> a b", [(2, 3, 4)], (2, 3), "gives operand 0 2 dimensions, and it has 3"),
        ("a b -> b a", [(2, 3)], (2, 3), "has 'b' be 3 in dimension 1 of operand 0 and 2 in dimension 0 of result 0"),
        ("(a b) -> a b", [(7,)], (2, 3), "has dimension 0 of operand 0 be a=2 * b=3, and it is 7"),
        ("(a b) -> (a b)", [(6,)], (6,), "leaves the size of 'a' open"),
        ("... a, ... a -> ... a", [(2, 3), (3,)], (2, 3), "different numbers of dimensions: 1 in operand 0, 0 in"),
        ("a 1 -> a", [(2, 3)], (2,), "has dimension 1 of operand 0 be 1, and it is 3"),
        ("a b -> a b; b=4", [(2, 3)], (2, 3), "has 'b' be 4 in the text and 3 in dimension 1 of operand 0"),
    ],
)
def test_text_that_does_not_fit(text, operands, result, message):
    if message is None:
        with pytest.raises(RuleError, match="'b' stands in no result"):
            parse(text)
        return
    with pytest.raises(RuleError) as error:
        parse(text).rule(call(operands, result))
    assert message in str(error.value)
    assert "equation: my_op f4[" in str(error.value)
