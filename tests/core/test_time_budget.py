"""Moves: each is tried in its time."""

import itertools

from gshard.core.time_budget import tried


def test_moves_are_tried_as_long_as_another_one_ends_in_time():
    """A clock that counts how often it is read: a trial takes two ticks."""
    for seconds, count in ((0, 0), (1e-9, 1), (8, 4), (1e9, 5)):
        made = list(tried(range(5), lambda move: 10 * move, seconds, itertools.count().__next__))
        assert made == [(move, 10 * move) for move in range(count)], seconds
