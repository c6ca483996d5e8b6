"""Op names: reads which operator, in which module, an instruction of a compiled program comes from.

JAX writes the name stack of each operator into the metadata of its instructions:

    >>> origin_of("jit(step)/transpose(jvp(decoder))/layers_0/while/body/checkpoint/mlp/dot_general")
    Origin(operation='dot_general', module='decoder/layers_0/mlp', is_backward=True, is_recomputed=False)

What JAX puts there for its own calls and loops is left out. Of operators that XLA merged, the first counts.
"""

from __future__ import annotations

import dataclasses
import re

# Parts of a name stack that name a call, a loop or a transformation of JAX's, and no module of the user's.
_CALLS = frozenset(
    "while body cond closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat "
    "remat2 rematted_computation shard_map pjit jit xla_call eval_jaxpr branch_0_fun branch_1_fun".split()
)
_NUMBERED = re.compile(r"\.\d+$")  # how XLA calls what it makes itself: broadcast.32
_RECOMPUTED = "rematted_computation"
_WRAPPED = re.compile(r"^([\w.\-]+)\((.*)\)$")
_TRANSFORMATIONS = frozenset("jvp transpose vmap remat checkpoint custom_jvp custom_vjp linearize".split())


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where an instruction comes from."""

    operation: str = ""  # the operator, by JAX's name of its primitive; empty if nothing tells
    module: str = ""  # the named scopes around it, joined by ``/``; empty without any
    is_backward: bool = False  # whether it is part of a gradient
    is_recomputed: bool = False  # whether ``jax.checkpoint`` computes it once more


def origin_of(op_name: str) -> Origin:
    """Reads the ``op_name`` of an instruction's metadata.

    >>> origin_of("jit(step)/jvp()/attn/reshape;attn/transpose")
    Origin(operation='reshape', module='attn', is_backward=False, is_recomputed=False)
    >>> origin_of("jit(f)/vmap(mlp)/(rematted_computation/up/dot_general:up/dot_general)").module
    'mlp/up'
    """
    words = _split(_first_alternative(op_name))
    if not words:
        return Origin()
    *scopes, operation = words
    found: list[str] = []
    is_backward = False
    for word in scopes:
        inner, transposed = _unwrapped(word)
        is_backward |= transposed
        # An einsum names its scope by its subscripts: ab,bc->ac.
        found += [part for part in _split(inner) if part not in _CALLS and "->" not in part]
    return Origin(_NUMBERED.sub("", operation.partition("[")[0]), "/".join(found), is_backward, _RECOMPUTED in scopes)


def _first_alternative(op_name: str) -> str:
    """One of the names that XLA merged: ``a;b`` are two, and so are ``x/(a/c:b/c)``."""
    text = op_name.partition(";")[0]
    start = text.find("/(")
    if start < 0:
        return text
    return f"{text[:start]}/{text[start + 2 :].partition(':')[0].rstrip(')')}"


def _split(text: str) -> list[str]:
    """The parts between slashes; a slash in parentheses or brackets separates nothing."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "/" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in (*parts, text[start:]) if part]


def _unwrapped(word: str) -> tuple[str, bool]:
    """What is inside of the transformations around a scope, and whether one of them transposes.

    Of ``jit(f)`` nothing is left: it is a call.
    """
    transposed = False
    while match := _WRAPPED.match(word):
        if match[1] not in _TRANSFORMATIONS:
            return ("", transposed) if match[1] in _CALLS else (word, transposed)
        transposed |= match[1] == "transpose"
        word = match[2]
    return word, transposed
