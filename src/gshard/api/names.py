"""Names of the dimensions of arguments, by path or by structure; a ``Layout`` maps them to mesh axes.

The words are those of ``gshard.name``: ``names={"params/**/w1": "embed hidden", "tokens": "batch length"}``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from gshard.api.marks import is_names, names_of
from gshard.api.specs import spread
from gshard.core.errors import ShardingError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.layout import Named, Names
from gshard.core.mark import Mark
from gshard.core.paths import matches, path_of
from gshard.core.program import Program


def names_of_arguments(
    positional: Sequence[str], names: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Names | None]:
    """The names of each leaf of ``(args, kwargs)``, in JAX's order; None where nothing is said."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    numbered = jax.tree.unflatten(tree, range(len(leaves)))
    found: dict[int, tuple[str, Names]] = {}
    nodes = list(_nodes(positional, *numbered))
    path_of_leaf = {part: path for path, part in nodes if isinstance(part, int)}

    def put(i: int, said: Any, by: str) -> None:
        if said is None:
            return
        path = path_of_leaf[i]
        made = names_of(said, leaves[i], path, path)
        other, known = found.setdefault(i, (by, made))
        if known != made:
            raise ShardingError(
                f"{path} is named in two ways.",
                user_line(),
                f"{other!r}: {str(known)!r}; {by!r}: {str(made)!r}",
                "Patterns have no order: make them such that one matches.",
            )

    if isinstance(names, Mapping):
        for pattern, said in names.items():
            at = [part for path, part in nodes if matches(str(pattern), path)]
            if is_names(said):
                at = [part for part in at if isinstance(part, int)]
            if not at:
                raise _matches_nothing(str(pattern), nodes)
            for part in at:
                for _, one, i in spread(f"names[{pattern!r}]", said, part, is_names):
                    put(i, one, str(pattern))
    elif names is not None:
        prefix = tuple(names) if isinstance(names, list) else names
        for _, one, i in spread("names", prefix, numbered[0], is_names):
            put(i, one, "names")
    return [found[i][1] if i in found else None for i in range(len(leaves))]


def paths_of_arguments(program: Program, tree: Any) -> tuple[str, ...]:
    """The path of each argument of a program, as ``names=`` of ``jit`` takes it."""
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    names = program.names[len(program.captured) :]  # params['l1']['w'], which becomes params/l1/w
    below = [tuple(keys[2:]) for keys, _ in paths]
    return tuple(path_of(n.removesuffix(jax.tree_util.keystr(k)), k) for n, k in zip(names, below, strict=True))


def _nodes(positional: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything in the arguments, inner nodes too, by path."""
    for name, x in zip(positional, args, strict=True):
        yield from _below(name, x)
    for key, x in kwargs.items():
        yield from _below(key, x)


def _below(path: str, x: Any) -> Iterator[tuple[str, Any]]:
    yield path, x
    if not isinstance(x, int):
        children, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda part: part is not x)
        for keys, child in children:
            yield from _below(path_of(path, keys), child)


def _matches_nothing(pattern: str, nodes: Sequence[tuple[str, Any]]) -> ShardingError:
    paths = [path for path, part in nodes if isinstance(part, int)]
    hint = known_names(pattern, paths, "The arguments are at")
    if any(matches(pattern, path) for path, _ in nodes):
        hint = f"There is no array there, but what holds some: write {pattern + '/**'!r} for all of them."
    return ShardingError(f"no argument is at {pattern!r}, which names= has.", user_line(), hint=hint)


def with_names_of_arguments(
    program: Program, said: Sequence[Names | None], in_shardings: Sequence[Mark | None]
) -> Program:
    """The program whose arguments have names, which are marks as far as its layout has rows for them."""
    if not any(said):
        return program
    inputs, layout = program.block.inputs[len(program.captured) :], program.layout
    said = [*said, *[None] * (len(inputs) - len(said))]  # references that the function closes over have no names
    named = [Named(v, names, layout) for v, names in zip(inputs, said, strict=True) if names is not None]
    made = [None if names is None or layout is None else layout.mark(names, f"argument {names.at}") for names in said]
    for names, new, given in zip(said, made, in_shardings, strict=False):
        if names is not None and new is not None and given is not None:
            raise ShardingError(
                f"{names.at} is marked by in_shardings and by its names.",
                user_line(),
                f"in_shardings: {given}; {new}",
                "Leave one of them out: None in in_shardings says nothing.",
            )
    marks = tuple(new or old for new, old in zip(made, program.argument_marks, strict=True))
    return dataclasses.replace(program, argument_marks=marks, named=(*named, *program.named))
