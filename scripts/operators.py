"""Writes src/gshard/rules/OPERATORS.md: what every operator's dimensions need to be split, read off the rules.

    python scripts/operators.py            # or: make operators

Each case of ``tests/harness.py`` is traced, and the kinds of its factors are noted. The page is the same on every
machine and for every version of JAX that is supported.
"""

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Rule
from gshard.language.region import REGIONS
from gshard.language.registry import own_rules

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "src" / "gshard" / "rules" / "OPERATORS.md"
FIRST = (
    "elementwise", "contract", "ragged_dot", "reductions", "shape", "slicing", "dynamic", "indexing", "window", "sort",
)  # fmt: skip

HEAD = """# Operators

<!-- Written by `make operators` from the rules and from the cases of tests/harness.py: change those, not this. -->

What splitting a dimension costs depends on what the operator does along it:

- **for nothing**: each device computes its part, and nothing is sent;
- **combined**: each device gets a part of the result; the parts are combined by a collective, at once or later;
- **communicates**: the operator's own way to run on shards communicates: a halo, a prefix sum, candidates;
- **gathered**: the operand is all-gathered along that dimension first.

The example is the rule of one case, in the notation of the [architecture](../../../docs/architecture.md): its letters
are the loops of the computation. "Some" means that it depends on the parameters: a dimension that a window does not
move over costs nothing, and what would have to be combined by an unknown function may have to be gathered.

Functions of `jax.numpy`, `jax.nn` and so on are made of these operators. One that is **not listed** is gathered,
reported by `gshard.explain`, and refused with `strict=True`; but batch dimensions that its own `vmap` rule proves are
split for nothing. `gshard.rule` registers an operator in a line, and `gshard.testing.check_rule` finds out whether
the line is true: see [An operator of your own](../../../docs/own_operators.md).
"""


@dataclasses.dataclass
class Seen:
    """What the cases of one operator showed."""

    kinds: list[frozenset[tuple[str, str | None]]] = dataclasses.field(default_factory=list)
    examples: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)

    def add(self, rule: Rule) -> None:
        """Notes the factors of one case that there is something to split of."""
        self.kinds.append(frozenset((f.kind, f.monoid) for f in rule.factors if f.size > 1))
        text = re.sub(r"=\d+", "", str(rule))
        self.examples.append((-len(self.kinds[-1]), len(text), text))

    @property
    def example(self) -> str:
        """The rule that shows most kinds of factors, the shortest of them."""
        return min(self.examples)[2].strip()

    @property
    def cells(self) -> tuple[str, ...]:
        """For nothing, combined, communicates, gathered."""
        monoids = sorted({m for kinds in self.kinds for k, m in kinds if k == REDUCE and m})
        return (self._often(PARALLEL), ", ".join(monoids), self._often(COMMUNICATE), self._often(REPLICATE))

    def _often(self, kind: str) -> str:
        having = [kind in {k for k, _ in kinds} for kinds in self.kinds if kinds]
        return "" if not any(having) else "yes" if all(having) else "some"


def seen() -> dict[str, Seen]:
    """The operators that the cases reach."""
    found: dict[str, Seen] = {}
    sys.path.insert(0, str(ROOT / "tests"))
    for row in importlib.import_module("harness").rows():
        for e in row.program.block.walk():
            if e.name == row.primitive and e.rule is not None:
                found.setdefault(e.name, Seen()).add(e.rule)
    return found


def page() -> str:
    """The text of the page."""
    found = seen()
    names: dict[str, list[str]] = {}
    for name in own_rules():
        names.setdefault(own_rules()[name].__module__.rpartition(".")[2], []).append(name)
    lines = [HEAD]
    for family in sorted(names, key=lambda f: (FIRST.index(f) if f in FIRST else len(FIRST), f)):
        module = importlib.import_module(f"gshard.rules.{family}")
        shown = found.keys() & names[family]
        lines += [f"## {family.capitalize()}", "", *(_first_paragraph(module) if shown else _words(module)), ""]
        lines += [*_table(names[family], found), ""]
    lines += ["## Regions", "", "Loops and branches: what is inside is split by itself.", ""]
    lines += [", ".join(f"`{name}`" for name in sorted(REGIONS)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(names: list[str], found: dict[str, Seen]) -> Iterator[str]:
    """One line for all operators that share a rule and its costs; the ones without a case below."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        if name in found:
            key = (own_rules()[name].__name__, *found[name].cells)
            alike.setdefault(key, []).append(name)
    if alike:
        yield "| operators | for nothing | combined | communicates | gathered | for example |"
        yield "|---|---|---|---|---|---|"
    for (_, *cells), members in alike.items():
        shown = ", ".join(f"`{name}`" for name in members)
        yield f"| {shown} | {' | '.join(cells)} | `{found[members[0]].example}` |"
    if rest := [name for name in names if name not in found]:
        if alike:
            yield ""
        yield f"{'By the same rules: ' if alike else ''}{', '.join(f'`{name}`' for name in rest)}"


def _first_paragraph(module: object) -> list[str]:
    """What a module's docstring begins with."""
    return [" ".join((inspect.getdoc(module) or "").split("\n\n")[0].split()).replace("``", "`")]


def _words(module: object) -> list[str]:
    """A module's docstring as it is written, for operators that no example shows."""
    return ["```text", *(inspect.getdoc(module) or "").splitlines(), "```"]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
