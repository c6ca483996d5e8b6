"""Takes equations out of a scan.

``in_two`` makes two scans: the first one computes the carry, the second one the rest.

    for each layer, the last one first:            for each layer, the last one first:
        gradient of w = x^T @ ct          ──▶          stack ct
        ct = ct @ w^T                                  ct = ct @ w^T
                                                   for each layer: gradient of w = x^T @ ct

The first scan also stacks what the equations of the second one read. Values that are only added to in the carry are
computed in the second one. Its iterations are independent.

``without_tables`` computes before the scan what is the same in all iterations and depends on nothing.
``computed_before`` computes some equations for all iterations before the scan, if they do not depend on the carry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from gshard.core.jax_adapter import scan_counts, user_line
from gshard.core.program import Block, Constant, Equation, Value
from gshard.language.interpret import Interpreter, value_of
from gshard.rewrite.cse import is_pure
from gshard.rewrite.equation_graph import Writer, written
from gshard.rewrite.shard_scan import only_added_to


def in_two(e: Equation, builder: Writer) -> list[Equation] | None:
    """A scan as two scans; None if its carry needs all its equations.

    Args:
        e: the scan.
        builder: creates the equations.
    """
    consts, carry = scan_counts(e.params)
    (body,) = e.blocks
    added = only_added_to(e)
    if all(added):
        return None
    needed = {v for v, is_added in zip(body.outputs[:carry], added, strict=False) if not is_added}
    first: set[Equation] = set()
    for q in reversed(body.equations):
        if not needed.isdisjoint(q.outputs):
            first.add(q)
            needed.update(x for x in q.inputs if isinstance(x, Value))
    _add_cheap(first, body)
    needed.update(x for q in first for x in q.inputs if isinstance(x, Value))
    made = {v for q in first for v in q.outputs}
    late = [q for q in body.equations if q not in first]
    moved = [i for i, v in enumerate(body.outputs) if not _is_early(v, made, body) or (i < carry and added[i])]
    if not late or not moved:
        return None
    flowing = [i for i in range(carry) if not added[i]]
    inside = {body.inputs[consts + i] for i in flowing} | made
    read = {x for q in late for x in q.inputs} | {body.outputs[i] for i in moved}
    cut = [v for v in (*body.inputs, *(v for q in body.equations for v in q.outputs)) if v in inside and v in read]
    stays = [i for i in range(carry, len(body.outputs)) if i not in moved]
    sums = [i for i in moved if i < carry]
    stacks = [i for i in moved if i >= carry]

    def two_loops(*operands: Any) -> list[Any]:
        shared = dict(zip(body.inputs[:consts], operands, strict=False))
        slices = dict(zip(body.inputs[consts + carry :], operands[consts + carry :], strict=True))
        read_early, read_late = ([v for v in slices if v in own] for own in (needed, read))

        def run(equations: Sequence[Equation], env: dict[Any, Any], outputs: Sequence[Value | Constant]) -> list[Any]:
            Interpreter().evaluate(equations, env)
            return [value_of(v, env) for v in outputs]

        def early(carried: Any, own: Any) -> Any:
            env = shared | dict(zip(read_early, own, strict=True))
            env |= {body.inputs[consts + i]: x for i, x in zip(flowing, carried, strict=True)}
            outputs = [*(body.outputs[i] for i in (*flowing, *stays)), *cut]
            out = run([q for q in body.equations if q in first], env, outputs)
            return out[: len(flowing)], out[len(flowing) :]

        def rest(carried: Any, own: Any) -> Any:
            env = shared | dict(zip((*read_late, *cut), own, strict=True))
            env |= {body.inputs[consts + i]: x for i, x in zip(sums, carried, strict=True)}
            out = run(late, env, [body.outputs[i] for i in (*sums, *stacks)])
            return out[: len(sums)], out[len(sums) :]

        over = functools.partial(lax.scan, length=e.params["length"], reverse=e.params["reverse"])
        end, made_early = over(early, [operands[consts + i] for i in flowing], [slices[v] for v in read_early])
        start = [operands[consts + i] for i in sums]
        added_up, made_late = over(rest, start, [*(slices[v] for v in read_late), *made_early[len(stays) :]])
        results = dict(
            zip((*flowing, *stays, *sums, *stacks), (*end, *made_early[: len(stays)], *added_up, *made_late))
        )
        return [results[i] for i in range(len(body.outputs))]

    return written(builder, two_loops, e.inputs, e.outputs, e)


def _add_cheap(first: set[Equation], body: Block) -> None:
    """Adds equations to those of the first scan, if fewer bytes are stacked then, and if they are not products."""
    early = {*body.inputs, *(v for q in first for v in q.outputs)}
    is_changed = True
    while is_changed:
        is_changed = False
        late = [q for q in body.equations if q not in first]
        for q in late:
            operands = {x for x in q.inputs if isinstance(x, Value)}
            if (
                q.rule is None
                or not operands <= early
                or q.rule.flops > max((math.prod(x.shape) for x in operands), default=0)
            ):
                continue
            others = {x for other in late if other is not q for x in other.inputs} | {*body.outputs}
            if sum(x.bytes for x in operands - others) > sum(v.bytes for v in q.outputs):
                first.add(q)
                early.update(q.outputs)
                is_changed = True
                break


def _is_early(v: Value | Constant, made: set[Value], body: Block) -> bool:
    return isinstance(v, Constant) or v in made or v in body.inputs


def without_tables(e: Equation, builder: Writer) -> list[Equation] | None:
    """A scan whose body reads tables, arrays that depend on nothing, instead of making them; None if it makes none.

    A table of positions along the batch, such as the counters of random bits, has other elements in each micro-batch.

    Args:
        e: the scan.
        builder: creates the equations.
    """
    (body,) = e.blocks
    made, tables = set[Value](), list[Equation]()
    for q in body.equations:
        if (
            q.rule is not None
            and is_pure(q)
            and q.mark is None
            and all(isinstance(x, Constant) or x in made for x in q.inputs)
        ):
            tables.append(q)
            made.update(q.outputs)
    others = [q for q in body.equations if q not in tables]
    read = {x for q in others for x in q.inputs} | {*body.outputs}
    if not any(v.shape for v in made & read):
        return None
    consts, carry = scan_counts(e.params)

    def loop(*operands: Any) -> list[Any]:
        shared = dict(zip(body.inputs[:consts], operands, strict=False))
        Interpreter().evaluate(tables, shared)

        def step(carried: Any, own: Any) -> Any:
            env = {**shared, **dict(zip(body.inputs[consts:], (*carried, *own), strict=True))}
            Interpreter().evaluate(others, env)
            out = [value_of(v, env) for v in body.outputs]
            return out[:carry], out[carry:]

        start, stacks = list(operands[consts : consts + carry]), list(operands[consts + carry :])
        params = {name: e.params[name] for name in ("length", "reverse", "unroll")}
        end, stacked = lax.scan(step, start, stacks, **params)
        return [*end, *stacked]

    return written(builder, loop, e.inputs, e.outputs, e)


def computed_before(e: Equation, name: str, line: str, builder: Writer) -> list[Equation] | None:
    """A scan whose body reads what some equations compute; None if all of these depend on the carry.

    A loop before it computes them for all iterations. A split of a random key into one for each row, for example, needs
    the positions of the rows.

    Args:
        e: the scan.
        name, line: of the equations.
        builder: creates the equations.
    """
    (body,) = e.blocks
    consts, carry = scan_counts(e.params)
    known = {*body.inputs[:consts], *body.inputs[consts + carry :]}
    early = list[Equation]()
    for q in body.equations:
        values = {x for x in q.inputs if isinstance(x, Value)}
        if q.rule is None or q.mark is not None:
            continue
        if q.rule.passes:  # a barrier: each result depends on one operand
            early.append(q)
            known.update(v for x, v in zip(q.inputs, q.outputs, strict=True) if x in known)
        elif is_pure(q) and values <= known:
            early.append(q)
            known.update(q.outputs)
    moved = [q for q in early if (q.name, user_line(q.source_info)) == (name, line)]
    if not moved:
        return None
    made = [v for q in moved for v in q.outputs]
    needed, before = set(made), list[Equation]()
    for q in reversed(early):
        if not needed.isdisjoint(q.outputs):
            before.insert(0, q)
            needed.update(x for x in q.inputs if isinstance(x, Value) and x in known)
    others = [q for q in body.equations if q not in moved]
    slices = body.inputs[consts + carry :]
    read = [i for i, v in enumerate(slices) if v in needed]

    def loops(*operands: Any) -> list[Any]:
        shared = dict(zip(body.inputs[:consts], operands, strict=False))
        start, stacks = list(operands[consts : consts + carry]), list(operands[consts + carry :])

        def first(_: None, own: Any) -> Any:
            env = shared | {slices[i]: x for i, x in zip(read, own, strict=True)}
            for q in before:
                if q.rule is not None and q.rule.passes:
                    env.update((v, env[x]) for x, v in zip(q.inputs, q.outputs, strict=True) if x in env)
                else:
                    Interpreter().evaluate([q], env)
            return None, [value_of(v, env) for v in made]

        def second(carried: Any, own: Any) -> Any:
            env = shared | dict(zip((*body.inputs[consts:], *made), (*carried, *own), strict=True))
            Interpreter().evaluate(others, env)
            out = [value_of(v, env) for v in body.outputs]
            return out[:carry], out[carry:]

        _, given = lax.scan(first, None, [stacks[i] for i in read], length=e.params["length"])
        params = {key: e.params[key] for key in ("length", "reverse", "unroll")}
        end, stacked = lax.scan(second, start, [*stacks, *given], **params)
        return [*end, *stacked]

    return written(builder, loops, e.inputs, e.outputs, e)
