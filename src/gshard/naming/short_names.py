"""Short names: short forms of argument names, with common names for equal layers.

``state[0]['blocks'][3]['up']['kernel'].value`` is ``blocks[3].up.kernel``: what all weights of an argument share in
front is left out, and an attribute in which all leaves end. With equal layers it is one of ``blocks[*].up.kernel``.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

Path = tuple[str, ...]

_TOKEN = re.compile(r"""^[^.\[]+|\.[^.\[]+|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")
_NUMBER = re.compile(r"\d+(?=\D*$)")  # the last of a word
_FEWEST = 2  # words that are left of a name, where it has so many


def tokens_of(name: str) -> Path:
    """The parts of a name as ``jax.tree_util.keystr`` writes it; a key that is a path itself has several.

    >>> tokens_of("state[0]['up'].value"), tokens_of("params['mlp/linear_1']['w']")
    (('state', '[0]', "['up']", '.value'), ('params', "['mlp", "/linear_1']", "['w']"))
    """
    found = [match.group() for match in _TOKEN.finditer(name)]
    if "".join(found) != name:
        return (name,)
    return tuple(part for token in found for part in (re.split(r"(?=/)", token) if _is_key(token) else [token]))


def path_of_name(name: str) -> str:
    """The path of an argument (``core.paths``) by its name.

    >>> path_of_name("params['layers'][0].w1")
    'params/layers/0/w1'
    """
    return "/".join(_word(token).strip("[]") for token in tokens_of(name))


def without_number(word: str) -> str:
    """A word with ``*`` in place of its last number.

    >>> without_number("layers_3"), without_number("[3]"), without_number("mlp")
    ('layers_*', '[*]', 'mlp')
    """
    return _NUMBER.sub("*", word)


def _is_key(token: str) -> bool:
    return token[:2] in ("['", '["')


def dotted(tokens: Sequence[str]) -> str:
    """Parts of a name with dots between words.

    >>> dotted(("['blocks']", "[0]", "['up']", ".kernel"))
    'blocks[0].up.kernel'
    """
    text = ""
    for token in tokens:
        word = _word(token)
        if not word.strip("~"):  # where Haiku's path leaves a constructor
            continue
        text += word if word.startswith("[") or not text else f".{word}"
    return text


def _word(token: str) -> str:
    if _is_key(token):
        token = token[2:]
    return (token[:-2] if token[-2:] in ("']", '"]') else token).removeprefix(".").removeprefix("/")


def equal_layers(paths: Mapping[Path, Hashable], *, same_inside: bool = True) -> dict[Path, Path]:
    """For each path below a number that has siblings like it, the path with ``*`` in place of the number.

    Siblings are alike if they have the same paths inside, of the same kinds. A word with a number, such as
    ``layers_0``, is one only if it has something inside. Inside of a layer fewer numbers are: ``wi_0.kernel`` and
    ``wi_1.kernel``, or the two of a pair of arrays, are not layers but have different parts in one.

    Args:
        paths: each with the kind of what is there, such as shape and dtype.
        same_inside: whether siblings must be alike; otherwise there must be siblings.

    >>> equal_layers({("ws", "[0]"): (8, 8), ("ws", "[1]"): (8, 8), ("b",): (8,)})
    {('ws', '[0]'): ('ws', '[*]'), ('ws', '[1]'): ('ws', '[*]')}
    """
    found: dict[Path, Path] = {}
    _fold(list(paths), 0, paths, same_inside, False, found)
    return found


def _fold(
    paths: Sequence[Path],
    at: int,
    kinds: Mapping[Path, Hashable],
    same_inside: bool,
    in_layer: bool,
    found: dict[Path, Path],
) -> None:
    children: dict[str, list[Path]] = {}
    for path in paths:
        if len(path) > at:
            children.setdefault(path[at], []).append(path)
    alike: dict[tuple[str, Hashable], list[str]] = {}
    for word, below in children.items():
        inside = frozenset((path[at + 1 :], kinds[path]) for path in below) if same_inside else None
        depth = max(map(len, below)) - at - (not _is_index(word)) - in_layer  # at least 1 where it may be a layer
        alike.setdefault((without_number(word) if depth > 0 else word, inside), []).append(word)
    for (folded, _), same in alike.items():
        is_layer = folded not in same and len(same) > 1
        for word in same:
            _fold(children[word], at + 1, kinds, same_inside, in_layer or is_layer, found)
            for path in children[word] if is_layer else ():
                inner = found.get(path, path)
                found[path] = (*inner[:at], folded, *inner[at + 1 :])


@dataclasses.dataclass(frozen=True, slots=True)
class ShortName:
    """What an argument is called.

    Attributes:
        text: alone, ``blocks[3].up.kernel``.
        alike: together with what equal layers have, ``blocks[*].up.kernel``; the same as ``text`` if there are none.
    """

    text: str
    alike: str


def short_names(kinds: Mapping[str, Hashable], weights: Collection[str]) -> dict[str, ShortName]:
    """Short names of all arguments, all of them different. One that would not be is the whole name.

    Args:
        kinds: of each argument, by its name, what equal layers have alike: shape and dtype.
        weights: names of those that products and look-ups read: what they share in front is left out.

    >>> kinds = {"state[0]['a']['up'].value": 4, "state[0]['b']['up'].value": 8, "state[1].mu['a']['up'].value": 4}
    >>> [name.text for name in short_names(kinds, list(kinds)[:2]).values()]
    ['a.up', 'b.up', 'mu.a.up']
    """
    parts: dict[str, tuple[str, Path]] = {}  # what is left out in front, and the rest
    of_argument: dict[str, list[str]] = {}
    for name in kinds:
        of_argument.setdefault(tokens_of(name)[0], []).append(name)
    for names in of_argument.values():
        paths = {name: tokens_of(name) for name in names}
        ends = {path[-1] for path in paths.values()}
        if len(names) > 1 and len(ends) == 1 and next(iter(ends)).startswith("."):
            paths = {name: path[:-1] for name, path in paths.items()}
        read = [path for name, path in paths.items() if name in weights] or list(paths.values())
        most = max(min(map(len, read)) - _FEWEST, 0)
        shared = next(read[0][:n] for n in range(most, -1, -1) if all(path[:n] == read[0][:n] for path in read))
        for name, path in paths.items():
            begin = _begin(path, shared)
            parts[name] = "".join(path[:begin]), path[begin:]
    folded = equal_layers({(before, *rest): kinds[name] for name, (before, rest) in parts.items()})
    times = Counter(dotted(rest) for _, rest in parts.values())
    found = {}
    for name, (before, rest) in parts.items():
        alike = folded.get((before, *rest), (before, *rest))
        text = dotted(rest)
        unique = times[text] == 1
        found[name] = ShortName(text, dotted(alike[1:])) if unique else ShortName(name, "".join(alike))
    return found


def _begin(path: Path, shared: Path) -> int:
    """Where the short name of a path begins: at a word, not at a number."""
    if path[: len(shared)] == shared:
        return max(i for i in range(min(len(shared), len(path) - 1) + 1) if not _is_index(path[i]))
    return next((i for i, token in enumerate(path) if i and not _is_index(token)), 0)


def _is_index(token: str) -> bool:
    return token.startswith("[") and not _is_key(token)
