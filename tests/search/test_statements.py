"""Marks as statements: a function with them has the plan of the marks."""

import ast
import dataclasses

import jax.numpy as jnp
import pytest

import gshard
from gshard.core.number_text import significant
from gshard.device.cost import cost
from gshard.device.machine import Machine
from search.test_search import shape
from training_files import loaded

SOURCE = '''"""A model."""

import jax
import jax.numpy as jnp


def net(x, a, b):
    h = x @ a
    y = (
        jax.nn.relu(h) @ b
    )
    return y * 2


def chosen(x, a, b):
    return net(x, a, b) + jnp.exp(x).sum()
'''
MESH = gshard.Mesh.abstract(x=8)


def write_statements(path, name, marks):
    """Writes the statements of marks in front of the first statement of a function of a file."""
    lines = path.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    first = found.body[ast.get_docstring(found) is not None]
    begin = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))]) - 1
    indent = " " * first.col_offset
    imports = ["import gshard", "import jax"]
    place = next(i for i, line in enumerate(lines) if line.startswith(("import ", "from ")))
    rows = [indent + row for row in marks.statements]
    path.write_text("\n".join([*lines[:place], *imports, *lines[place:begin], *rows, *lines[begin:]]) + "\n")


def test_a_function_with_the_statements_takes_what_the_marks_took(tmp_path):
    """With no time it prints how far the unmarked program is from the plan; with more time it looks again."""
    (tmp_path / "model.py").write_text(SOURCE)
    arguments, machine = (shape(4096, 4096), shape(4096, 8192), shape(8192, 4096)), Machine.of("h100:1x8")
    step = gshard.jit(loaded(tmp_path / "model.py", "model_bare").net, mesh=MESH)
    found, lines = gshard.search(step, *arguments, machine=machine), []
    short = dataclasses.replace(found, budget_seconds=1e-6, progress=lines.append).marks
    assert [line.partition(": ")[2] for line in lines] == ["the program without further marks"]
    bare = short.bare.cost.seconds
    assert not short.marks
    assert not short.statements
    assert bare > 1.1 * found.cost.seconds
    above = f"{significant(100 * (bare / found.cost.seconds - 1), 2)} % above the plan"
    assert f"{bare * 1e3:.4g} ms without a further mark, {above}" in str(short)
    assert "the time was over after" in str(short)
    assert "not tried, or cut: further marks" in str(short)
    lines.clear()
    found = dataclasses.replace(found, progress=lines.append)
    assert found.marks.statements
    assert len(lines) > 1
    assert "as the plan" in found.marks.nearness
    assert str(found.marks).endswith("\n  ".join(["in front of the first statement of net:", *found.marks.statements]))
    write_statements(tmp_path / "model.py", "net", found.marks)
    marked = loaded(tmp_path / "model.py", "model_marked").net
    after = gshard.jit(marked, mesh=MESH, machine=machine).lower(*arguments)
    assert cost(after.spmd, machine).seconds == pytest.approx(found.marks.seconds)


def test_what_is_found_later_has_the_time_of_the_search():
    def f(x, w):
        return jnp.tanh(x @ w)

    given = {"mesh": MESH, "machine": "h100:1x8", "progress": False}
    found = gshard.search(f, shape(4096, 4096), shape(4096, 8192), budget_seconds=1e-6, **given)
    assert found.budget_seconds == 1e-6
    assert found.marks.left_out == ("further marks",) or found.marks.is_near
    longer = dataclasses.replace(found, budget_seconds=60)
    assert not longer.marks.left_out
