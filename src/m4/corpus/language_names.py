"""Language names: English names of the languages of the corpora, as ISO 639 and Unicode's CLDR have them.

>>> name_of("de"), name_of("zh_Hant"), name_of("qqq")
('German', 'Traditional Chinese', 'qqq')
"""

from __future__ import annotations

_NAMES = """
ab Abkhazian|ace Acehnese|af Afrikaans|ak Akan|als Tosk Albanian|am Amharic|an Aragonese|ang Old English|ar Arabic
ary Moroccan Arabic|arz Egyptian Arabic|as Assamese|ast Asturian|av Avaric|awa Awadhi|ay Aymara|az Azerbaijani
azb South Azerbaijani|ba Bashkir|ban Balinese|bar Bavarian|bcl Central Bikol|be Belarusian|bg Bulgarian|bho Bhojpuri
bi Bislama|bjn Banjar|bm Bambara|bn Bangla|bo Tibetan|bpy Bishnupriya|br Breton|brx Bodo|bs Bosnian|bug Buginese
bxr Russia Buriat|ca Catalan|ce Chechen|ceb Cebuano|chr Cherokee|ckb Central Kurdish|co Corsican|cr Cree
crh Crimean Tatar|cs Czech|csb Kashubian|cv Chuvash|cy Welsh|da Danish|dag Dagbani|de German|dgo Dogri|diq Zazaki
doi Dogri|dsb Lower Sorbian|dty Doteli|dv Divehi|dz Dzongkha|ee Ewe|el Greek|eml Emiliano-Romagnolo|eo Esperanto
es Spanish|et Estonian|eu Basque|ext Extremaduran|fa Persian|ff Fula|fi Finnish|fil Filipino|fj Fijian|fo Faroese
fr French|frp Arpitan|frr Northern Frisian|fur Friulian|fy Western Frisian|ga Irish|gag Gagauz|gan Gan Chinese
gd Scottish Gaelic|gl Galician|gn Guarani|gsw Swiss German|gu Gujarati|gv Manx|ha Hausa|hak Hakka Chinese
haw Hawaiian|he Hebrew|hi Hindi|hil Hiligaynon|hr Croatian|hsb Upper Sorbian|ht Haitian Creole|hu Hungarian
hy Armenian|hyw Western Armenian|ia Interlingua|id Indonesian|ie Interlingue|ig Igbo|ilo Iloko|inh Ingush|io Ido
is Icelandic|it Italian|iu Inuktitut|ja Japanese|jbo Lojban|jv Javanese|ka Georgian|kaa Kara-Kalpak|kab Kabyle
kk Kazakh|kl Kalaallisut|km Khmer|kn Kannada|ko Korean|kok Konkani|kr Kanuri|krc Karachay-Balkar|ks Kashmiri
ksh Colognian|ku Kurdish|kv Komi|kw Cornish|ky Kyrgyz|la Latin|lad Ladino|lb Luxembourgish|lez Lezghian|lg Ganda
li Limburgish|lij Ligurian|lki Laki|lmo Lombard|ln Lingala|lo Lao|lt Lithuanian|ltg Latgalian|lv Latvian
lzh Literary Chinese|mad Madurese|mag Magahi|mai Maithili|map_bms Banyumasan|mdf Moksha|mg Malagasy|mhr Eastern Mari
mi Maori|min Minangkabau|mk Macedonian|ml Malayalam|mn Mongolian|mni Manipuri|mnw Mon|mr Marathi|mrj Western Mari
ms Malay|mt Maltese|mwl Mirandese|my Burmese|myv Erzya|mzn Mazanderani|nah Nahuatl|nan Min Nan Chinese|nap Neapolitan
nb Norwegian Bokmål|nds Low German|nds_nl Low Saxon|ne Nepali|new Newari|nia Nias|nl Dutch|nn Norwegian Nynorsk
no Norwegian|nqo N’Ko|nr South Ndebele|nso Northern Sotho|ny Nyanja|oc Occitan|om Oromo|or Odia|os Ossetic|pa Punjabi
pag Pangasinan|pam Pampanga|pap Papiamento|pcd Picard|pl Polish|pms Piedmontese|pnb Western Punjabi|ps Pashto
pt Portuguese|qu Quechua|rm Romansh|ro Romanian|roa_tara Tarantino|ru Russian|rue Rusyn|rup Aromanian|rw Kinyarwanda
sa Sanskrit|sah Yakut|sat Santali|sc Sardinian|scn Sicilian|sco Scots|sd Sindhi|se Northern Sami|sgs Samogitian
shn Shan|si Sinhala|sk Slovak|skr Saraiki|sl Slovenian|sm Samoan|sn Shona|so Somali|sq Albanian|sr Serbian
sr_Latn Serbian (Latin)|ss Swati|st Southern Sotho|stq Saterland Frisian|su Sundanese|sv Swedish|sw Swahili
szl Silesian|ta Tamil|tcy Tulu|te Telugu|tet Tetum|tg Tajik|th Thai|ti Tigrinya|tk Turkmen|tl Tagalog|tn Tswana
to Tongan|tr Turkish|ts Tsonga|tt Tatar|tyv Tuvinian|tzm Central Atlas Tamazight|udm Udmurt|ug Uyghur|uk Ukrainian
ur Urdu|uz Uzbek|uz_Cyrl Uzbek (Cyrillic)|ve Venda|vec Venetian|vep Veps|vi Vietnamese|vls West Flemish|vo Volapük
vro Võro|wa Walloon|war Waray|wo Wolof|wuu Wu Chinese|xal Kalmyk|xh Xhosa|xmf Mingrelian|yi Yiddish|yo Yoruba
yue Cantonese|za Zhuang|zea Zeelandic|zgh Standard Moroccan Tamazight|zh_Hans Simplified Chinese
zh_Hant Traditional Chinese|zu Zulu
"""
NAMES = dict(entry.split(" ", 1) for line in _NAMES.strip().splitlines() for entry in line.split("|"))
"""Code, as `m4.corpus.language` gives it -> name."""


def name_of(code: str) -> str:
    """The English name of a language; its code if no name is known."""
    return NAMES.get(code, code)
