"""Languages: one name for each, whatever a catalogue calls it.

Regional variants are merged (``pt_BR`` and ``pt`` are ``pt``), scripts are kept apart (``zh_Hans``, ``zh_Hant``,
``sr``, ``sr_Latn``), English and near copies of a main variant are left out.

    >>> [language(code) for code in ("pt-BR", "zh_TW", "sr@latin", "en_GB", "ca@valencia", "iw", "nb_NO", "zh-yue")]
    ['pt', 'zh_Hant', 'sr_Latn', None, None, 'he', 'nb', 'yue']
"""

from __future__ import annotations

import functools
import re


def _table(text: str) -> dict[str, str]:
    return dict(word.split(":") for word in text.split())  # type: ignore[misc]


# Former codes, codes of countries, and languages of a group in which only one is written.
_SAME = _table(
    "iw:he in:id no:nb tl:fil mo:ro jw:jv ji:yi sh:sr_Latn kmr:ku cmn:zh gom:kok als:gsw per:fa pes:fa arb:ar zsm:ms "
    "ekk:et lvs:lv khk:mn npi:ne ory:or swh:sw uzn:uz azj:az plt:mg pbu:ps ydd:yi gaz:om nob:nb nno:nn gug:gn dut:nl "
    "ger:de fre:fr jp:ja cz:cs dk:da gr:el ua:uk"
)
# ISO 639-2 and 639-3, where there is a code of two letters.
_SHORTER = _table(
    "afr:af amh:am ara:ar asm:as aze:az bel:be ben:bn bul:bg bod:bo bos:bs bre:br cat:ca ces:cs cym:cy dan:da deu:de "
    "ell:el epo:eo est:et eus:eu fas:fa fin:fi fra:fr gle:ga glg:gl guj:gu hat:ht hau:ha heb:he hin:hi hrv:hr hun:hu "
    "hye:hy ibo:ig ind:id isl:is ita:it jpn:ja kan:kn kat:ka kaz:kk khm:km kin:rw kir:ky kor:ko lao:lo lat:la lav:lv "
    "lit:lt ltz:lb mal:ml mar:mr mkd:mk mlg:mg mlt:mt mon:mn mri:mi msa:ms mya:my nep:ne nld:nl nor:nb oci:oc ori:or "
    "orm:om pan:pa pol:pl por:pt pus:ps ron:ro rus:ru sin:si slk:sk slv:sl snd:sd som:so spa:es sqi:sq srp:sr swa:sw "
    "swe:sv tam:ta tat:tt tel:te tgk:tg tha:th tir:ti tuk:tk tur:tr uig:ug ukr:uk urd:ur uzb:uz vie:vi xho:xh yid:yi "
    "yor:yo zho:zh zul:zu tgl:fil sot:st tsn:tn tso:ts ssw:ss ven:ve nbl:nr wol:wo fry:fy ful:ff sna:sn nya:ny lin:ln "
    "lug:lg aka:ak ewe:ee"
)
# Names of whole wikis.
_COMPOUND = _table(
    "be_x_old:be bat_smg:sgs roa_rup:rup fiu_vro:vro zh_min_nan:nan zh_yue:yue zh_classical:lzh cbk_zam:cbk "
    "roa_tara:roa_tara nds_nl:nds_nl map_bms:map_bms als_al:sq"
)
_ENGLISH_AND_INVENTED = set("en ang tlh qps qaa qqq qqx tok und mul art zxx xx zz io_test".split())
_NEAR_COPIES = {"valencia", "formal", "informal"}
_TRADITIONAL = {"tw", "hk", "mo", "hant"}
_LATIN = {"latin", "latn", "el", "ijekavianlatin"}
_OTHER_SCRIPTS = {"cyrl", "cyrillic", "arab", "latn", "latin", "deva"}
_USUAL_SCRIPT = _table("ug:arab ks:arab sd:arab tt:cyrl tg:cyrl be:cyrl az:latn bs:latn ku:latn crh:latn")


@functools.cache
def language(code: str) -> str | None:
    """Our name for a language code of gettext or BCP 47; None for what is left out."""
    plain, _, modifier = code.strip().replace("-", "_").lower().partition("@")
    whole = plain.split(".")[0]
    if whole in _COMPOUND:
        return _COMPOUND[whole]
    base, *rest = whole.split("_")
    marks = {*rest, *([modifier] if modifier else [])}
    base = _SHORTER.get(base, base)
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
    if base == "kk" and marks & {"cn", "tr"}:
        return None  # in Arabic and Latin letters
    if marks & _OTHER_SCRIPTS and _USUAL_SCRIPT.get(base) not in marks:
        return None
    return base
