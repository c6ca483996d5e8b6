"""Finds short forms of the names of arguments, and common names for equal layers.

The short form of ``state[0]['blocks'][3]['up']['kernel'].value`` is ``blocks[3].up.kernel``, without the common
beginning of all weights of the argument and a common attribute at the end. With equal layers it is one of
``blocks[*].up.kernel``.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

Path = tuple[str, ...]

_TOKEN = re.compile(r"""^[^.\[]+|\.[^.\[]+|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")
_NUMBER = re.compile(r"\d+")
_FEWEST = 2  # the smallest number of words of a short name, if the name has as many


def tokens_of(name: str) -> Path:
    """The parts of a name in the form of ``jax.tree_util.keystr``. A key that contains a path has several parts.

    >>> tokens_of("state[0]['up'].value"), tokens_of("params['mlp/linear_1']['w']")
    (('state', '[0]', "['up']", '.value'), ('params', "['mlp", "/linear_1']", "['w']"))
    """
    tokens = [match.group() for match in _TOKEN.finditer(name)]
    if "".join(tokens) != name:
        return (name,)
    return tuple(part for token in tokens for part in (re.split(r"(?=/)", token) if _is_key(token) else [token]))


def path_of_name(name: str) -> str:
    """The path of an argument (``core.paths``) with this name.

    >>> path_of_name("params['layers'][0].w1")
    'params/layers/0/w1'
    """
    return "/".join(_word(token).strip("[]") for token in tokens_of(name))


def without_numbers(words: Sequence[str]) -> str:
    """The common form of texts that differ in numbers only, with ``*`` in place of those that differ.

    >>> without_numbers(["edges_3_grid2mesh", "edges_4_grid2mesh"]), without_numbers(["[3]", "[4]"])
    ('edges_*_grid2mesh', '[*]')
    """
    parts = zip(*(re.split(r"(\d+)", word) for word in words), strict=False)
    return "".join(part[0] if len({*part}) == 1 else "*" for part in parts)


def _without_one_number(word: str) -> list[str]:
    """The word with ``*`` in place of one of its numbers, the last number first."""
    return [word[: number.start()] + "*" + word[number.end() :] for number in reversed([*_NUMBER.finditer(word)])]


def _is_key(token: str) -> bool:
    return token[:2] in ("['", '["')


def dotted(tokens: Sequence[str]) -> str:
    """The parts of a name, joined by dots.

    >>> dotted(("['blocks']", "[0]", "['up']", ".kernel"))
    'blocks[0].up.kernel'
    """
    text = ""
    for token in tokens:
        word = _word(token)
        if not word.strip("~"):  # Haiku's name for a constructor
            continue
        text += word if word.startswith("[") or not text else f".{word}"
    return text


def _word(token: str) -> str:
    if _is_key(token):
        token = token[2:]
    return (token[:-2] if token[-2:] in ("']", '"]') else token).removeprefix(".").removeprefix("/")


def equal_layers(paths: Mapping[Path, Hashable], *, same_inside: bool = True) -> dict[Path, Path]:
    """For each path in one of several equal layers, the path with ``*`` in place of the number of the layer.

    Layers are siblings that differ by a number. Equal layers contain the same paths of the same kinds. A word with a
    number, such as ``layers_0``, is a layer only if it contains other words. Inside a layer it must contain even more:
    ``wi_0.kernel`` and ``wi_1.kernel``, or the arrays of a pair, are different parts of one layer.

    >>> equal_layers({("ws", "[0]"): (8, 8), ("ws", "[1]"): (8, 8), ("b",): (8,)})
    {('ws', '[0]'): ('ws', '[*]'), ('ws', '[1]'): ('ws', '[*]')}
    """
    folded: dict[Path, Path] = {}
    _fold(list(paths), 0, paths, same_inside, False, folded)
    return folded


def _fold(
    paths: Sequence[Path],
    at: int,
    kinds: Mapping[Path, Hashable],
    same_inside: bool,
    in_layer: bool,
    folded: dict[Path, Path],
) -> None:
    """Replaces the numbers of equal layers in words ``at`` and later of these paths, and adds them to ``folded``."""
    children: dict[str, list[Path]] = {}
    for path in paths:
        if len(path) > at:
            children.setdefault(path[at], []).append(path)
    forms: dict[str, list[tuple[str, Hashable]]] = {}
    for word, below in children.items():
        inside = frozenset((path[at + 1 :], kinds[path]) for path in below) if same_inside else None
        may_be_layer = max(map(len, below)) - at - (not _is_index(word)) - in_layer > 0
        forms[word] = [(form, inside) for form in _without_one_number(word)] if may_be_layer else []
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


@dataclasses.dataclass(frozen=True, slots=True)
class ShortName:
    """The short name of an argument or a module."""

    text: str = ""  # the name, such as ``blocks[3].up.kernel``
    # the common name with those of equal layers, such as ``blocks[*].up.kernel``; without equal layers the same as
    # ``text``
    alike: str = ""


def common_name(names: Sequence[ShortName]) -> ShortName:
    """One name for arrays together: of equal layers the common name, of others the first one and their number."""
    first, alike = names[0], {name.alike for name in names}
    if len(names) == 1:
        return first
    more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    return ShortName(first.alike + more, first.alike + more)


def short_names(kinds: Mapping[str, Hashable], weights: Collection[str]) -> dict[str, ShortName]:
    """Different short names for all arguments. If a short form is not unique, gshard uses the whole name.

    >>> kinds = {"state[0]['a']['up'].value": 4, "state[0]['b']['up'].value": 8, "state[1].mu['a']['up'].value": 4}
    >>> [name.text for name in short_names(kinds, list(kinds)[:2]).values()]
    ['a.up', 'b.up', 'mu.a.up']
    """
    parts: dict[str, tuple[str, Path]] = {}  # the omitted beginning and the rest
    of_argument: dict[str, list[str]] = {}
    for name in kinds:
        of_argument.setdefault(tokens_of(name)[0], []).append(name)
    for names in of_argument.values():
        paths = {name: tokens_of(name) for name in names}
        ends = {path[-1] for path in paths.values()}
        if len(names) > 1 and len(ends) == 1 and next(iter(ends)).startswith("."):
            paths = {name: path[:-1] for name, path in paths.items()}
        compared = [path for name, path in paths.items() if name in weights] or list(paths.values())
        first = compared[0]
        longest = max(min(map(len, compared)) - _FEWEST, 0)
        shared = next(first[:n] for n in range(longest, -1, -1) if all(path[:n] == first[:n] for path in compared))
        for name, path in paths.items():
            begin = _begin(path, shared)
            parts[name] = "".join(path[:begin]), path[begin:]
    folded = equal_layers({(before, *rest): kinds[name] for name, (before, rest) in parts.items()})
    times = Counter(dotted(rest) for _, rest in parts.values())
    short: dict[str, ShortName] = {}
    for name, (before, rest) in parts.items():
        alike = folded.get((before, *rest), (before, *rest))
        text = dotted(rest)
        is_unique = times[text] == 1
        short[name] = ShortName(text, dotted(alike[1:])) if is_unique else ShortName(name, "".join(alike))
    return short


def _begin(path: Path, shared: Path) -> int:
    """The position in a path at which its short name begins: at a word, not at a number."""
    if path[: len(shared)] == shared:
        return max(i for i in range(min(len(shared), len(path) - 1) + 1) if not _is_index(path[i]))
    return next((i for i, token in enumerate(path) if i and not _is_index(token)), 0)


def _is_index(token: str) -> bool:
    return token.startswith("[") and not _is_key(token)
