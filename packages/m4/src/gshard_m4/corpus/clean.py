"""Clean: which pairs are worth training on, and why the others are not.

Text is put in order first (tags and keyboard accelerators out, blanks joined, Unicode composed; placeholders such as
``%s`` or ``{name}`` stay). Then each rule looks at the pair; the first that objects gives the reason.

    >>> clean(Pair("de", "&Datei <b>wird</b> geöffnet", "_Opening the <b>file</b>"))
    Pair(language='de', foreign='Datei wird geöffnet', english='Opening the file')
    >>> clean(Pair("de", "OK", "OK"))
    'identical'
"""

from __future__ import annotations

import functools
import html
import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from gshard_m4.corpus.pair import Pair

_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}/?>")
_BLANKS = re.compile(r"\s+")
_ENTITY = re.compile(r"&#?\w{1,8};")
# Controls, soft hyphens and marks of direction; joiners stay: they matter in Persian and in the scripts of India.
_UNSEEN = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\xad\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
# "開く(_O)", and "開く(O)..." at the end; not the plural of "file(s)".
_ASIAN_ACCELERATOR = re.compile(
    r"\s*\([_&~][A-Za-z0-9]\)|(?<=[\u3040-\u9fff\uac00-\ud7af])\s*\([A-Z]\)(?=\s*(?:\.\.\.|…|:|：)?\s*$)"
)
# A single mark before a letter, but not in "file_name" or "Q&A": an underscore begins a word, an ampersand does not
# part capitals.
_LETTER = r"(?=[^\W\d_])"
_ACCELERATORS = {
    "_": re.compile(rf"(?<![\w.])_{_LETTER}"),
    "&": re.compile(rf"&{_LETTER}(?!(?<=[A-Z]&)[A-Z])"),
    "~": re.compile(rf"(?<!\S)~{_LETTER}"),
}
# In the short texts of menus also within a word ("E_xit"), where a program is known to mark them so.
_WITHIN = {
    "_": re.compile(rf"(?<=[^\W\d_])_{_LETTER}|(?<![\w%{{$/.])_{_LETTER}"),
    "&": _ACCELERATORS["&"],
    "~": re.compile(rf"~{_LETTER}"),
}
_MENU = 30
PLACEHOLDER = re.compile(
    r"%\([^)]*\)[a-z]|%\d*\$?[a-z]|\$\{[^}]*\}|\{\{[^}]*\}\}|\{[^{}]*\}|\[%[^\]]*%\]|%L?\d"
    r"|\$[A-Za-z_]\w*|\[\[[^\]]*\]\]|@[A-Z]+@|https?://\S+|`[^`]*`"
)
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
LONGEST = 1200
"""Characters of the longest sentence."""

_NO_SENTENCE = 10 * LONGEST  # not even put in order

# Languages that are not written in Latin letters, by a range of letters most of their text must come from.
_SCRIPTS: dict[str, tuple[str, str]] = {
    "CYRILLIC": (
        "ru uk be bg mk sr kk ky mn tg tt uz_Cyrl ba cv os udm sah ab ce kv myv mdf av lez bua tyv mhr mrj rue xal alt "
        "inh",
        "\u0400-\u052f",
    ),
    "ARABIC": (
        "ar fa ur ug ps sd ckb ks azb skr pnb glk mzn arz ary lrc bgn bqi lki khw",
        "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefe",
    ),
    "HEBREW": ("he yi", "\u0590-\u05ff"),
    "GREEK": ("el pnt", "\u0370-\u03ff\u1f00-\u1fff"),
    "ARMENIAN": ("hy hyw", "\u0530-\u058f"),
    "GEORGIAN": ("ka xmf", "\u10a0-\u10ff\u1c90-\u1cbf"),
    "DEVANAGARI": ("hi mr ne mai kok brx dgo doi sa bho new anp awa", "\u0900-\u097f"),
    "BENGALI": ("bn as bpy mni", "\u0980-\u09ff\uabc0-\uabff"),
    "GURMUKHI": ("pa", "\u0a00-\u0a7f"),
    "GUJARATI": ("gu", "\u0a80-\u0aff"),
    "ORIYA": ("or", "\u0b00-\u0b7f"),
    "TAMIL": ("ta", "\u0b80-\u0bff"),
    "TELUGU": ("te", "\u0c00-\u0c7f"),
    "KANNADA": ("kn tcy", "\u0c80-\u0cff"),
    "MALAYALAM": ("ml", "\u0d00-\u0d7f"),
    "SINHALA": ("si", "\u0d80-\u0dff"),
    "THAI": ("th", "\u0e00-\u0e7f"),
    "LAO": ("lo", "\u0e80-\u0eff"),
    "TIBETAN": ("bo dz", "\u0f00-\u0fff"),
    "MYANMAR": ("my shn mnw blk", "\u1000-\u109f\uaa60-\uaa7f"),
    "ETHIOPIC": ("am ti", "\u1200-\u139f"),
    "KHMER": ("km", "\u1780-\u17ff"),
    "HANGUL": ("ko", "\uac00-\ud7af\u1100-\u11ff"),
    "HAN": ("zh_Hans zh_Hant yue lzh wuu gan", "\u3400-\u9fff\uf900-\ufaff"),
    "JAPANESE": ("ja", "\u3040-\u30ff\u3400-\u9fff"),
}
_SCRIPT_OF = {lang: re.compile(f"[{letters}]") for langs, letters in _SCRIPTS.values() for lang in langs.split()}
_NOT_LATIN = re.compile("[" + "".join(letters for _, letters in _SCRIPTS.values()) + "]")
# Written in several scripts, or in one that is not in the list.
_ANY_SCRIPT = set(
    "sr_Latn ku ha ms az uz tk crh kab zgh shi tzm ber rif sat cr chr iu nqo pi dv ii ff su jv ban bug mad lad rom vai "
    "bax kjp ksw pwo hne bh dty gbm kfy mag raj".split()
)
_DENSE = {"zh_Hans", "zh_Hant", "yue", "lzh", "wuu", "gan", "ja", "ko"}


