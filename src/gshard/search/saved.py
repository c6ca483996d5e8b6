"""Saves a planning problem to a file of plain arrays (``.npz``, nothing pickled), and loads it.

>>> import io
>>> file = io.BytesIO()
>>> save_problem(Problem.of([[0, 3], [1, 0]], limit=6), file)
>>> _ = file.seek(0)
>>> load_problem(file).value([1, 0])
4.0
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np

from gshard.solver.problem import Floats, Ints, Problem


def save_problem(problem: Problem, path: str | Path | IO[bytes]) -> None:
    """Writes a problem to a file. The path is used unchanged."""
    flat: dict[str, Any] = {
        "states": problem.states,
        "costs": problem.cost,
        "ends": problem.ends,
        "tables": np.concatenate([np.zeros(0), *(table.ravel() for table in problem.tables)]),
        "loads": np.array([load[:3] for load in problem.loads], dtype=np.int64).reshape(-1, 3),
        "bytes": np.concatenate([np.zeros(0), *(load.bytes for load in problem.loads)]),
        "limit": np.array([np.inf if problem.limit is None else problem.limit]),
        "names": np.array(problem.names, dtype=np.str_),
    }
    if isinstance(path, str | Path):  # numpy would give a path the ending .npz
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **flat)
    else:
        np.savez_compressed(path, **flat)


def load_problem(path: str | Path | IO[bytes]) -> Problem:
    """Reads a problem that ``save_problem`` wrote, and checks it."""
    with np.load(path, allow_pickle=False) as file:
        states, ends, loads = file["states"], file["ends"], file["loads"]
        limit = float(file["limit"][0])
        return Problem.of(
            np.split(file["costs"], np.cumsum(states)[:-1]) if states.size else (),
            [
                (int(u), int(v), part.reshape(states[u], states[v]))
                for (u, v), part in zip(ends, _parts(file["tables"], states[ends[:, 0]] * states[ends[:, 1]]))
            ],
            [
                (int(i), int(a), int(b), part)
                for (i, a, b), part in zip(loads, _parts(file["bytes"], states[loads[:, 0]]))
            ],
            None if np.isinf(limit) else limit,
            [str(name) for name in file["names"]],
        )


def _parts(flat: Floats, sizes: Ints) -> list[Floats]:
    return np.split(flat, np.cumsum(sizes)[:-1]) if sizes.size else []
