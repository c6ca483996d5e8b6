r"""Placeholders, tags and accelerators: what a program puts something else for, and a translation must not lose.

    >>> found("Copy %(count)d of {name} to <b>%s</b> &amp; _close")
    ['%(count)d', '{name}', '<b>', '%s', '</b>', '&amp;', '_']

A model reads placeholders and never sees tags and accelerators, which training text is freed of. `mark` takes them
out of a sentence, and what it returns puts them into the translation.

    >>> marked = mark("<b>&Datei %s öffnen</b>")
    >>> marked.plain, marked.placeholders
    ('Datei %s öffnen', ('%s',))
    >>> marked.restore("Open the file %s")
    '<b>&Open the file %s</b>'
    >>> lost_and_invented(["%d", "%d"], "%d of {total} left")
    (['%d'], ['{total}'])
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence

# All in linear time, whatever is written: repetitions have limits, or end where another match would begin.
_CONVERSION = r"[-+#0]{0,5}\d{0,4}(?:\.\d{1,4})?(?:hh|ll|[hlLqjzt])?[diouxXeEfFgGcrsa@]"
_PARTS = {
    "tag": r"</?[A-Za-z][\w:.-]*(?:\s[^<>]*)?/?>",
    "entity": r"&(?:[A-Za-z]\w{1,7}|#\d{1,7}|#x[0-9A-Fa-f]{1,6});",
    "url": r"https?://[^\s<>\"]*[^\s<>\".,;:!?)\]}]",
    "braces": r"\$?\{\{[^{}]*\}\}|\$\{[^{}]*\}|\{[^{}]*\}",
    "template": r"\[%[^][]*%\]|@[A-Z][A-Z_]+@|%[A-Z][A-Z_]+%",
    "named": rf"%\([A-Za-z_][\w.]*\){_CONVERSION}",
    # Not "50 % des": a blank is a flag of printf's that is never used; nor "50%de".
    "printf": rf"%%|(?<!\d)%(?:\d{{1,4}}\$)?{_CONVERSION}|%n\b|%L?\d{{1,2}}",
    "variable": r"\$[A-Za-z_]\w*",
    "escape": r"\\[nrt\"]",
    "fragment": r"(?<=\w)\)[sdif]\b",  # the end of a "%(name)s" without its beginning, which a model may write
}
_PLACEHOLDER = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PARTS.items()))
_SIGNS = re.compile(r"https?://|[%{}$<>&\[\]@\\_~()]")  # without them nothing is a placeholder, tag or accelerator
_LETTER = r"(?=[^\W\d_])"
_ACCELERATOR = re.compile(rf"(?<![\w.])_{_LETTER}|&{_LETTER}(?!(?<=[A-Z]&)[A-Z])|(?<!\S)~{_LETTER}")
_IN_BRACKETS = re.compile(r"(?<!\s)\s*\(([_&~])([A-Za-z0-9])\)")  # "開く(_O)"


def found(text: str) -> list[str]:
    """All that must be kept, in order: placeholders and tags as they are, and the mark of an accelerator."""
    pieces = [(at.start(), at.group()) for at in _PLACEHOLDER.finditer(text)]
    accelerator = _accelerator(text)
    if accelerator is not None:
        pieces.append((accelerator[0], accelerator[2][0]))
    return [piece for _, piece in sorted(pieces)]


def lost_and_invented(wanted: Sequence[str], translation: str) -> tuple[list[str], list[str]]:
    """What a translation lacks of what is wanted, and what it has beyond it, as multisets."""
    theirs, ours = Counter(wanted), Counter(found(translation))
    return list((theirs - ours).elements()), list((ours - theirs).elements())


def complete(translation: str, wanted: Sequence[str]) -> str:
    """A translation with exactly the placeholders that are wanted, whatever the model wrote.

    One that is missing takes the place of one that is not wanted, as of a misspelt one, or else comes last. What is
    left over is taken out. If what remains of the text still spells one, the signs in it are taken out too.

    Args:
        translation: what the model wrote.
        wanted: placeholders of the source, in order.

    >>> complete("Copy {nam} to the file {x}", ["{name}", "%s", "%d"])
    'Copy {name} to the file %s %d'
    >>> complete("the folder name)s", [])
    'the folder name'
    """
    lost, invented = lost_and_invented(wanted, translation)
    if not lost and not invented:
        return translation
    keep, parts, at = Counter(wanted), [], 0
    for piece in _PLACEHOLDER.finditer(translation):
        kept = piece.group()
        if keep[kept]:
            keep[kept] -= 1
        else:
            kept = lost.pop(0) if lost and piece.lastgroup not in ("tag", "fragment") else ""
        parts += [translation[at : piece.start()], kept]
        at = piece.end()
    parts.append(translation[at:])
    for text in (parts, [_SIGNS.sub(" ", part) if n % 2 == 0 else part for n, part in enumerate(parts)]):
        whole = " ".join([*"".join(text).split(), *lost])
        if lost_and_invented(wanted, whole) == ([], []):
            return whole
    return " ".join([*_SIGNS.sub(" ", " ".join(parts[::2])).split(), *wanted])


def without(text: str) -> str:
    """A text without its placeholders and tags.

    >>> without("%d of <b>{total}</b>")
    '  of    '
    """
    return _PLACEHOLDER.sub(" ", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Marked:
    """A sentence without its tags and accelerator.

    Attributes:
        plain: what is left for the model to read.
        placeholders: of it, in order.
        tags: in order, each with the share of the text that is before it.
        accelerator: its mark, and the letter it is at.
    """

    plain: str
    placeholders: tuple[str, ...] = ()
    tags: tuple[tuple[float, str], ...] = ()
    accelerator: tuple[str, str] | None = None

    def restore(self, translation: str) -> str:
        """A translation of the plain sentence, with the tags and the accelerator.

        The model does not say which word of a translation a tag belongs to. So a tag goes to the gap between words
        that has as large a share of the text before it, and tags stay in their order. Tags around the whole sentence
        are around the whole translation.
        """
        if self.accelerator is not None:
            translation = _with_accelerator(translation, *self.accelerator)
        return _with_tags(translation, self.tags)


def mark(text: str) -> Marked:
    """Takes tags and the accelerator out of a sentence; one without any is left as it is, to the letter."""
    accelerator = None
    if at := _accelerator(text):
        start, end, accelerator = at
        text = text[:start] + text[end:]
    tags = [at for at in _PLACEHOLDER.finditer(text) if at.lastgroup == "tag"]
    starts, ends = [at.start() for at in tags], [at.end() for at in tags]
    parts = [text[start:end] for start, end in zip([0, *ends], [*starts, len(text)])]
    plain = "".join(parts)
    before = itertools.accumulate(map(len, parts))
    shares = tuple((count / max(len(plain), 1), tag.group()) for count, tag in zip(before, tags))
    placeholders = tuple(at.group() for at in _PLACEHOLDER.finditer(plain))
    return Marked(plain, placeholders, shares, accelerator)


def _outside(text: str) -> Callable[[int], bool]:
    """Whether a place in a text is in no placeholder."""
    covered = [at.span() for at in _PLACEHOLDER.finditer(text)]
    return lambda place: not any(start <= place < end for start, end in covered)


def _accelerator(text: str) -> tuple[int, int, tuple[str, str]] | None:
    """From where to where, and mark and letter, of the only accelerator of a text; with several there is none."""
    outside = _outside(text)
    asian = [at for at in _IN_BRACKETS.finditer(text) if outside(at.start())]
    if len(asian) == 1 and not text[: asian[0].start()].isascii():
        return *asian[0].span(), (asian[0].group(1), asian[0].group(2))
    plain = [at for at in _ACCELERATOR.finditer(text) if outside(at.start())]
    if len(plain) != 1 or asian:
        return None
    at = plain[0]
    return *at.span(), (at.group(), text[at.end()])


def _with_accelerator(text: str, sign: str, letter: str) -> str:
    """The mark before the first word that begins with the letter, else before the first word there is."""
    outside = _outside(text)
    words = [at.start() for at in re.finditer(r"(?<![\w.])[^\W\d_]", text) if outside(at.start())]
    if not words:
        return text
    at = next((at for at in words if text[at].casefold() == letter.casefold()), words[0])
    return text[:at] + sign + text[at:]


def _with_tags(text: str, tags: Sequence[tuple[float, str]]) -> str:
    outside = _outside(text)
    gaps = [0, *(at.start() for at in re.finditer(r"\s", text) if outside(at.start())), len(text)]
    out, done = "", 0
    for share, tag in tags:
        at = max(min(gaps, key=lambda gap: abs(gap - share * len(text))), done)
        if not tag.startswith("</") and at < len(text) and text[at].isspace():
            at += 1  # before the word, not before the blank
        out, done = out + text[done:at] + tag, at
    return out + text[done:]
