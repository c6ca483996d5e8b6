"""jit: makes a partitioned function (``api.jitted``) of a function and options; used like ``jax.jit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack, overload

import jax

from gshard.api.jitted import Jitted, P, R
from gshard.api.specs import told
from gshard.api.target import Options
from gshard.api.wrapped import Wrapped, refuse_device
from gshard.core.errors import ArgumentError, ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import refuse_what_is_no_function
from gshard.core.keywords import keywords
from gshard.core.layout import Layout
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.plan import Plan
from gshard.device.machine import Machine
from gshard.planning.collective_matmuls import CollectiveMatmul
from gshard.planning.saved_plan import SavedPlan


class JitOptions(TypedDict, total=False):
    """The options of ``jit`` besides the function and the mesh, for type checkers; ``jit`` describes them."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    static_leaves: bool
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, Any] | None
    device: Any
    backend: str | None
    machine: str | Machine | None
    strict: bool | float
    uneven: Literal["gather", "keep"]
    collective_matmul: bool | int | CollectiveMatmul | None
    memory_limit: int | str | None
    plan: Plan | SavedPlan | None
    search: bool | float
    layout: Layout | None
    names: Any
    finite: bool


class Decorator(Protocol):
    """What ``jit`` without a function returns: makes a partitioned function of each function that it is called with."""

    def __call__(self, f: Callable[P, R], /) -> Jitted[P, R]:
        """Partitions a function."""


@overload
def jit(f: Callable[P, R], mesh: MeshLike = None, **options: Unpack[JitOptions]) -> Jitted[P, R]: ...


@overload
def jit(f: None = None, mesh: MeshLike = None, **options: Unpack[JitOptions]) -> Decorator: ...


