"""What makes a model's text fit to be shown: which characters steer or hide, and names for those without encoding."""

from __future__ import annotations

import re
import unicodedata

# Shown as nothing although they are letters, marks or unassigned: Unicode's Default_Ignorable_Code_Point beyond the
# categories below (fillers, joiners, variation selectors), and the braille pattern without dots.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)


def steers_or_hides(character: str) -> bool:
    """Whether it is a control, a format (bidi, zero width, tag), a separator of lines, private or invisible.

    Newlines and tabs are controls too; spaces are not.
    """
    return unicodedata.category(character) in ("Cc", "Cf", "Co", "Zl", "Zp") or bool(_INVISIBLE.match(character))


def encodable(text: str, encoding: str = "utf-8") -> str:
    r"""`text` with what `encoding` cannot hold written as \uXXXX: lone surrogates, and more where it is not UTF-8."""
    return text.encode(encoding, "backslashreplace").decode(encoding)
