"""Signature: the key under which a program is kept between calls: arrays, static leaves and references."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from gshard.api.specs import memories_of
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import no_mesh_set, user_line
from gshard.core.jax_adapter_dispatch import is_token, logs_compilations, named_arguments, trace_settings
from gshard.core.jax_adapter_references import (
    array_of,
    array_type_of,
    is_reference,
    is_reference_type,
    shape_of_reference,
    type_of_reference,
    write,
)
from gshard.core.memory_kinds import is_in_host_space, is_on_host, shape_of_type, space
from gshard.core.paths import leaf_names, parameters_of
from gshard.core.sharding import Sharding
from gshard.core.uneven import UnevenArray
from gshard.language.registry import rules_version
from gshard.tracing.by_jax import name_of
from gshard.tracing.changed_objects import has_objects, with_kept_objects

# Reads references (``jax.Ref``) that are passed or closed over before a call, and writes them after it.


def arrays_of(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a call with the arrays that references hold in their place."""
    return [array_of(x) if is_reference(x) else x for x in arguments]


def refuse_twice(arguments: Sequence[Any], names: Callable[[], Sequence[str]], function: str) -> None:
    """Refuses a reference that is given twice: what one name writes the other one would not see."""
    references = [id(x) for x in arguments if is_reference(x)]
    if len({*references}) == len(references):
        return
    first: dict[int, str] = {}
    for x, name in zip(arguments, names(), strict=True):
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


# Static leaves: leaves of arguments and results that are not arrays, such as activation functions.

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, UnevenArray)
_TOKEN = object()  # in the place of every token: they do not differ


@jax.tree_util.register_pytree_node_class
class Fixed:
    """A leaf as a part of the structure; equal to others of the same type and value."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any):
        self.value = value
        # Zeros of both signs are equal, and a NaN is not equal to itself; written out they are what they are.
        self.key: Hashable = (type(value), repr(value) if isinstance(value, float | complex) else value)

    @property
    def freed(self) -> Any:
        """The leaf as the user gets it."""
        if self.value is not _TOKEN:
            return self.value
        with jax.ensure_compile_time_eval():
            return jax.lax.create_token()

    def tree_flatten(self) -> tuple[tuple[()], Fixed]:
        """No children, and itself."""
        return (), self

    @staticmethod
    def tree_unflatten(itself: Fixed, children: tuple[()]) -> Fixed:
        """The reverse of ``tree_flatten``."""
        return itself

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Fixed({self.value!r})"


def fixed(tree: Any, where: str, every: bool = True) -> Any:
    """The tree with all leaves that are no arrays (or else the tokens only) as parts of its structure."""

    def leaf(path: Any, x: Any) -> Any:
        if is_token(x):
            return Fixed(_TOKEN)
        if not every or isinstance(x, _ARRAYS) or hasattr(type(x), "__jax_array__"):
            return x
        refuse_without_hash(x, f"Non-hashable static leaves are not supported: {where}{jax.tree_util.keystr(path)}.")
        return Fixed(x)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def refuse_without_hash(x: Any, said: str) -> None:
    """Raises an ``ArgumentError`` (also a ``ValueError``, as of ``jax.jit``) for what cannot be part of a key."""
    try:
        hash(x)
    except TypeError as error:
        hint = "Give a tuple or another value that is hashable and does not change."
        raise ArgumentError.like(ValueError(), said, user_line(), f"a {type(x).__name__}", hint) from error


def freed(tree: Any) -> Any:
    """The tree with such leaves in their places again."""
    return jax.tree.map(lambda x: x.freed if isinstance(x, Fixed) else x, tree, is_leaf=lambda x: isinstance(x, Fixed))


def has_fixed(structure: Any) -> bool:
    """Whether there are such leaves in a structure."""
    tree = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    return any(isinstance(x, Fixed) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Fixed)))


def with_freed_arguments(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arguments with fixed leaves."""

    @functools.wraps(f)
    def free(*args: Any, **kwargs: Any) -> Any:
        return f(*freed(args), **freed(kwargs))

    return free


