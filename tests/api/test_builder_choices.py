"""Choices of a builder: where the values of its keywords come from, and one clear error for what has none."""

from typing import Any, Literal

import jax
import pytest

import gshard
from gshard.api.configure import POLICIES, choices_of, combinations


def full(micro_batches: int, recompute: str, fused: bool, kind: Literal["a", "b"], width: int = 8) -> Any: ...


def test_values_of_names_annotations_and_choices():
    found, fixed = choices_of(full, 12, None)
    named = {"micro_batches": (1, 2, 3, 4, 6, 12), "recompute": POLICIES}
    assert found == named | {"fused": (False, True), "kind": ("a", "b")}
    assert not fixed
    given = {"micro_batches": [3], "kind": ["a"], "width": range(2), "recompute": ["x"]}
    found, _ = choices_of(full, 12, given)
    assert found == {key: tuple(values) for key, values in given.items()} | {"fused": (False, True)}


def test_the_global_batch_is_passed_on_policies_are_those_of_jax_and_combinations_are_all():
    assert all(callable(getattr(jax.checkpoint_policies, name)) for name in POLICIES)
    assert list(combinations({"a": (1, 2), "b": ("x",)})) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert choices_of(lambda global_batch, micro_batches: None, 4, None) == (
        {"micro_batches": (1, 2, 4)},
        {"global_batch": 4},
    )
    assert choices_of(lambda **keywords: None, None, {"a": [1, 2]}) == ({"a": (1, 2)}, {})


def needs(layers: int, micro_batches: int) -> Any: ...


@pytest.mark.parametrize(("builder", "batch", "choices", "message"), [
    (3, 8, None, "takes a builder, not a int"), (lambda: None, 8, None, "has no keyword to choose"),
    (lambda width=8: None, 8, None, "has no keyword to choose"),
    (needs, 8, None, "needs 'layers', for which there are no values"),
    (lambda x, /: None, 8, {"y": [1]}, "has no keyword 'y'"),
    (lambda micro_batches: None, None, None, "gshard does not have the batch to divide"),
    (lambda global_batch, micro_batches: None, None, {"micro_batches": [1]}, "takes global_batch"),
    (lambda micro_batches: None, 8, {"micro_batches": [1, 3]}, "not divided evenly by 3"),
    (lambda micro_batches: None, 8, {"micro_batches": [0]}, "not divided evenly by 0"),
    (lambda micro_batches: None, 8, {"micro_batches": ["4"]}, "not divided evenly by '4'"),
    (lambda micro_batches: None, 8, {"micro_batch": [1]}, "Did you mean|has no keyword 'micro_batch'"),
    (lambda recompute: None, 8, {"recompute": "full"}, "no list of values"),
    (lambda recompute: None, 8, {"recompute": []}, "no list of values"),
    (lambda recompute: None, 0, None, "global_batch=0 is no number"),
    (lambda recompute: None, True, None, "global_batch=True is no number"),
    (lambda recompute: None, 2.5, None, "global_batch=2.5 is no number"),
])  # fmt: skip
def test_mistakes(builder, batch, choices, message):
    with pytest.raises(gshard.ArgumentError, match=message):
        choices_of(builder, batch, choices)
