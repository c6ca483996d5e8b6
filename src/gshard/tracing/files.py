"""Files: short printed names of the user's source files.

``train.py:9`` names a file by its name. Two files of one name are called by the shortest ends of their paths that tell
them apart: ``data/utils.py:4`` and ``model/utils.py:4``.
"""

from __future__ import annotations

from collections.abc import Iterable

from gshard.core.jax_adapter import user_place
from gshard.core.program import Block, Equation


def names_of_files(paths: Iterable[str]) -> dict[str, str]:
    """The shortest end of each path that is no other's.

    >>> names_of_files(["/a/data/utils.py", "/a/model/utils.py", "/a/train.py"])
    {'/a/data/utils.py': 'data/utils.py', '/a/model/utils.py': 'model/utils.py', '/a/train.py': 'train.py'}
    """
    found, count, open_ = {}, 1, dict.fromkeys(paths)
    while open_:
        ends: dict[str, list[str]] = {}
        for path in open_:
            ends.setdefault("/".join(path.split("/")[-count:]), []).append(path)
        for end, same in ends.items():
            if len(same) == 1 or count > max(path.count("/") for path in same):
                found.update(dict.fromkeys(same, end))
        open_ = {path: None for path in open_ if path not in found}
        count += 1
    return dict(sorted(found.items()))


def with_names_of_files(block: Block, beside: Block | None = None) -> Block:
    """The block, its equations told what their files are called where the files' own names are not enough.

    Args:
        block: of a program.
        beside: another one, with which it agrees about names.
    """
    places = _places(block)
    names = names_of_files({path for _, path in [*places, *(_places(beside) if beside is not None else [])]})
    for e, path in places:
        if "/" in names[path].strip("/"):
            e.call_file(names[path])
    return block


def _places(block: Block) -> list[tuple[Equation, str]]:
    return [(e, place[0]) for e in block.walk() if (place := user_place(e.source_info)) is not None]