def with_fixed_results(f: Callable[..., Any], name: str, every: bool = True) -> Callable[..., Any]:
    """The function with results whose leaves are fixed where they are no arrays, or only where they are tokens."""

    @functools.wraps(f)
    def fix(*args: Any, **kwargs: Any) -> Any:
        return fixed(f(*args, **kwargs), f"the result of {name}", every)

    return fix


_OF_HIJAX = (
    "Pass the arrays that this value of jax.experimental.hijax is made of, and make the value inside the function."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One flat argument, as far as a program depends on it."""

    aval: Any  # JAX's type of it
    sharding: Any = None  # of an array that is committed to one; None if JAX may place it
    partitioning: Sharding | None = None  # how the padded parts of an ``UnevenArray`` are cut

    @staticmethod
    def of(x: Any) -> Leaf:
        """Reads an argument."""
        if (aval := type_of_reference(x)) is not None:
            return Leaf(aval, None if isinstance(x, jax.core.Tracer) else x.sharding)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return Leaf.of_type(jax.typeof(x), x.sharding if x.committed else None)
        if isinstance(x, UnevenArray):
            held = space(is_in_host_space(x.sharding.memory_kind))
            aval = jax.core.ShapedArray(x.shape, x.dtype, memory_space=held)
            return Leaf(aval, x.sharding, x.partitioning)
        if isinstance(x, jax.ShapeDtypeStruct):
            on_host = is_in_host_space(getattr(x.sharding, "memory_kind", None))
            weak = bool(getattr(x, "weak_type", False))
            return Leaf(jax.core.ShapedArray(x.shape, x.dtype, weak_type=weak, memory_space=space(on_host)), x.sharding)
        aval = jax.typeof(x)
        if aval.is_high or not hasattr(aval, "shape"):
            raise TypeError(_OF_HIJAX if aval.is_high else f"{aval} has no shape")
        return Leaf(aval)

    @staticmethod
    def of_type(aval: Any, sharding: Any) -> Leaf:
        """An array of a type, and the sharding that it is committed to, or None."""
        # Where its mesh has no explicit axes an array's type is the same wherever the array is.
        return Leaf(aval if explicit_sharding(aval) is not None else aval.update(sharding=None), sharding)

    def without_type(self) -> Leaf:
        """The same without the sharding that axes of type Explicit add to its type."""
        if explicit_sharding(self.aval) is None or is_reference_type(self.aval):
            return self
        return dataclasses.replace(self, aval=self.aval.update(sharding=None))

    @property
    def array_type(self) -> tuple[Any, Any]:
        """The type of the array that it is, or that the reference holds, and its sharding."""
        return array_type_of(self.aval), self.sharding

    @property
    def shape(self) -> Any:
        """What the function is traced with."""
        explicit = explicit_sharding(self.aval)
        if is_reference_type(self.aval):
            return shape_of_reference(self.aval, explicit)
        if is_on_host(self.aval):
            return self.aval if explicit is not None else shape_of_type(self.aval)
        weak = bool(getattr(self.aval, "weak_type", False))
        return jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype, sharding=explicit, weak_type=weak)


def _is_symbolic(x: Leaf) -> bool:
    return not all(isinstance(size, int) for size in x.aval.shape)


def explicit_sharding(aval: Any) -> Any:
    """The sharding that is part of an array's type, where its mesh has axes of type Explicit."""
    sharding: Any = getattr(array_type_of(aval), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and not mesh.empty and mesh.explicit_axes else None


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """What a program is made for."""

    tree: Any  # the structure of ``(positional, named)`` arguments without the static ones
    leaves: tuple[Leaf, ...]  # the flat arguments
    # the number of positional arguments, then (position or name, type, value) of each static one
    statics: tuple[Any, ...]
    settings: Hashable  # JAX's
    # the references that the function closes over: arguments that the user does not write
    closed_over: tuple[Leaf, ...] = ()

    @property
    def every(self) -> tuple[Leaf, ...]:
        """The flat arguments, and the references that the function closes over."""
        return (*self.leaves, *self.closed_over)

    def closing_over(self, references: Sequence[Any]) -> Signature:
        """The same of a function that closes over these references."""
        return dataclasses.replace(self, closed_over=tuple(map(Leaf.of, references))) if references else self

    @property
    def traced(self) -> Hashable:
        """What the traced function depends on: everything but how arrays are sharded."""
        return self.tree, tuple((x.aval, x.partitioning is None) for x in self.leaves), self.statics, self.settings

    def without_types(self) -> Signature:
        """The same without the shardings that axes of type Explicit add to the types of arrays."""
        return dataclasses.replace(self, leaves=tuple(x.without_type() for x in self.leaves))

    def brought(self, kinds: Sequence[str | None]) -> Signature:
        """The same for arguments that are put in these memory kinds: those of the devices have types of the devices."""
        device = [kind is not None and not is_in_host_space(kind) for kind in kinds]
        leaves = [
            dataclasses.replace(x, aval=x.aval.update(memory_space=space(False))) if there else x
            for x, there in zip(self.leaves, device, strict=True)
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))

    @property
    def avals(self) -> tuple[Any, ...]:
        """JAX's types of the flat arguments."""
        return tuple(x.aval for x in self.leaves)

    def arguments(self) -> tuple[Any, Any]:
        """Positional and named arguments to trace the function with."""
        return jax.tree.unflatten(self.tree, [x.shape for x in self.leaves])  # type: ignore[no-any-return]

    def names(self, f: Callable[..., Any]) -> tuple[str, ...]:
        """The flat arguments in the words of ``f``, a function of those that are not static."""
        return leaf_names(f, jax.tree.unflatten(self.tree, [0] * len(self.leaves)))


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """Which arguments of a function are static and which are donated, by number and by name."""

    f: Callable[..., Any]  # the function
    static_numbers: tuple[int, ...]  # static_numbers, static_names: arguments that are no arrays
    static_names: tuple[str, ...]
    donated_numbers: tuple[int, ...]  # donated_numbers, donated_names: arguments whose memory results may take
    donated_names: tuple[str, ...]
    static_leaves: bool = False  # whether what is no array inside of the others is static as well
    in_shardings: Any = None  # where arguments are put before a call, in which memory among others

    @property
    def told(self) -> Hashable:
        """Which arguments, without the function."""
        return self.static_numbers, self.static_names, self.donated_numbers, self.donated_names, self.static_leaves

    @property
    def plain(self) -> Callable[..., Any]:
        """The function, of arguments as ``fixed`` returns them."""
        return with_freed_arguments(self.f) if self.static_leaves else self.f

    def fixed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, their static leaves as parts of their structure."""
        if not self.static_leaves:
            return args, kwargs
        return fixed(args, f"arguments of {name_of(self.f)}, "), fixed(kwargs, f"arguments of {name_of(self.f)}, ")

    @staticmethod
    def of(
        f: Callable[..., Any], static: tuple[Any, Any], donated: tuple[Any, Any], static_leaves: bool = False
    ) -> Parameters:
        """Completes what was given by number or by name."""
        try:
            return Parameters(f, *named_arguments(f, static, donated), static_leaves)
        except (ValueError, TypeError) as error:
            names = parameters_of(f)
            raise ArgumentError.like(
                error,
                str(error),
                user_line(),
                f"{name_of(f)}({', '.join(names)})" if names else name_of(f),
                "Name arguments that the function has, each as static or as donated.",
            ) from None

    def divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        """The arguments that are arrays, and ``Signature.statics``."""
        if not self.static_numbers and not self.static_names:
            return (args, kwargs), (len(args),)
        count = len(args)
        numbers = {i % count if -count <= i < 0 else i for i in self.static_numbers}
        statics: list[tuple[int | str, type, Any]] = [(i, type(args[i]), args[i]) for i in sorted(numbers) if i < count]
        statics += [(k, type(kwargs[k]), kwargs[k]) for k in sorted(kwargs) if k in self.static_names]
        for key, _, value in statics:
            said = f"Non-hashable static arguments are not supported: argument {key!r} of {name_of(self.f)}."
            refuse_without_hash(value, said)
        positional = tuple(a for i, a in enumerate(args) if i not in numbers)
        named = {k: v for k, v in kwargs.items() if k not in self.static_names}
        return (positional, named), (count, *statics)

    def donated(self, signature: Signature) -> frozenset[int]:
        """The flat arguments whose memory results may take."""
        positional, named = jax.tree.unflatten(signature.tree, range(len(signature.leaves)))
        fixed = {key for key, _, _ in signature.statics[1:]}
        dynamic = [i for i in range(signature.statics[0]) if i not in fixed]
        chosen = [x for i, x in zip(dynamic, positional, strict=True) if i in self.donated_numbers]
        chosen += [x for name, x in named.items() if name in self.donated_names]
        references = (i for i, x in enumerate(signature.every) if is_reference_type(x.aval))
        return frozenset((*jax.tree.leaves(chosen), *references))

    def traced_by_jax(self, make: Callable[[], Any], keep_unused: bool, args: Any, kwargs: Any) -> Any:
        """What ``jax.jit`` traces of the function that ``make`` returns, with these static and donated arguments."""
        jitted = jax.jit(
            make(),
            static_argnums=self.static_numbers,
            static_argnames=self.static_names,
            donate_argnums=self.donated_numbers,
            donate_argnames=self.donated_names,
            keep_unused=keep_unused,
        )
        return jitted.trace(*args, **kwargs)

    def with_statics(self, statics: tuple[Any, ...], *, tokens: bool = False) -> Callable[..., Any]:
        """The function of the arrays alone; the function itself, where it can be: JAX knows its trace by it."""
        count, *given = statics
        whole = self.f
        if tokens or self.static_leaves:
            whole = with_fixed_results(with_freed_arguments(whole), name_of(whole), self.static_leaves)
        if not given:
            return whole
        by_position = {key: value for key, _, value in given if isinstance(key, int)}
        by_name = {key: value for key, _, value in given if isinstance(key, str)}

        def f(*args: Any, **kwargs: Any) -> Any:
            rest = iter(args)
            full = [by_position[i] if i in by_position else next(rest) for i in range(count)]
            return whole(*full, **by_name, **kwargs)

        f.__name__ = f.__qualname__ = name_of(self.f)
        f.__wrapped__ = self.f  # type: ignore[attr-defined]
        f.__signature__ = _signature_without(self.f, by_position, by_name)  # type: ignore[attr-defined]
        return f

    def to_trace(self, signature: Signature, *, tokens: bool = False) -> Callable[..., Any]:
        """The function of the arrays alone, refused where it would lose what it changes in an object."""
        f = self.with_statics(signature.statics, tokens=tokens)
        return with_kept_objects(f, name_of(self.f)) if has_objects(signature.tree) else f

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, list[Any]]:
        """The signature of a call, and its flat arguments."""
        arrays, statics = self.divide(args, kwargs)
        leaves, tree = jax.tree.flatten(arrays)
        if any(map(is_token, leaves)):
            leaves, tree = jax.tree.flatten(fixed(arrays, "", every=False))

        def names() -> tuple[str, ...]:
            return leaf_names(self.with_statics(statics), arrays)

        refuse_twice(leaves, names, name_of(self.f))
        try:
            read = tuple(map(Leaf.of, leaves))
        except (TypeError, OverflowError) as error:
            raise self._no_array(names(), leaves) from error
        for name, x in zip(names(), read, strict=True) if any(map(_is_symbolic, read)) else ():
            if _is_symbolic(x):
                raise ArgumentError(
                    f"{name_of(self.f)} is partitioned for sizes that are known, and {name} has a symbolic dimension.",
                    user_line(),
                    x.aval.str_short(),
                    "Give numbers, one program for each size; or leave the function to jax.jit.",
                )
        signature = Signature(tree, read, statics, (trace_settings(), rules_version()))
        if self.in_shardings is not None and any(is_on_host(x.aval) for x in read):
            signature = signature.brought(memories_of(self.in_shardings, arrays))
        return signature, leaves

    def _no_array(self, names: Sequence[str], leaves: Sequence[Any]) -> ArgumentError:
        for name, x in zip(names, leaves, strict=True):
            try:
                Leaf.of(x)
            except OverflowError as error:
                return ArgumentError.like(
                    error,
                    f"{name}, an argument of {name_of(self.f)}, is too large: {error}.",
                    user_line(),
                    hint="Use integers of 64 bits: jax.config.update('jax_enable_x64', True).",
                )
            except TypeError as error:
                what = repr(x) if len(repr(x)) <= 60 else f"{repr(x)[:60]}..."
                static = (
                    f"A value that is no array is a static argument: gshard.jit(..., static_argnames={name!r}); it "
                )
                static += "must be hashable."
                inside = (
                    "Take it out of the argument, or give gshard.jit(..., static_leaves=True): then leaves that are no "
                )
                inside += "arrays are static, and must be hashable."
                return ArgumentError(
                    f"Error interpreting argument to {name_of(self.f)} as an abstract array. The problematic value "
                    f"is of type {type(x)} and was passed to the function at path {name}.",
                    user_line(),
                    what,
                    _OF_HIJAX if str(error) == _OF_HIJAX else static if name.isidentifier() else inside,
                )
        raise AssertionError


def _signature_without(f: Callable[..., Any], numbers: Container[int], names: Container[str]) -> inspect.Signature:
    """The signature of a function without some of its arguments, given by their positions, or by name."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return inspect.Signature()
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kept = [p for i, p in enumerate(parameters) if p.kind in rest or (i not in numbers and p.name not in names)]
    return inspect.Signature(kept)


# New kinds: logs what tells a call that needs a program of its own from the last one.

_log = logging.getLogger("gshard")
_SHOWN = 4  # arguments
_MANY = 16  # kinds of arguments of one function: more than a program has on purpose


def log_new_kind(name: str, names: Callable[[], Sequence[str]], now: Signature, last: Signature, kinds: int) -> None:
    """Logs why a function is planned again."""
    if kinds == _MANY:
        _log.warning(
            "%s is planned and compiled for %d different kinds of arguments, at %s: %s. Pad arrays to a few sizes, and "
            "pass numbers that change as arrays, not as static arguments.",
            name, kinds, user_line(), _difference(names(), now, last),
        )  # fmt: skip
        return
    level = logging.WARNING if logs_compilations() else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "%s is planned again: %s", name, _difference(names(), now, last))


def _difference(names: Sequence[str], now: Signature, last: Signature) -> str:
    if now == last:
        return "its mesh is another one than before"
    if now.tree != last.tree:
        return "its arguments have another structure than before"
    if now.statics != last.statics:
        return "a static argument has another value than before"
    pairs = zip(names, now.leaves, last.leaves, strict=True)
    told = [f"{which} is {_text(one, two)}, and was {_text(two, one)}" for which, one, two in pairs if one != two]
    if not told:
        return "a setting of JAX or a rule has changed"
    more = f"; and {len(told) - _SHOWN} more arguments" if len(told) > _SHOWN else ""
    return "; ".join(told[:_SHOWN]) + more


def _text(leaf: Leaf, other: Leaf) -> str:
    if leaf.aval != other.aval:
        return str(leaf.aval.str_short()) + (" (weak type)" if getattr(leaf.aval, "weak_type", False) else "")
    return "not placed" if leaf.sharding is None else f"on {leaf.sharding}"
