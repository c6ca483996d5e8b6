"""Chooses short printed names for the user's source files.

Usually the printed name is the name of the file: ``train.py:9``. For several files of one name, it is the shortest end
of the path that differs from the others: ``data/utils.py:4`` and ``model/utils.py:4``.
"""

from __future__ import annotations

from collections.abc import Iterable

from gshard.core.jax_adapter import user_place
from gshard.core.program import Block, Equation


def names_of_files(paths: Iterable[str]) -> dict[str, str]:
    """The shortest end of each path that is not an end of another path.

    >>> names_of_files(["/a/data/utils.py", "/a/model/utils.py", "/a/train.py"])
    {'/a/data/utils.py': 'data/utils.py', '/a/model/utils.py': 'model/utils.py', '/a/train.py': 'train.py'}
    """
    names: dict[str, str] = {}
    count = 1  # components of the path in the name
    unnamed = dict.fromkeys(paths)
    while unnamed:
        paths_of: dict[str, list[str]] = {}
        for path in unnamed:
            paths_of.setdefault("/".join(path.split("/")[-count:]), []).append(path)
        for end, same in paths_of.items():
            if len(same) == 1 or count > max(path.count("/") for path in same):
                names.update(dict.fromkeys(same, end))
        unnamed = {path: None for path in unnamed if path not in names}
        count += 1
    return dict(sorted(names.items()))


def with_names_of_files(block: Block, beside: Block | None = None) -> Block:
    """Sets the printed file names of equations whose files share their name with another file."""
    files = _files(block)
    all_files = [*files, *(_files(beside) if beside is not None else [])]
    names = names_of_files({path for _, path in all_files})
    for e, path in files:
        if "/" in names[path].strip("/"):
            e.call_file(names[path])
    return block


def _files(block: Block) -> list[tuple[Equation, str]]:
    """The equations that have a user's file, each with the path of the file."""
    return [(e, place[0]) for e in block.walk() if (place := user_place(e.source_info)) is not None]
