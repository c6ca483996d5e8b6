"""Takes equations out of a scan.

``without_tables`` computes before the scan what is the same in all iterations and depends on nothing.
``computed_before`` computes some equations for all iterations before the scan, if they do not depend on the carry.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from gshard.core.jax_adapter import scan_counts, user_line
from gshard.core.program import Constant, Equation, Value
from gshard.language.region import Interpreter, value_of
from gshard.rewrite.equation_graph import Writer, is_pure, written


def without_tables(e: Equation, builder: Writer) -> list[Equation] | None:
    """A scan whose body reads tables, arrays that depend on nothing, instead of making them; None if it makes none.

    A table of positions along the batch, such as the counters of random bits, has other elements in each micro-batch.
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
