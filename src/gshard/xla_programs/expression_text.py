"""Expression text: how a sharding constraint on the value of an expression is written into the user's file."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence

from gshard.core.jax_adapter_operations import Expression
from gshard.core.mark import text_of_spec
from gshard.xla_programs.traced_expressions import Constraint

_LONG = 60  # characters of an expression that are printed


class ExpressionTexts:
    """The source text of expressions; each file is read once."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, dict[tuple[int, ...], list[ast.AST]]]] = {}

    def written(self, constraint: Constraint) -> str:
        """What to write, and where: ``x = jax.lax.with_sharding_constraint(x, P("data")) after train.py:9``."""
        expression, spec = constraint.expression, constraint.spec
        place = expression.place
        at = f"{place.file.rpartition('/')[2]}:{place.line}"
        new = "" if spec is None else text_of_spec(spec)
        if expression.spec is not None:
            now = text_of_spec(expression.spec)
            return f"{at}: remove the constraint {now}" if spec is None else f"{at}: {new} instead of {now}"
        assert spec is not None, "nothing is removed"
        name, text = self._read(place)
        if name:
            end = f"{place.file.rpartition('/')[2]}:{max(place.line, place.end_line)}"
            return f"after {end}: {name} = jax.lax.with_sharding_constraint({name}, {new})"
        if text:
            return f"{at}: jax.lax.with_sharding_constraint({text}, {new}) instead of {text}"
        return f"{at}: jax.lax.with_sharding_constraint(..., {new}) around what makes this value"

    def _read(self, place: Expression) -> tuple[str, str]:
        """The variable that an expression is assigned to, or else empty; and its text, if that is short."""
        source, nodes = self._file(place.file)
        for node in nodes.get((place.line, place.column, place.end_line, place.end_column), ()):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    return name, ""
                case ast.AugAssign(target=ast.Name(id=name)):
                    return name, ""
                case ast.expr():
                    text = ast.get_source_segment(source, node) or ""
                    return "", text if len(text) <= _LONG and "\n" not in text else ""
        return "", ""

    def _file(self, path: str) -> tuple[str, dict[tuple[int, ...], list[ast.AST]]]:
        """The text of a file, and its nodes by place; an assignment also has the place of what is assigned."""
        if path not in self._files:
            source = "".join(linecache.getlines(path))
            nodes: dict[tuple[int, ...], list[ast.AST]] = {}
            try:
                tree = ast.parse(source)
            except SyntaxError:  # a cell of a notebook with commands
                tree = ast.Module([], [])
            for node in ast.walk(tree):
                if isinstance(node, ast.expr | ast.stmt):
                    nodes.setdefault(_place_of(node), []).append(node)
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    nodes.setdefault(_place_of(node.value), []).insert(0, node)
            self._files[path] = source, nodes
        return self._files[path]


def _place_of(node: ast.expr | ast.stmt) -> tuple[int, ...]:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def type_text(dtype: str, shape: Sequence[int] | None) -> str:
    """The type of a value: ``float32[32,128]``.

    >>> type_text("float32", (32, 128)), type_text("bfloat16", None)
    ('float32[32,128]', 'bfloat16 arrays')
    """
    return f"{dtype} arrays" if shape is None else f"{dtype}[{','.join(map(str, shape))}]"
