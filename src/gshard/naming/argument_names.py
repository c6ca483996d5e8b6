"""Finds the names of arguments for rows, which are their paths, and one name for the arguments of equal layers.

The name of ``state['blocks'][3].up`` is ``state/blocks/3/up``. With equal layers it is one of ``state/blocks/*/up``.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

Path = tuple[str, ...]

_TOKEN = re.compile(r"""^[^.\[]+|\.[^.\[]+|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")
_MARKS = re.compile(r"""^(\[['"]?|\.)|['"]?\]$""")
_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayName:
    """The name of an array or a module in rows."""

    text: str = ""  # the name, such as ``blocks/3/up/kernel``
    alike: str = ""  # the same with ``*`` for the number of a layer, if there are several equal layers


def path_of_name(name: str) -> str:
    """The path of an argument (``core.paths``), from its name in the form of ``jax.tree_util.keystr``.

    >>> path_of_name("params['layers'][0].w1"), path_of_name("params['mlp/linear_1']['w']")
    ('params/layers/0/w1', 'params/mlp/linear_1/w')
    """
    tokens = _TOKEN.findall(name)
    return "/".join(_MARKS.sub("", token) for token in tokens) if "".join(tokens) == name else name


def argument_names(kinds: Mapping[str, Hashable]) -> dict[str, ArrayName]:
    """Different names of all arguments: their paths; the names as given where paths are the same.

    >>> argument_names({"p['l'][0].w": "f32[4]", "p['l'][1].w": "f32[4]"})["p['l'][1].w"]
    ArrayName(text='p/l/1/w', alike='p/l/*/w')
    """
    times = Counter(map(path_of_name, kinds))
    texts = {name: path if times[path := path_of_name(name)] == 1 else name for name in kinds}
    folded = equal_layers({tuple(text.split("/")): kinds[name] for name, text in texts.items()})
    return {
        name: ArrayName(text, "/".join(folded.get(words := tuple(text.split("/")), words)))
        for name, text in texts.items()
    }


def common_name(names: Sequence[ArrayName]) -> ArrayName:
    """One name for arrays together: of equal layers the common name, of others the first one and their number."""
    first, alike = names[0], {name.alike for name in names}
    if len(names) == 1:
        return first
    more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    return ArrayName(first.alike + more, first.alike + more)


def module_of(scopes: ArrayName, operands: Iterable[ArrayName]) -> ArrayName:
    """The module of an operation: its named scopes, else that of the only operand that belongs to one.

    The scopes of Equinox are the names of its classes, so the operand comes first. NNX has arrays in a ``value``.

    >>> up = ArrayName("m/layers/0/up/kernel/value", "m/layers/*/up/kernel/value")
    >>> module_of(ArrayName(), [ArrayName("x", "x"), up])
    ArrayName(text='m/layers/0/up', alike='m/layers/*/up')
    """
    names = [name for name in dict.fromkeys(operands) if "/" in name.text]
    if len(names) != 1 or (scopes.text and not scopes.text.startswith("eqx.nn.")):
        return scopes
    return ArrayName(*(p.removesuffix("/value").rpartition("/")[0] for p in (names[0].text, names[0].alike)))


def without_numbers(words: Sequence[str]) -> str:
    """The common form of texts that differ in numbers only, with ``*`` in place of those that differ.

    >>> without_numbers(["edges_3_grid2mesh", "edges_4_grid2mesh"])
    'edges_*_grid2mesh'
    """
    parts = zip(*(re.split(r"(\d+)", word) for word in words), strict=False)
    return "".join(part[0] if len({*part}) == 1 else "*" for part in parts)


def equal_layers(paths: Mapping[Path, Hashable], *, same_inside: bool = True) -> dict[Path, Path]:
    """For each path in one of several equal layers, the path with ``*`` in place of the number of the layer.

    Layers are siblings that differ by a number. Equal layers contain the same paths of the same kinds. A word with a
    number, such as ``layers_0``, is a layer only if it contains other words. Inside a layer it must contain even more:
    ``wi_0/kernel`` and ``wi_1/kernel``, or the arrays of a pair, are different parts of one layer.

    >>> equal_layers({("ws", "0"): (8, 8), ("ws", "1"): (8, 8), ("b",): (8,)})
    {('ws', '0'): ('ws', '*'), ('ws', '1'): ('ws', '*')}
    """
    folded: dict[Path, Path] = {}
    _fold(list(paths), 0, paths, same_inside, False, folded)
    return folded


def equal_modules(scopes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """For each module in one of several equal layers, its name with ``*``; of modules with what is inside of them.

    A scope with a number that holds no other scope may be a layer, too.

    >>> equal_modules([("net/layer_0", "dot"), ("net/layer_1", "dot")])
    {'net/layer_0': 'net/layer_*', 'net/layer_1': 'net/layer_*'}
    """
    paths = {(*module.split("/"), inside): None for module, inside in scopes if module}
    layers = equal_layers(paths, same_inside=False).items()
    return {"/".join(path[:-1]): "/".join(alike[:-1]) for path, alike in layers}


def _fold(
    paths: Sequence[Path],
    at: int,
    kinds: Mapping[Path, Hashable],
    same_inside: bool,
    in_layer: bool,
    folded: dict[Path, Path],
) -> None:
    """Replaces the numbers of equal layers from word ``at`` of these paths on, and adds the results to ``folded``."""
    children: dict[str, list[Path]] = {}
    for path in paths:
        if len(path) > at:
            children.setdefault(path[at], []).append(path)
    forms: dict[str, list[tuple[str, Hashable]]] = {}
    for word, below in children.items():
        inside = frozenset((path[at + 1 :], kinds[path]) for path in below) if same_inside else None
        may_be_layer = max(map(len, below)) - at - (not word.isdecimal()) - in_layer > 0
        numbers = reversed([*_NUMBER.finditer(word)] if may_be_layer else [])
        forms[word] = [(f"{word[: number.start()]}*{word[number.end() :]}", inside) for number in numbers]
    times = Counter(form for some in forms.values() for form in some)
    siblings: dict[tuple[str, Hashable], list[str]] = {}
    for word, some in forms.items():
        siblings.setdefault(next((form for form in some if times[form] > 1), (word, None)), []).append(word)
    for (common, _), words in siblings.items():
        are_layers = common not in words and len(words) > 1
        for word in words:
            _fold(children[word], at + 1, kinds, same_inside, in_layer or are_layers, folded)
            for path in children[word] if are_layers else ():
                inner = folded.get(path, path)
                folded[path] = (*inner[:at], common, *inner[at + 1 :])
