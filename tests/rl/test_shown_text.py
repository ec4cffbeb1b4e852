"""One rule of what hides in a model's text, for the terminal and for the page."""

import re
import sys
import unicodedata

import pytest

from grpo_moe.rl.html_report import visible
from grpo_moe.text import clean, encodable, steers_or_hides

HIDDEN = [
    0x00, 0x1B, 0x7F, 0x85, 0xAD, 0x034F, 0x0600, 0x061C, 0x115F, 0x1160, 0x17B4, 0x180B, 0x180E, 0x200B, 0x202E,
    0x2028, 0x2029, 0x2060, 0x2065, 0x2066, 0x2800, 0x3164, 0xE000, 0xFE00, 0xFE0F, 0xFEFF, 0xFFA0, 0xFFF0, 0xFFF9,
    0x1BCA0, 0x1D173, 0xE0001, 0xE0041, 0xE0100, 0xE01EF, 0xF0000,
]  # fmt: skip


@pytest.mark.parametrize("code", HIDDEN, ids=hex)
def test_what_hides_is_dropped_in_the_terminal_and_named_on_the_page(code):
    character = chr(code)
    assert steers_or_hides(character)
    assert clean(f"a{character}b") == "ab"
    page = visible(f"a{character}b")
    assert character not in page and page.startswith('a<b class="c">') and page.endswith("</b>b")


def test_names_say_which_character_it_was():
    assert visible("\u202e") == '<b class="c">\\u202e</b>' and visible("\U000e0041") == '<b class="c">\\U000e0041</b>'


def test_what_people_read_stays():
    for text in ("aZ09 .,-\u00e9\u4e2d\u05d0\u0639\u0939\u093f\ud55c\u0301", "\u00a0\u3000", "\U0001f600", "\u2801"):
        assert not any(map(steers_or_hides, text)) and clean(text) == visible(text) == text


def test_no_character_that_is_named_as_invisible_is_kept():
    kept = [unicodedata.name(chr(code), "") for code in range(sys.maxunicode + 1) if not steers_or_hides(chr(code))]
    hidden = re.compile("HANGUL.* FILLER|VARIATION SELECTOR|ZERO WIDTH|INVISIBLE|GRAPHEME JOINER|TAG SPACE|OVERRIDE")
    assert [name for name in kept if hidden.search(name)] == []


def test_encodable_names_what_an_encoding_lacks():
    assert encodable("a\ud800") == r"a\ud800" and encodable("\u00e9\u4e2d", "latin-1") == "\u00e9\\u4e2d"
