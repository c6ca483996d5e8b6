"""Names of languages in English, for the codes of `gshard_m4.corpus.language`.

>>> name_of("hsb"), name_of("sr_Latn"), name_of("qqx"), code_of("german"), code_of("Upper Sorbian"), code_of("elvish")
('Upper Sorbian', 'Serbian (Latin)', 'qqx', 'de', 'hsb', None)
"""

from __future__ import annotations

_TEXT = """
ab Abkhaz|af Afrikaans|ak Akan|alt Southern Altai|am Amharic|an Aragonese|anp Angika|ar Arabic|ary Moroccan Arabic
arz Egyptian Arabic|as Assamese|ast Asturian|av Avar|awa Awadhi|ay Aymara|az Azerbaijani|azb South Azerbaijani
ba Bashkir|bal Baluchi|ban Balinese|bax Bamum|be Belarusian|bem Bemba|bg Bulgarian|bh Bihari|bho Bhojpuri|bi Bislama
bjn Banjar|blk Pa'O|bm Bambara|bn Bengali|bo Tibetan|bpy Bishnupriya|br Breton|brx Bodo|bs Bosnian|bua Buryat
bug Buginese|byn Blin|ca Catalan|cbk Chavacano|ce Chechen|ceb Cebuano|ch Chamorro|chr Cherokee|ckb Central Kurdish
co Corsican|cr Cree|crh Crimean Tatar|cs Czech|csb Kashubian|cv Chuvash|cy Welsh|da Danish|dag Dagbani|de German
dgo Dogri|doi Dogri|dsb Lower Sorbian|dty Doteli|dv Dhivehi|dz Dzongkha|ee Ewe|el Greek|eo Esperanto|es Spanish
et Estonian|eu Basque|ext Extremaduran|fa Persian|ff Fulah|fi Finnish|fil Filipino|fj Fijian|fo Faroese|fr French
frp Arpitan|frr North Frisian|fur Friulian|fy Western Frisian|ga Irish|gag Gagauz|gan Gan Chinese|gd Scottish Gaelic
gez Geez|gl Galician|glk Gilaki|gn Guarani|gom Konkani|gsw Swiss German|gu Gujarati|guc Wayuu|gv Manx|ha Hausa
hak Hakka|haw Hawaiian|he Hebrew|hi Hindi|hne Chhattisgarhi|hr Croatian|hrx Hunsrik|hsb Upper Sorbian
ht Haitian Creole|hu Hungarian|hus Huastec|hy Armenian|hyw Western Armenian|ia Interlingua|id Indonesian
ie Interlingue|ig Igbo|ii Sichuan Yi|ilo Iloko|inh Ingush|io Ido|is Icelandic|it Italian|iu Inuktitut|ja Japanese
jam Jamaican Creole|jbo Lojban|jv Javanese|ka Georgian|kaa Karakalpak|kab Kabyle|kbd Kabardian|kg Kongo|ki Kikuyu
kjp Eastern Pwo|kk Kazakh|kl Greenlandic|km Khmer|kmr Northern Kurdish|kn Kannada|ko Korean|kok Konkani
krc Karachay-Balkar|ks Kashmiri|ksh Colognian|ksw S'gaw Karen|ku Kurdish|kv Komi|kw Cornish|ky Kyrgyz|la Latin
lad Ladino|lb Luxembourgish|lez Lezghian|lfn Lingua Franca Nova|lg Ganda|li Limburgish|lij Ligurian|lki Laki
lmo Lombard|ln Lingala|lo Lao|lrc Northern Luri|lt Lithuanian|ltg Latgalian|lv Latvian|lzh Literary Chinese
mad Madurese|mag Magahi|mai Maithili|mdf Moksha|mg Malagasy|mhr Meadow Mari|mi Maori|min Minangkabau|mk Macedonian
ml Malayalam|mn Mongolian|mni Manipuri|mnw Mon|mr Marathi|mrj Hill Mari|ms Malay|mt Maltese|mus Muscogee
mwl Mirandese|my Burmese|myv Erzya|mzn Mazanderani|nah Nahuatl|nan Min Nan Chinese|nap Neapolitan
nb Norwegian Bokmål|nds Low German|nds_nl Low Saxon|ne Nepali|new Newari|nl Dutch|nn Norwegian Nynorsk|nqo N'Ko
nr South Ndebele|nso Northern Sotho|nv Navajo|ny Chichewa|oc Occitan|om Oromo|or Odia|os Ossetian|pa Punjabi
pam Pampanga|pap Papiamento|pcd Picard|pi Pali|pl Polish|pms Piedmontese|pnb Western Punjabi|pnt Pontic|ps Pashto
pt Portuguese|qu Quechua|quz Cusco Quechua|raj Rajasthani|rif Riffian|rm Romansh|ro Romanian|rom Romani|ru Russian
rue Rusyn|rup Aromanian|rw Kinyarwanda|sa Sanskrit|sah Sakha|sat Santali|sc Sardinian|scn Sicilian|sco Scots
sd Sindhi|se Northern Sami|sgs Samogitian|shi Tachelhit|shn Shan|si Sinhala|sk Slovak|skr Saraiki|sl Slovenian
sm Samoan|sma Southern Sami|smj Lule Sami|smn Inari Sami|sn Shona|so Somali|son Songhay|sq Albanian|sr Serbian
sr_Latn Serbian (Latin)|ss Swati|st Southern Sotho|su Sundanese|sv Swedish|sw Swahili|syr Syriac|szl Silesian
ta Tamil|tcy Tulu|te Telugu|tet Tetum|tg Tajik|th Thai|ti Tigrinya|tig Tigre|tk Turkmen|tn Tswana|to Tongan
tpi Tok Pisin|tr Turkish|trv Seediq|ts Tsonga|tt Tatar|tw Twi|ty Tahitian|tyv Tuvan|tzm Central Atlas Tamazight
ber Berber|udm Udmurt|ug Uyghur|uk Ukrainian|ur Urdu|uz Uzbek|uz_Cyrl Uzbek (Cyrillic)|vai Vai|ve Venda|vec Venetian
vep Veps|vi Vietnamese|vls West Flemish|vo Volapük|vro Võro|wa Walloon|wae Walser|wal Wolaytta|war Waray|wo Wolof
wuu Wu Chinese|xal Kalmyk|xh Xhosa|xmf Mingrelian|yi Yiddish|yo Yoruba|yue Cantonese|za Zhuang
zgh Standard Moroccan Tamazight|zh_Hans Chinese (Simplified)|zh_Hant Chinese (Traditional)|zu Zulu
"""
NAMES = {
    code: name for code, _, name in (entry.partition(" ") for entry in _TEXT.strip().replace("\n", "|").split("|"))
}
"""Code -> name."""


def name_of(code: str) -> str:
    """The name of a language; its code if no name is known."""
    return NAMES.get(code, code)


def code_of(name: str) -> str | None:
    """The code of a language by its English name, whatever its letters' case."""
    folded = name.strip().casefold()
    return next((code for code, known in NAMES.items() if known.casefold() == folded), None)
