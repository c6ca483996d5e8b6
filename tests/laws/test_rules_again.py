"""The law: a rule that is registered anew counts from then on, for functions jitted before and after."""

import gc

import jax
import numpy as np
import pytest

import gshard
from gshard.language.registry import unregister
from invented import primitive_of
from placed import PLACES, mesh_of

centre_p = primitive_of("centred_again", lambda x: x - x.sum(0, keepdims=True))
RIGHT, WRONG = "a b -> a b; replicate a", "a b -> a b"
X = np.random.default_rng(2).integers(-9, 9, (16, 3)).astype(np.int32)
WANT = X - X.sum(0, keepdims=True, dtype=np.int32)


@pytest.fixture(autouse=True)
def unregistered():
    gc.freeze()  # what earlier tests left is not looked through again and again
    yield
    unregister("centred_again")


def centred(x):
    return centre_p.bind(gshard.split(x, 0, 8))


@pytest.mark.parametrize("anew", [False, True], ids=["one function", "jitted anew"])
def test_the_right_rule_takes_the_place_of_a_wrong_one(anew):
    """Again and again: memory of an old rule is used for the next one, which must not be taken for it."""
    mesh = mesh_of(d=8)
    jitted = gshard.jit(centred, mesh=mesh)
    for _ in range(4):
        for text, right in ((WRONG, False), (RIGHT, True)):
            gshard.rule("centred_again")(text)
            gc.collect()
            call = gshard.jit(centred, mesh=mesh) if anew else jitted
            for way in ("numpy", "rows", "another device"):
                same = bool((np.asarray(call(PLACES[way](X, mesh))) == WANT).all())
                assert same is right, f"{text}, {way}"


def test_around_and_inside_others():
    gshard.rule("centred_again")(WRONG)
    jitted = gshard.jit(centred, mesh=8)
    around = gshard.jit(lambda x: jitted(x) * 2, mesh=8)
    inside = jax.jit(lambda x: jitted(x) * 2)
    wrong = [np.asarray(f(X)) for f in (around, inside)]
    gshard.rule("centred_again")(RIGHT)
    for f, before in zip((around, inside), wrong, strict=True):
        assert (before != WANT * 2).any(), "the wrong rule was not followed"
        if f is around:
            for _ in range(3):
                np.testing.assert_array_equal(f(X), WANT * 2)
    compiled = jitted.lower(X).compile()
    for _ in range(3):
        np.testing.assert_array_equal(compiled(X), WANT)
