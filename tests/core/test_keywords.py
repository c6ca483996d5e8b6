"""Unknown names of arguments are refused with the nearest."""

import inspect

import pytest

import gshard
from gshard.core.keywords import keywords


@keywords("Write half(3).")
def half(length: float, by: float = 2) -> float:
    return length / by


def test_known_names_are_given() -> None:
    assert (half(3), half(length=3), half(3, by=3)) == (1.5, 1.5, 1)
    assert list(inspect.signature(half).parameters) == ["length", "by"]


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ({"lenth": 3}, "has no argument 'lenth'", "Did you mean 'length'? Write half(3)."),
        ({"qqq": 3}, "has no argument 'qqq'", "Write half(3)."),
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
