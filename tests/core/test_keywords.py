"""Old names of arguments work with a warning; unknown ones are refused with the nearest."""

import inspect
import warnings

import jax.numpy as jnp
import pytest

import gshard
from gshard.core.keywords import keywords


@keywords("Write half(3).", size="length")
def half(length: float, by: float = 2) -> float:
    return length / by


def test_new_names_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (half(3), half(length=3), half(3, by=3)) == (1.5, 1.5, 1)
    assert list(inspect.signature(half).parameters) == ["length", "by"]


def test_an_old_name_warns_at_the_users_line() -> None:
    with pytest.warns(DeprecationWarning, match=r"size= of gshard.half is now called length=") as caught:
        assert half(size=3, by=3) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ({"lenth": 3}, "has no argument 'lenth'", "Did you mean 'length'? Write half(3)."),
        ({"qqq": 3}, "has no argument 'qqq'", "Write half(3)."),
        ({"size": 3, "length": 3}, "got length= and its old name size=", "Give length=."),
    ],
)
def test_wrong_names_are_refused(given: dict[str, float], what: str, hint: str) -> None:
    with pytest.raises(gshard.ArgumentError) as caught:
        half(**given)
    assert what in caught.value.what
    assert caught.value.hint == hint
    assert caught.value.where is not None
    assert "test_keywords.py" in caught.value.where
    assert isinstance(caught.value, TypeError)


def test_old_names_of_the_public_functions() -> None:
    x = jnp.arange(16.0).reshape(8, 2)
    with pytest.warns(DeprecationWarning, match=r"num_partitions= of gshard.split is now called over="):
        assert (gshard.split(x, 0, num_partitions=8) == x).all()
    with pytest.warns(DeprecationWarning, match=r"device_assignment= of gshard.shard is now called spec="):
        assert (gshard.shard(x, device_assignment=None) == x).all()
    with pytest.warns(DeprecationWarning, match=r"windowed= of gshard.jit is now called collective_matmul="):
        made = gshard.jit(lambda x: 2 * gshard.split(x, 0, 8), mesh=8, windowed=True)
    assert made.options.collective_matmul is True
    assert (made(x) == 2 * x).all()
    with pytest.warns(DeprecationWarning, match=r"windowed= of gshard.jit "):
        decorator = gshard.jit(mesh=8, windowed=False)
    assert decorator(lambda x: x).options.collective_matmul is False
    with pytest.warns(DeprecationWarning, match=r"windowed= of gshard.instead_of_jit"):
        gshard.instead_of_jit(mesh=8, windowed=True)


@pytest.mark.parametrize(
    ("old", "new"), [("Windowed", "CollectiveMatmul"), ("Recorded", "SavedPlan"), ("Found", "SearchResult")]
)
def test_old_names_of_the_public_classes(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"gshard.{old} is now called gshard.{new}") as caught:
        found = getattr(gshard, old)
    assert caught[0].filename == __file__
    assert found is getattr(gshard, new)
    assert old not in dir(gshard)
