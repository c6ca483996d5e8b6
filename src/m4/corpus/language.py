"""Languages: one name for each, whatever a catalogue calls it.

Regional variants are merged (``pt_BR`` and ``pt`` are ``pt``), scripts are kept apart (``zh_Hans``, ``zh_Hant``,
``sr``, ``sr_Latn``), English and near copies of a main variant are left out.

    >>> [language(code) for code in ("pt-BR", "zh_TW", "sr@latin", "en_GB", "ca@valencia", "iw", "nb_NO")]
    ['pt', 'zh_Hant', 'sr_Latn', None, None, 'he', 'nb']
"""

from __future__ import annotations

import re

_SAME = {"iw": "he", "in": "id", "no": "nb", "tl": "fil", "mo": "ro", "jw": "jv", "ji": "yi", "sh": "sr_Latn"}
_ENGLISH_AND_INVENTED = {"en", "ang", "tlh", "qps", "xx", "zz", "io_test"}
_NEAR_COPIES = {"valencia", "formal", "informal"}
_TRADITIONAL = {"tw", "hk", "mo", "hant"}
_LATIN = {"latin", "latn"}
_OTHER_SCRIPTS = {"cyrl", "cyrillic", "arab", "latn", "latin", "deva"}
_USUAL_SCRIPT = {"ug": "arab", "ks": "arab", "sd": "arab", "tt": "cyrl", "tg": "cyrl", "be": "cyrl", "az": "latn"}


def language(code: str) -> str | None:
    """Our name for a language code of gettext or BCP 47; None for what is left out."""
    plain, _, modifier = code.strip().replace("-", "_").lower().partition("@")
    base, *rest = plain.split(".")[0].split("_")
    marks = {*rest, *([modifier] if modifier else [])}
    base = _SAME.get(base, base)
    if base == "sr_Latn":
        return base
    if base in _ENGLISH_AND_INVENTED or not re.fullmatch(r"[a-z]{2,3}", base) or marks & _NEAR_COPIES:
        return None
    if base == "zh":
        return "zh_Hant" if marks & _TRADITIONAL else "zh_Hans"
    if base == "sr":
        return "sr_Latn" if marks & _LATIN else "sr"
    if base == "uz":
        return "uz_Cyrl" if marks & {"cyrl", "cyrillic"} else "uz"
    if marks & _OTHER_SCRIPTS and _USUAL_SCRIPT.get(base) not in marks:
        return None
    return base