@keywords()
def jit(
    f: Callable[..., Any] | None = None,
    mesh: MeshLike = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_leaves: bool = False,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    device: Any = None,
    backend: str | None = None,
    machine: str | Machine | None = None,
    strict: bool | float = False,
    uneven: Literal["gather", "keep"] = "gather",
    collective_matmul: bool | int | CollectiveMatmul | None = None,
    memory_limit: int | str | None = None,
    plan: Plan | SavedPlan | None = None,
    search: bool | float = False,
    layout: Layout | None = None,
    names: Any = None,
    finite: bool = False,
) -> Any:
    """Partitions a function over a mesh; used like ``jax.jit``, as a call or a decorator, on functions and methods.

    Args:
        f: a function of pytrees of arrays, written for one device, with marks. What ``jax.jit`` returned counts with
            all that ``jax.jit`` was given.
        mesh: a ``jax.sharding.Mesh``, a number of devices, a list of devices, or ``{"data": 4, "model": 2}``; None
            takes that of the shardings that ``jax.jit`` was given, or the one that is set when the function is called.
        static_argnums, static_argnames: arguments that are plain (hashable) values, not arrays.
        donate_argnums, donate_argnames: arguments whose memory the results may take.
        static_leaves: whether what is no array inside of arguments (activation functions, numbers of Python) is static
            too, a new program for each value; results may hold such leaves as well. As ``eqx.filter_jit`` does.
        in_shardings: for the positional arguments (that are not static) a pytree prefix of ``PartitionSpec``,
            ``NamedSharding`` or None (not said); counts as marks on them. Others may not be given by name then.
        out_shardings: the same for the results.
        keep_unused: whether arguments that nothing reads are moved to the devices all the same.
        inline: taken for ``jax.jit``'s sake; inside another program a partitioned function is one equation in any case.
        compiler_options: XLA's, as for ``jax.jit``.
        device, backend: not taken: the mesh names the devices.
        machine: what the devices are, such as ``"h100:1x8"``; None takes what the mesh's devices are. In the plan a
            call takes least time there, and loops gather a round before they need it where the compiler of such
            machines hides that (TPU v5e). For CPUs, abstract meshes, and devices that there is no model of, None takes
            the plan that sends least, and computes no product twice to send less.
        strict: True refuses operations without a rule instead of gathering their operands, a layout with rows for
            nothing, and what the function says and gshard does not keep (``explain(...).dropped``). A number of bytes
            also refuses a program in which each device sends more than that in one call, and names the lines that do.
        uneven: what becomes of results that are split in a dimension which does not divide: ``"gather"`` makes it
            whole, since JAX has no such arrays, or splits an unmarked result along another one if that sends
            less; ``"keep"`` returns an ``UnevenArray``, which the next call takes without moving it.
        collective_matmul: which contractions run part by part instead of after a gather of an operand or before a
            scatter of the result (figure 4c of the paper): True takes those that send no more bytes so, a number those
            for which a device would hold more bytes than that, and ``CollectiveMatmul`` says it in detail. None
            takes those that make a call faster on ``machine``, where its compiler is known to send while it computes
            (TPU from v4 on), and without a machine none; False takes none.
        memory_limit: bytes that a device may hold, or text such as ``"14GiB"``. What would not fit is recomputed
            when it is needed; ``gshard.explain`` says what, and the share of FLOPs.
        plan: what ``gshard.search`` found (``found.plan``, or ``SavedPlan.load`` of what was saved): exactly this is
            partitioned, whatever sharding arguments come with. Another program, or another mesh, is refused.
        search: whether to search for the plan, on ``machine`` and within ``memory_limit``, when a call of a new kind
            comes, instead of propagating marks; a number gives it so many seconds. Marks in the function and
            ``in_shardings`` are kept; arguments are moved to where the plan wants them.
        layout: what names of dimensions (``gshard.name``, ``names``) mean; without one they mean nothing.
        names: what the dimensions of arguments are called: a dictionary from paths or patterns of them
            (``"params/**/w1": "embed hidden"``), or a pytree prefix of names for the positional arguments.
        finite: True states that no part of a sum of floats overflows, underflows or is not finite, nor what such parts
            are multiplied or divided by. Sums may then stay in parts through products too (``docs/numerics.md``).

    Returns:
        a ``Jitted`` with the same results; ``.lower(*args)`` gives the chain behind it, ``.trace``, ``.eval_shape``,
        ``.clear_cache`` and ``.lower(*args).compile()`` are as of ``jax.jit``.

    Raises:
        MeshError: the mesh names devices that do not exist. ArgumentError: ``f`` is no function, or has no such
            argument. When called: ShardingError, TraceError, PlanError, ArgumentError, MemoryLimitError (the program
            does not fit, whatever is recomputed).

    >>> import jax.numpy as jnp
    >>> from gshard.api.marks import split
    >>> double = jit(lambda x: 2 * split(x, 0, 1), mesh=1)
    >>> double(jnp.arange(3)).tolist()
    [0, 2, 4]
    """
    asked = dict(locals())
    if f is None:
        del asked["f"]
        return functools.partial(jit, **asked)
    try:
        refuse_what_is_no_function(f)
        if isinstance(f, jax.sharding.Mesh):  # it can be called: as a decorator
            raise TypeError(f"Expected a function, got a mesh: {Mesh.of(f)}.")
    except TypeError as error:
        text = str(error) if callable(f) else f"Expected a callable value, got {told(f)}."
        hint = "Write gshard.jit(f, mesh=8), or @gshard.jit(mesh=8) above a function."
        raise ArgumentError(text, user_line(), hint=hint) from None
    refuse_device("gshard.jit", device if backend is None else backend)
    if uneven not in ("gather", "keep"):
        raise ShardingError(f"uneven={uneven!r} is not known.", hint='Write uneven="gather" or uneven="keep".')
    wrapped = Wrapped.of(f, in_shardings, out_shardings, keep_unused, compiler_options)
    static, donated = (static_argnums, static_argnames), (donate_argnums, donate_argnames)
    parameters = wrapped.parameters(static, donated, static_leaves)
    if mesh is None:
        mesh = wrapped.f.options.mesh if isinstance(wrapped.f, Jitted) else wrapped.mesh
    options = Options.of(
        mesh, strict, memory_limit, plan, layout, in_shardings=wrapped.in_shardings, names=names,
        out_shardings=wrapped.out_shardings, collective_matmul=collective_matmul, keep_uneven=uneven == "keep",
        machine=machine, keep_unused=wrapped.keep_unused, compiler_options=wrapped.compiler_options, search=search,
        finite=bool(finite),
    )  # fmt: skip
    return Jitted(wrapped.f, parameters, options)
