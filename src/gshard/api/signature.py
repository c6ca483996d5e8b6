"""Signature: what a program is kept for between calls: what JAX has traced, and where the arguments lie."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax

from gshard.core.errors import ArgumentError, listed
from gshard.core.jax_adapter import no_mesh_set, user_line
from gshard.core.jax_adapter_dispatch import logs_compilations
from gshard.core.jax_adapter_references import (
    array_of,
    array_type_of,
    is_reference,
    is_reference_type,
    references_in,
    shape_of_reference,
    type_of_reference,
    write,
)
from gshard.core.memory_kinds import is_in_host_space, is_on_host, shape_in_memory, shape_of_type, space
from gshard.language.registry import rules_version

# Reads references (``jax.Ref``) that are passed or closed over before a call, and writes them after it.


def arrays_of(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a call with the arrays that references hold in their place."""
    return [array_of(x) if is_reference(x) else x for x in arguments]


def refuse_twice(arguments: Sequence[Any], names: Sequence[str], function: str) -> None:
    """Refuses a reference that is given twice: what one name writes the other one would not see."""
    first: dict[int, str] = {}
    for x, name in zip(arguments, names, strict=True):
        if is_reference(x) and first.setdefault(id(x), name) != name:
            raise ArgumentError.like(
                ValueError(),
                f"{function} is given one reference twice, as {first[id(x)]} and {name}.",
                user_line(),
                "only one reference to a mutable array may be passed as an argument to a function",
                "Give it once, or give the array that it holds (ref[...]) where it is only read.",
            )


def write_back(references: Sequence[Any], values: Sequence[Any]) -> None:
    """Writes final values into references, each with the sharding that the reference has."""
    for reference, value in zip(references, values, strict=True):
        here = reference.sharding
        if value.sharding != here:
            with no_mesh_set():
                value = jax.device_put(value, here)
        write(reference, value)


# What a function is traced with, and where its arguments lie.


def explicit_sharding(aval: Any) -> Any:
    """The sharding that is part of an array's type, where its mesh has axes of type Explicit."""
    sharding: Any = getattr(array_type_of(aval), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and not mesh.empty and mesh.explicit_axes else None


def shape_to_trace(aval: Any) -> Any:
    """What a function is traced with for an array of a type: the same for arrays on any mesh without Explicit axes."""
    explicit = explicit_sharding(aval)
    if is_reference_type(aval):
        return shape_of_reference(aval, explicit)
    if is_on_host(aval):
        return shape_of_type(aval) if explicit is None else aval
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=explicit, weak_type=weak)


def type_to_trace(x: Any) -> Any:
    """What a function is traced with in the place of an argument; numbers and NumPy's arrays are left to JAX."""
    if (aval := type_of_reference(x)) is not None:
        return shape_to_trace(aval)
    if isinstance(x, jax.Array):
        return shape_to_trace(jax.typeof(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        on_host = is_in_host_space(getattr(x.sharding, "memory_kind", None))
        return shape_in_memory(x.shape, x.dtype, on_host=on_host, weak_type=bool(x.weak_type))
    return x


def without_explicit_axes(shape: Any) -> Any:
    """What a function is traced with, without the sharding that axes of type Explicit add to a type."""
    return shape.update(sharding=None) if getattr(shape, "sharding", None) is not None else shape


def brought(shape: Any, on_host: bool) -> Any:
    """What a function is traced with for an array that is moved to another memory before the call."""
    if not isinstance(shape, jax.core.ShapedArray):
        return shape
    return shape_to_trace(shape.update(memory_space=space(on_host)))


def committed_to(x: Any) -> Any:
    """The sharding of an argument that is committed to one; None if JAX may place it."""
    has_one = isinstance(x, jax.Array | jax.ShapeDtypeStruct) or is_reference(x)
    return x.sharding if has_one and not isinstance(x, jax.core.Tracer) and getattr(x, "committed", True) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """What a program is made for, besides the jaxpr that JAX has traced."""

    avals: tuple[Any, ...]  # JAX's types of the flat arguments
    in_tree: Any  # the structure of ``(positional, named)`` arguments without the static ones
    out_tree: Any  # the structure of the results
    names: tuple[str, ...]  # of the flat arguments, in the user's terms
    donated: frozenset[int]  # the flat arguments whose memory results may take
    # the sharding to which each flat argument, then each reference that the function closes over, is committed, or None
    places: tuple[Any, ...]
    rules: Hashable  # the version of the user's rules

    @staticmethod
    def of(
        jaxpr: Any, avals: Sequence[Any], in_tree: Any, out_tree: Any, names: Sequence[str], donated: Iterable[int],
        places: Sequence[Any],
    ) -> Signature:  # fmt: skip
        """The signature of a closed jaxpr for arguments of these types in these places."""
        references = references_in(jaxpr)
        are_written = [is_reference_type(a) for a in avals] + [True] * len(references)
        written = (i for i, is_written in enumerate(are_written) if is_written)
        return Signature(
            tuple(avals), in_tree, out_tree, tuple(names), frozenset((*donated, *written)),
            (*places, *map(committed_to, references)), rules_version(),
        )  # fmt: skip

    @property
    def anywhere(self) -> Signature:
        """The same wherever the arguments lie."""
        return dataclasses.replace(self, places=())

    def arguments(self) -> tuple[Any, Any]:
        """The shapes of positional and named arguments."""
        shapes = [shape_of_type(array_type_of(a)) for a in self.avals]
        return jax.tree.unflatten(self.in_tree, shapes)  # type: ignore[no-any-return]


# New kinds: logs what tells a call that needs a program of its own from the last one.

_log = logging.getLogger("gshard")
_MANY = 16  # kinds of arguments of one function: more than a program has on purpose


def log_new_kind(name: str, now: Signature, last: Signature, kinds: int) -> None:
    """Logs why a function is planned again."""
    if kinds == _MANY:
        _log.warning(
            "%s is planned and compiled for %d different kinds of arguments, at %s: %s. Pad arrays to a few sizes, and "
            "pass numbers that change as arrays, not as static arguments.",
            name, kinds, user_line(), _difference(now, last),
        )  # fmt: skip
        return
    level = logging.WARNING if logs_compilations() else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "%s is planned again: %s", name, _difference(now, last))


def _difference(now: Signature, last: Signature) -> str:
    if now.in_tree != last.in_tree:
        return "its arguments have another structure than before"
    told = []
    for name, *texts in zip(now.names, _texts(now), _texts(last), strict=True):
        pairs = [(new, old) for new, old in zip(*texts, strict=True) if new != old]  # of types, of places
        told += [f"{name} is {new}, and was {old}" for new, old in pairs[:1]]
    if not told:
        return "its mesh, a static argument, a setting of JAX or a rule is another one than before"
    return "; ".join(listed(told))


def _texts(signature: Signature) -> list[tuple[str, str]]:
    """The type of each argument and where it lies."""
    pairs = zip(signature.avals, signature.places, strict=False)
    weak = ((a.str_short() + (" (weak type)" if getattr(a, "weak_type", False) else ""), x) for a, x in pairs)
    return [(text, "not placed" if sharding is None else f"on {sharding}") for text, sharding in weak]
