"""CONSTANTS.md lists every numeric constant of the cost model, of search, and of recomputation, with its value."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "gshard"
PARTS = ("core/time_budget.py", "naming", "device", "remat", "lowering", "search", "xla", "explanation")
PAGE = (SRC / "CONSTANTS.md").read_text("utf-8")
STEERING, SHOWN = PAGE.split("## Constants of the output\n")
ROW = re.compile(r"^\| `([\w/]+\.py)` `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def number(node):
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
    except (NameError, TypeError, AttributeError):
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def constants():
    """Module, name and value of all numbers that modules bind."""
    for part in PARTS:
        assert (SRC / part).exists(), part
        for path in sorted((SRC / part).rglob("*.py")) or [SRC / part]:
            for statement in ast.parse(path.read_text("utf-8")).body:
                if not isinstance(statement, ast.Assign):
                    continue
                target, value = statement.targets[0], statement.value
                both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                for name, given in zip(target.elts, value.elts, strict=True) if both else [(target, value)]:
                    if isinstance(name, ast.Name) and (found := number(given)) is not None:
                        yield path.relative_to(SRC).as_posix(), name.id, found


def test_every_constant_is_listed_with_its_value():
    found = {(module, name): value for module, name, value in constants()}
    rows = {(module, name): value for module, name, value, *_ in ROW.findall(STEERING)}
    shown = set(re.findall(r"`([\w/]+\.py)`\s+`(\w+)`", SHOWN))
    assert len(rows) > 20
    assert not rows.keys() & shown
    assert rows.keys() | shown == found.keys()
    assert {key: number(ast.parse(value, mode="eval").body) for key, value in rows.items()} == {
        key: found[key] for key in rows
    }


def test_every_constant_has_a_unit_a_reason_and_a_test_that_exists():
    for module, name, _, unit, reason, moves in ROW.findall(STEERING):
        assert unit.strip(), (module, name)
        assert reason.strip(), (module, name)
        tests = re.findall(r"`(tests/[\w/]+\.py)`", moves)
        families = re.findall(r"`(\w+)/(\w+)'?`", moves)
        assert tests or families or moves.startswith("planning time"), (module, name)
        for test in tests:
            assert (ROOT / test).is_file(), test
        for family, case in families:
            assert f"def {case}(" in (ROOT / "tests" / "families" / f"{family}.py").read_text("utf-8"), case