def tidy(text: str, accelerators: str = "") -> str:
    r"""A sentence without tags and accelerators, with single blanks and composed letters.

    Args:
        text: the sentence.
        accelerators: marks that the program it is from puts within words too: any of ``_&~``.

    >>> tidy("  _Save as… <b>%(name)s</b>\n ")
    'Save as… %(name)s'
    >>> tidy("the entity_id of file(s), Q&amp;A")
    'the entity_id of file(s), Q&A'
    >>> tidy("E_xit now"), tidy("E_xit now", "_&")
    ('E_xit now', 'Exit now')
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if "\\" in text:
        text = text.replace("\\n", " ")
    if "<" in text:
        text = _TAG.sub("", text)
    if "&" in text:
        text = _ENTITY.sub(lambda found: html.unescape(found.group()), text)
    if "(" in text:
        text = _ASIAN_ACCELERATOR.sub("", text)
    if any(mark in text for mark in _ACCELERATORS):
        text = _without_accelerators(text, accelerators)
    return _BLANKS.sub(" ", _UNSEEN.sub("", text)).strip()


def _without_accelerators(text: str, within: str) -> str:
    kept = PLACEHOLDER.findall(text)
    parts = PLACEHOLDER.split(text)
    for mark, at_start in _ACCELERATORS.items():
        if sum(part.count(mark) for part in parts) == 1:
            pattern = _WITHIN[mark] if mark in within and len(text) <= _MENU else at_start
            parts = [pattern.sub("", part) for part in parts]
    return "".join(p + k for p, k in zip(parts, [*kept, ""], strict=True))


def words(text: str) -> list[str]:
    """Words of a text, placeholders left out."""
    return _WORD.findall(PLACEHOLDER.sub(" ", text))


class _English(NamedTuple):
    """What the rules ask of an English sentence, which has translations into many languages."""

    text: str
    words: tuple[str, ...]
    letters: int
    symbols: bool
    foreign: bool


@functools.lru_cache(1 << 16)
def _english(text: str, accelerators: str) -> _English:
    text = tidy(text, accelerators)
    found = words(text)
    letters = sum(map(len, found))
    symbols = letters < 0.5 * len(PLACEHOLDER.sub(" ", text).replace(" ", ""))
    foreign = not text.isascii() and sum(not c.isascii() and c.isalpha() for c in text) > 2
    return _English(text, tuple(word.lower() for word in found), letters, symbols, foreign)


def _wrong_script(language: str, foreign: str) -> bool:
    script = _SCRIPT_OF.get(language)
    if script is None and (foreign.isascii() or language in _ANY_SCRIPT):
        return False
    text = PLACEHOLDER.sub(" ", foreign)
    letters = sum(map(str.isalpha, text))
    if script is None:
        return len(_NOT_LATIN.findall(text)) > 0.5 * letters
    return len(script.findall(text)) < 0.35 * letters


def _untranslated(language: str, english: _English, foreign: str) -> bool:
    if language in _SCRIPT_OF or len(english.words) < 3:
        return False
    theirs = {w.lower() for w in words(foreign)}
    return sum(w in theirs for w in english.words) >= 0.7 * len(english.words)


def _wrong_length(language: str, english: str, foreign: str) -> bool:
    ratio = (len(foreign) + 5) / (len(english) + 5)
    return not (0.12 if language in _DENSE else 0.3) <= ratio <= 4.0


RULES: tuple[tuple[str, Callable[[str, _English, str], bool]], ...] = (
    ("empty", lambda lang, en, fo: not en.text or not fo),
    ("identical", lambda lang, en, fo: en.text.lower() == fo.lower()),
    ("too long", lambda lang, en, fo: len(en.text) > LONGEST or len(fo) > LONGEST),
    ("fewer than two words", lambda lang, en, fo: len(en.words) < 2 or en.letters < 5),
    ("mostly symbols", lambda lang, en, fo: en.symbols or sum(map(str.isalpha, fo)) < 2),
    ("not English", lambda lang, en, fo: en.foreign),
    ("wrong script", lambda lang, en, fo: _wrong_script(lang, fo)),
    ("untranslated", _untranslated),
    ("wrong length ratio", lambda lang, en, fo: _wrong_length(lang, en.text, fo)),
)
"""Reason, and when it applies: language, English and foreign sentence."""


def clean(pair: Pair, accelerators: str = "") -> Pair | str:
    """The pair put in order, or the reason why it is left out.

    Args:
        pair: as its source has it.
        accelerators: see `tidy`.
    """
    if max(len(pair.english), len(pair.foreign)) > _NO_SENTENCE:
        return "too long"
    english, foreign = _english(pair.english, accelerators), tidy(pair.foreign, accelerators)
    for reason, applies in RULES:
        if applies(pair.language, english, foreign):
            return reason
    return Pair(pair.language, foreign, english.text)
