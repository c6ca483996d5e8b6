"""Text of a search: what ``print(found)`` shows of the plan, the presets and meshes beside it, and the arguments."""

from __future__ import annotations

from collections.abc import Sequence

from gshard.core.number_text import format_ms
from gshard.core.program import format_bytes
from gshard.device.cost import Cost
from gshard.device.held import held_at_peak
from gshard.explanation.bounds import does_not_pay, headline
from gshard.explanation.idle import idle_devices
from gshard.naming.array_names import ArrayNames
from gshard.search.best import Best
from gshard.search.how_near import ended, how_near
from gshard.search.meshes import axes_text
from gshard.search.priced import PricedPlan

_SHOWN = 24  # rows of arguments
_PRESETS = 5  # that are shown beside, the best


def text_of_search(best: Best, tried: Sequence[Best], names: ArrayNames) -> str:
    """The best plan, why it takes its time, what was tried beside it, and how it splits the arguments."""
    plan, cost = best.chosen.plan, best.chosen.cost
    shape = axes_text(best.mesh)
    memory = f"peak {format_bytes(cost.peak)} of {format_bytes(int(best.limit))}"
    lines = [
        f"{format_ms(cost.seconds)} a call on {cost.machine.name}, mesh ({shape}); {memory}; "
        f"{format_bytes(cost.sent)} sent by each device"
    ]
    if best.chosen.recomputed:
        lines[0] += f"; give jit memory_limit={int(best.limit)} too, so that some values are recomputed"
    if not best.fits:
        lines += [
            "this DOES NOT FIT, and needs least of all that was tried. At its peak it holds:",
            *_held(best, names),
        ]
    else:
        lines.append(f"{how_near(best, is_one_of_several=len(tried) > 1)}; {best.seconds:.1f} s")
    if best.chosen is not best.searched:
        known = best.searched
        beside = "" if known is None else f"; the searched plan takes {format_ms(known.cost.seconds)}"
        lines.append(f"this is the plan of '{best.chosen.name}'{beside}")
    lines += filter(None, (headline(cost), does_not_pay(plan, cost)))
    lines += _idle(best, names)
    lines += ended(best.seconds, best.left_out, best.stopped, best.failed)
    shown = best_presets(tried or (best,))[:_PRESETS]
    lines += ["presets"] if shown else []
    for o in shown:
        on = f" on mesh ({axes_text(o.plan.mesh)})" if len(tried) > 1 else ""
        lines.append(f"  {o.name} {format_ms(o.cost.seconds)}{_note(o.cost, best, on)}")
    for other in tried:
        if other is not best and (known := other.searched) is not None:
            lines.append(f"mesh ({axes_text(other.mesh)}): {format_ms(known.cost.seconds)}{_note(known.cost, best)}")
    return "\n".join([*lines, "arguments", *_arguments(best, names)])


def best_presets(tried: Sequence[Best]) -> list[PricedPlan]:
    """Each preset on the mesh where it is best, of those for which it was priced; the best preset first."""
    best_of: dict[str, PricedPlan] = {}
    for plan in sorted((plan for best in tried for plan in best.others), key=lambda plan: plan.rank(tried[0].limit)):
        best_of.setdefault(plan.name, plan)
    return [*best_of.values()]


def _idle(best: Best, names: ArrayNames) -> list[str]:
    """Devices without work of their own, and those of this computer that the mesh leaves out."""
    mesh, lines = best.mesh, list(idle_devices(best.chosen.plan, names))
    if mesh.devices is not None and mesh.size < (there := len(mesh.devices[0].client.devices())):
        lines.append(f"the mesh has {mesh.size} of the {there} devices that there are; the others are not used")
    return lines


def _held(best: Best, names: ArrayNames) -> list[str]:
    """What takes most memory at the peak."""
    cost = best.chosen.cost
    held = held_at_peak(cost.memory, cost.program.block, best.chosen.plan.program, names)
    rows = [(cost.memory.arguments, "arguments"), *((row.bytes, str(row)) for row in held[:5])]
    return [f"  {format_bytes(n):>10} {what}" for n, what in rows]


def _note(cost: Cost, best: Best, on: str = "") -> str:
    return on if cost.peak <= best.limit else f"{on}, does not fit"


def _arguments(best: Best, names: ArrayNames) -> list[str]:
    """The largest arguments with their shardings, those that are split first; those of equal layers in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    plan = best.chosen.plan
    whole = {v: not any(plan.shardings[v].dims) for v in plan.program.block.inputs}
    for v in sorted(plan.program.block.inputs, key=lambda v: (whole[v], -v.bytes)):
        if v.shape:
            rows.setdefault((names.arguments[v].alike, plan.format(v)), []).append(names.arguments[v].text)
    shown = [
        f"  {text:<44} {own[0] if len(own) == 1 else f'{alike}  x{len(own)}'}" for (alike, text), own in rows.items()
    ]
    return shown[:_SHOWN] + ([f"  and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else [])
