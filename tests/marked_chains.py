"""Random chains of products with marks, and texts of their plans: for laws about what a plan depends on.

Run as a program it plans all of them in the given order and prints the texts as JSON: a process of its own, in which
nothing was planned before.

    python tests/marked_chains.py forwards
"""

import json
import random
import sys

import jax
import jax.numpy as jnp

import gshard
from gshard import split
from gshard.solver.solve import solve
from random_problems import layered

# The mesh, the machine, and how many programs.
MESHES = {
    "one axis": ({"a": 8}, None, 3),
    "two axes, a machine": ({"a": 4, "b": 2}, "h100:1x8", 3),
    "three axes": ({"a": 2, "b": 2, "c": 2}, None, 6),
    "three axes, a machine": ({"a": 2, "b": 2, "c": 2}, "v5e:8", 2),
    "four axes": ({"a": 2, "b": 2, "c": 2, "d": 2}, None, 20),
}


def chain(seed, axes):
    """A program of two products and what is made of them, with some marks, and the shapes of its arguments.

    There are few shapes, so that programs share what planning knows of a shape.
    """
    numbers = random.Random(seed)
    m, n = numbers.choice([16, 32]), numbers.choice([32, 64])
    first, second, third, fourth = (numbers.sample(axes, len(axes)) * 4)[:4]
    drawn = [numbers.random() for _ in range(3)]

    def f(x, w1, w2):
        x = split(x, 0, first) if drawn[0] < 0.8 else x
        h = jnp.tanh(x @ split(w1, 1, second))
        h = split(h, 0, third) if drawn[1] < 0.5 else h
        y = h @ w2
        y = split(y, 1, fourth) if drawn[2] < 0.5 else y
        return (y.T @ x).sum(0), jnp.sin(y).reshape(-1), h @ w1.T

    return f, ((m, n), (n, 64), (64, m))


def every_chain():
    """Name, program, mesh, machine and arguments of each."""
    for on, (axes, machine, count) in MESHES.items():
        for seed in range(count):
            f, shapes = chain(seed, tuple(axes))
            arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
            yield f"{on}, {seed}", f, gshard.Mesh.abstract(**axes), machine, arguments


def text_of(lowered):
    """Everything that was decided: the plan, and what is sent."""
    sent = [f"{c.kind} {c.atoms} {c.total_bytes}" for c in lowered.spmd.collectives]
    return "\n".join([str(lowered.plan), *sent])


def texts(backwards):
    """The plans, made in this order; a plan that was searched; and what the solver makes of a large problem."""
    found = list(every_chain())
    made = {
        name: text_of(gshard.jit(f, mesh=mesh, machine=machine).lower(*arguments))
        for name, f, mesh, machine, arguments in (reversed(found) if backwards else found)
    }
    _, f, mesh, machine, arguments = found[3]
    best = gshard.search(f, *arguments, mesh=mesh, machine=machine, progress=False)
    solution = solve(layered(0, layers=10, width=4))
    made["searched"] = f"{best.plan} {best.cost.seconds} {best.bound}"
    return made | {"solved": f"{solution.states.tolist()} {solution.value} {solution.bound} {solution.steps}"}


if __name__ == "__main__":
    print(json.dumps(texts(sys.argv[1] == "backwards")))
