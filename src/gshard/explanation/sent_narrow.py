"""Lists the marked arrays that devices send in low precision, with the error bound (``send=`` of the marks)."""

from __future__ import annotations

from gshard.core.program import Program, Value
from gshard.language.low_precision import bound_text
from gshard.naming.array_names import ArrayNames


def sent_narrow(program: Program, names: ArrayNames) -> tuple[str, ...]:
    """For each line of a mark with ``send`` the arrays that it rounds, the dtype, and the error bound."""
    arrays: dict[tuple[str, str], dict[str, None]] = {}
    for e in program.block.walk():
        if e.mark is None or not e.mark.send or not isinstance(e.inputs[0], Value):
            continue
        send = e.mark.send
        scales = ", with a float32 scale for each row" if send == "int8" else ""
        bound = f"{send}{scales}: the error is at most {bound_text(e.mark.wide, send)}"
        name = names.array(e.inputs[0]).alike if names.is_named(e.inputs[0]) else ""
        arrays.setdefault((e.line, bound), {}).setdefault(name or e.mark.leaf or "an array", None)
    return tuple(f"{line}: {', '.join(called)} as {bound}" for (line, bound), called in arrays.items())
