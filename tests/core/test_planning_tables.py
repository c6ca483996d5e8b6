"""Tables: results are kept while something is planned, by its thread alone, and not longer."""

import contextlib
import gc
import threading
import weakref

from gshard.core.planning_tables import tables, tabulated, with_tables


class Key:
    """Something that can be followed."""


computed: list[object] = []


@tabulated(2)
def noted(key: object) -> int:
    computed.append(key)
    return len(computed)


@with_tables
def three_times(key: object) -> list[int]:
    return [noted(key) for _ in range(3)]


def test_results_are_kept_within_one_call_only() -> None:
    computed.clear()
    assert [three_times("a"), three_times("a")] == [[1, 1, 1], [2, 2, 2]]
    assert [noted("a"), noted("a")] == [3, 4]


def test_the_outermost_tables_count() -> None:
    computed.clear()
    with tables():
        assert three_times("a") == three_times("a") == [1, 1, 1]
        with tables():
            assert noted("a") == 1
        assert noted("a") == 1
    assert noted("a") == 2


def test_as_many_as_said_are_kept() -> None:
    computed.clear()
    with tables():
        for key in "abcab":
            noted(key)
    assert computed == list("abcab")


def test_nothing_is_kept_afterwards() -> None:
    key = Key()
    seen = weakref.ref(key)
    three_times(key)
    computed.clear()
    del key
    gc.collect()
    assert seen() is None


def test_another_thread_has_its_own() -> None:
    computed.clear()
    with tables():
        noted("a")
        thread = threading.Thread(target=three_times, args=("a",))
        thread.start()
        thread.join()
        noted("a")
    assert computed == ["a", "a"]


def test_tables_end_with_an_error() -> None:
    computed.clear()

    @with_tables
    def fails() -> None:
        noted("a")
        raise ValueError

    for _ in range(2):
        with contextlib.suppress(ValueError):
            fails()
    assert computed == ["a", "a"]
