"""Lines of helpers: a row has the line that calls one, and the loss of a model is none."""

import pytest

from gshard.explanation.places import Place, helpers_of, place_in


def chains(*texts):
    """``dense:3 attention:20 loss:8``: the frames of an operation, innermost first."""
    words = [[word.split(":") for word in text.split()] for text in texts]
    return [[(f"/{name}.py", int(line), name) for name, line in frames] for frames in words]


@pytest.mark.parametrize(
    "calls, shown",
    [
        (["dense:3 loss:8", "dense:3 loss:9"], ["loss.py:8 via dense.py:3", "loss.py:9 via dense.py:3"]),
        (["dense:3 loss:8", "dense:3 loss:8"], ["dense.py:3"] * 2),  # a loop over layers
        # called from two lines, and shows two
        (["loss:8 step:1", "loss:9 step:1", "loss:8 test:1"], ["loss.py:8", "loss.py:9", "loss.py:8"]),
        # a helper of a helper; two layers that call helpers, and are called from two stacks
        (
            ["dot:1 dense:3 mlp:8 a:1", "dot:1 dense:3 mlp:9 a:1", "dot:1 dense:3 mlp:9 b:2"],
            ["mlp.py:8 via dot.py:1", "mlp.py:9 via dot.py:1", "mlp.py:9 via dot.py:1"],
        ),
        (["dense:3 mlp:5 loss:8", "dense:3 mlp:5 loss:9"], ["loss.py:8 via dense.py:3", "loss.py:9 via dense.py:3"]),
        # what JAX traced once for two calls has the frames of both
        (
            ["dense:3 loss:8 step:1 main:1", "dense:3 loss:9 step:1 dense:3 loss:8 step:1 main:1"],
            ["loss.py:8 via dense.py:3", "loss.py:9 via dense.py:3"],
        ),
        (["tree:2 tree:4 tree:4 loss:8", "tree:3 tree:4 loss:9"], ["tree.py:2", "tree.py:3"]),  # a recursion
        (
            ["dense:3", "dense:3 loss:8", "dense:3 loss:9"],
            ["dense.py:3", "loss.py:8 via dense.py:3", "loss.py:9 via dense.py:3"],
        ),
        ([""], [None]),
    ],
)
def test_the_line_of_a_row_is_that_of_what_calls_a_helper(calls, shown):
    frames = chains(*calls)
    places = [place_in(each, helpers_of(frames)) for each in frames]
    assert [place and place.text for place in places] == shown


def test_a_file_whose_name_is_not_enough_keeps_it():
    frames = (
        [("/a/layers.py", 3, "dense"), ("/a/layers.py", 8, "mlp")],
        [("/a/layers.py", 3, "dense"), ("/m.py", 9, "f")],
    )
    first, second = (place_in(each, helpers_of(frames), "a/layers.py") for each in frames)
    assert first == Place("/a/layers.py", 8, "a/layers.py", ("/a/layers.py", 3))
    assert (first.text, second.text) == ("a/layers.py:8 via layers.py:3", "m.py:9 via layers.py:3")
