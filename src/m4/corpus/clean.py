"""Clean: which pairs are worth training on, and why the others are not.

Text is put in order first (tags and keyboard accelerators out, blanks joined, Unicode composed; placeholders such as
``%s`` or ``{name}`` stay). Then each rule looks at the pair; the first that objects gives the reason.

    >>> clean(Pair("de", "&Datei <b>wird</b> geöffnet", "_Opening the <b>file</b>"))
    Pair(language='de', foreign='Datei wird geöffnet', english='Opening the file')
    >>> clean(Pair("de", "OK", "OK"))
    'identical'
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable

from m4.corpus.pair import Pair

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
PLACEHOLDER = re.compile(
    r"%\([^)]*\)[a-z]|%\d*\$?[a-z]|\$\{[^}]*\}|\{\{[^}]*\}\}|\{[^{}]*\}|\[%[^\]]*%\]|%\d|https?://\S+|`[^`]*`"
)
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_LONGEST = 400

# Languages that are not written in Latin letters, by a range of letters most of their text must come from.
_SCRIPTS: dict[str, tuple[str, str]] = {
    "CYRILLIC": ("ru uk be bg mk sr kk ky mn tg tt uz_Cyrl ba cv os udm", r"[\u0400-\u052f]"),
    "ARABIC": ("ar fa ur ug ps sd ckb ks ar_DZ", r"[\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff]"),
    "HEBREW": ("he yi", r"[\u0590-\u05ff]"),
    "GREEK": ("el", r"[\u0370-\u03ff\u1f00-\u1fff]"),
    "ARMENIAN": ("hy", r"[\u0530-\u058f]"),
    "GEORGIAN": ("ka", r"[\u10a0-\u10ff]"),
    "DEVANAGARI": ("hi mr ne mai", r"[\u0900-\u097f]"),
    "BENGALI": ("bn as", r"[\u0980-\u09ff]"),
    "GURMUKHI": ("pa", r"[\u0a00-\u0a7f]"),
    "GUJARATI": ("gu", r"[\u0a80-\u0aff]"),
    "TAMIL": ("ta", r"[\u0b80-\u0bff]"),
    "TELUGU": ("te", r"[\u0c00-\u0c7f]"),
    "KANNADA": ("kn", r"[\u0c80-\u0cff]"),
    "MALAYALAM": ("ml", r"[\u0d00-\u0d7f]"),
    "SINHALA": ("si", r"[\u0d80-\u0dff]"),
    "THAI": ("th", r"[\u0e00-\u0e7f]"),
    "MYANMAR": ("my", r"[\u1000-\u109f]"),
    "ETHIOPIC": ("am ti", r"[\u1200-\u137f]"),
    "KHMER": ("km", r"[\u1780-\u17ff]"),
    "HANGUL": ("ko", r"[\uac00-\ud7af\u1100-\u11ff]"),
    "HAN": ("zh_Hans zh_Hant ja", r"[\u3040-\u30ff\u4e00-\u9fff]"),
}
_SCRIPT_OF = {lang: re.compile(letters) for langs, letters in _SCRIPTS.values() for lang in langs.split()}
_DENSE = {"zh_Hans", "zh_Hant", "ja", "ko"}


def tidy(text: str) -> str:
    r"""A sentence without tags and accelerators, with single blanks and composed letters.

    >>> tidy("  _Save as… <b>%(name)s</b>\n ")
    'Save as… %(name)s'
    >>> tidy("the entity_id of file(s), Q&amp;A")
    'the entity_id of file(s), Q&A'
    """
    text = unicodedata.normalize("NFC", text).replace("\\n", " ")
    text = _ENTITY.sub(lambda found: html.unescape(found.group()), _TAG.sub("", text))
    text = _ASIAN_ACCELERATOR.sub("", text)
    kept = PLACEHOLDER.findall(text)
    parts = PLACEHOLDER.split(text)
    for mark, accelerator in _ACCELERATORS.items():
        if sum(part.count(mark) for part in parts) == 1:
            parts = [accelerator.sub("", part) for part in parts]
    joined = "".join(p + k for p, k in zip(parts, [*kept, ""], strict=True))
    return _BLANKS.sub(" ", _UNSEEN.sub("", joined)).strip()


def words(text: str) -> list[str]:
    """Words of a text, placeholders left out."""
    return _WORD.findall(PLACEHOLDER.sub(" ", text))


def _too_short(pair: Pair) -> bool:
    found = words(pair.english)
    return len(found) < 2 or sum(map(len, found)) < 5


def _mostly_symbols(pair: Pair) -> bool:
    bare = PLACEHOLDER.sub(" ", pair.english).replace(" ", "")
    return sum(map(len, words(pair.english))) < 0.5 * len(bare) or sum(map(str.isalpha, pair.foreign)) < 2


def _wrong_script(pair: Pair) -> bool:
    script = _SCRIPT_OF.get(pair.language)
    text = PLACEHOLDER.sub(" ", pair.foreign)
    return script is not None and len(script.findall(text)) < 0.35 * sum(map(str.isalpha, text))


def _untranslated(pair: Pair) -> bool:
    if pair.language in _SCRIPT_OF:
        return False
    english = [w.lower() for w in words(pair.english)]
    foreign = {w.lower() for w in words(pair.foreign)}
    return len(english) >= 3 and sum(w in foreign for w in english) >= 0.7 * len(english)


def _wrong_length(pair: Pair) -> bool:
    ratio = (len(pair.foreign) + 5) / (len(pair.english) + 5)
    return not (0.12 if pair.language in _DENSE else 0.3) <= ratio <= 4.0


RULES: tuple[tuple[str, Callable[[Pair], bool]], ...] = (
    ("empty", lambda p: not p.english or not p.foreign),
    ("identical", lambda p: p.english.lower() == p.foreign.lower()),
    ("too long", lambda p: len(p.english) > _LONGEST or len(p.foreign) > _LONGEST),
    ("fewer than two words", _too_short),
    ("mostly symbols", _mostly_symbols),
    ("not English", lambda p: sum(not c.isascii() and c.isalpha() for c in p.english) > 2),
    ("wrong script", _wrong_script),
    ("untranslated", _untranslated),
    ("wrong length ratio", _wrong_length),
)


def clean(pair: Pair) -> Pair | str:
    """The pair put in order, or the reason why it is left out."""
    tidied = Pair(pair.language, tidy(pair.foreign), tidy(pair.english))
    return next((reason for reason, objects in RULES if objects(tidied)), tidied)
