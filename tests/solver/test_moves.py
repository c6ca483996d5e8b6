"""Moves: each is tried in its time, and kept if what there is gets better with it."""

import itertools

from gshard.solver.moves import improve, tried


def test_moves_are_tried_as_long_as_another_one_ends_in_time():
    """A clock that counts how often it is read: a trial takes two ticks."""
    for seconds, count in ((0, 0), (1e-9, 1), (8, 4), (1e9, 5)):
        made = list(tried(range(5), lambda move: 10 * move, seconds, itertools.count().__next__))
        assert made == [(move, 10 * move) for move in range(count)], seconds


def test_a_move_is_kept_if_it_is_better_with_those_before():
    def price(moves):
        return None if 3 in moves else 100 - sum(moves)

    given = iter([5, -1, 3, 2, 7, 1])
    kept = improve(100, lambda best: given, price, lambda now, best: now < best, lambda best: best <= 90)
    assert kept == [(5, 95), (2, 93), (7, 86)]
    assert list(given) == [1], "it is enough"


def test_moves_may_follow_from_what_there_is():
    kept = improve(0, lambda best: iter([best + 1] if best < 3 else []), sum, lambda now, best: now > best)
    assert kept == [(1, 1), (2, 3)]
