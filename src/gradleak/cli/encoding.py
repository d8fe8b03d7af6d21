"""What is printed on a terminal that cannot show every letter: the nearest ASCII instead of a
crash."""

import codecs
import io
import sys
import unicodedata
from collections.abc import Sequence

NEAREST = {
    **{
        "·": "-",
        "–": "-",
        "—": "-",
        "−": "-",
        "─": "-",
        "━": "-",
        "│": "|",
        "×": "x",
        "•": "*",
        "✓": "+",
        "✗": "x",
    },
    **{
        "…": "...",
        "→": "->",
        "←": "<-",
        "≤": "<=",
        "≥": ">=",
        "±": "+-",
        "≈": "~",
        "√": "sqrt",
        "∞": "inf",
    },
    **{
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "„": '"',
        "ß": "ss",
        "æ": "ae",
        "œ": "oe",
        "ø": "o",
        "ł": "l",
    },
    **{"α": "alpha", "β": "beta", "δ": "delta", "ε": "epsilon", "σ": "sigma", "Σ": "sum", "∂": "d"},
}


def fall_back(words: Sequence[str]) -> None:
    """Lets both streams write what their encoding has no letter for: as the nearest ASCII, or in
    JSON as `\\u00e9`."""
    codecs.register_error("gradleak.nearest", write_nearest)
    codecs.register_error("gradleak.escaped", write_escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().replace(
            "-", ""
        ).startswith("utf"):
            is_json = "--json" in words and stream is sys.stdout
            stream.reconfigure(errors="gradleak.escaped" if is_json else "gradleak.nearest")


def write_nearest(error: UnicodeError) -> tuple[str, int]:
    """For `str.encode`: letters without their accents, signs as above, a question mark for the
    rest."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(nearest, error.object[error.start : error.end])), error.end


def write_escaped(error: UnicodeError) -> tuple[str, int]:
    """For `str.encode`: as JSON writes letters that must not stand in it, which reads back as
    the same text."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return (
        "".join(
            f"\\u{units[place]:02x}{units[place + 1]:02x}" for place in range(0, len(units), 2)
        ),
        error.end,
    )


def nearest(letter: str) -> str:
    """The nearest that ASCII has."""
    if letter in NEAREST:
        return NEAREST[letter]
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return plain or "?"
