"""The shipped prior beside n-gram models of the same text: python benchmarks/ngram.py
text/imdb.txt.xz text/wikipedia.txt.xz.

Interpolated modified Kneser-Ney (Chen & Goodman 1999, section 3) of one to five tokens, trained on
the sentences the prior was trained on and judged as `gradleak prior eval` judges: mean nats of
every token after [CLS], [SEP] included, over the sentences held out. Both corpora in this order:
which sentences are held out depends on it.
"""

import argparse
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
LONGEST = 64  # tokens of a sentence, as in training
FALLBACK = (0.5, 1.0, 1.5)  # discounts where counts of counts allow no estimate (KenLM's)


@dataclass(frozen=True, eq=False)
class Stream:
    """Sentences end to end, and the place of every token in its own sentence."""

    tokens: Ints
    places: Ints


@dataclass(frozen=True, eq=False)
class Level:
    """Discounted probabilities of the n-grams of one length, and the share each context leaves
    to shorter ones."""

    probabilities: Floats  # by n-gram
    left_over: Floats  # by context, an (n−1)-gram


@dataclass(frozen=True, eq=False)
class Order:
    """N-grams of one length. A key is the number of the first n−1 tokens' own (n−1)-gram, times
    the vocabulary, plus the last."""

    keys: Ints  # sorted: an n-gram's number is its place here
    highest: Level  # from counts, for a model of this order
    lower: Level  # from the number of different tokens before, for models of higher orders


@dataclass(frozen=True, eq=False)
class NGrams:
    vocabulary: int
    orders: tuple[Order, ...]


def stream(tables: Sequence[NDArray[Any]]) -> Stream:
    """Tables [sentences, tokens], each of one length."""
    places = [np.tile(np.arange(table.shape[1]), len(table)) for table in tables]
    return Stream(
        np.concatenate([table.ravel() for table in tables]).astype(np.int64), np.concatenate(places)
    )


def train(text: Stream, vocabulary: int, longest: int) -> NGrams:
    """Counts n-grams of 1 to `longest` tokens; none crosses the end of a sentence and none is
    dropped."""
    numbers = text.tokens  # of the n-gram that ends at each token; −1 near the start of a sentence
    keys, contexts = np.arange(vocabulary), 1
    # [CLS] is given, never predicted
    counts = np.bincount(numbers[text.places > 0], minlength=vocabulary)
    orders = []
    for length in range(2, longest + 1):
        ends = np.flatnonzero(text.places >= length - 1)
        seen = numbers[ends - 1] * vocabulary + text.tokens[ends]
        longer, first, inverse, times = np.unique(
            seen, return_index=True, return_inverse=True, return_counts=True
        )
        before = np.bincount(numbers[ends[first]], minlength=len(keys))
        # Nothing comes before an n-gram that starts a sentence: it keeps its count, as in SRILM and
        # KenLM.
        varied = np.where(before > 0, before, counts)
        orders.append(
            Order(
                keys,
                level(keys, counts, vocabulary, contexts),
                level(keys, varied, vocabulary, contexts),
            )
        )
        keys, counts, contexts = longer, times, len(keys)
        numbers = np.full(len(numbers), -1)
        numbers[ends] = inverse
    top = level(keys, counts, vocabulary, contexts)
    # Nothing longer asks for its lower level
    return NGrams(vocabulary, (*orders, Order(keys, top, top)))


def level(keys: Ints, counts: Ints, vocabulary: int, contexts: int) -> Level:
    """Takes each n-gram's discount from its count and leaves the sum to the next shorter
    context."""
    discount = discounts(counts)[np.minimum(counts, 3)]
    context = keys // vocabulary
    totals = np.bincount(context, counts, contexts)
    taken = np.bincount(context, discount, contexts)
    left_over = np.divide(taken, totals, out=np.ones(contexts), where=totals > 0)
    return Level((counts - discount) / np.maximum(totals, 1)[context], left_over)


def discounts(counts: Ints) -> Floats:
    """For counts of 0, 1, 2 and 3 or more (Chen & Goodman 1999, equation 17)."""
    once, twice, thrice, four_times = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if 0 in (once, twice, thrice):
        return np.array([0.0, *FALLBACK])
    share = once / (once + 2 * twice)
    found = (
        1 - 2 * share * twice / once,
        2 - 3 * share * thrice / twice,
        3 - 4 * share * four_times / thrice,
    )
    usable = all(0 <= value <= count for count, value in enumerate(found, start=1))
    return np.array([0.0, *(found if usable else FALLBACK)])


def probabilities(model: NGrams, text: Stream) -> Iterator[Floats]:
    """Of every token after the first of its sentence, by models of one, two, … tokens."""
    predicted = text.places > 0
    below = np.full(len(text.tokens), 1 / model.vocabulary)
    contexts = np.zeros(len(text.tokens), dtype=np.int64)  # of one token: the empty one
    for order in model.orders:
        wanted = contexts * model.vocabulary + text.tokens
        near = np.minimum(np.searchsorted(order.keys, wanted), len(order.keys) - 1)
        numbers = np.where((contexts >= 0) & (order.keys[near] == wanted), near, -1)
        yield interpolated(order.highest, numbers, contexts, below)[predicted]
        below = interpolated(order.lower, numbers, contexts, below)
        contexts = np.where(predicted, np.roll(numbers, 1), -1)


def interpolated(at: Level, numbers: Ints, contexts: Ints, below: Floats) -> Floats:
    """An unseen n-gram has no share of its own; an unseen context leaves everything to the
    shorter one."""
    own = np.where(numbers >= 0, at.probabilities[numbers], 0.0)
    return own + np.where(contexts >= 0, at.left_over[contexts], 1.0) * below


def unseen(tables: dict[int, Any], training: dict[int, Any]) -> dict[int, Any]:
    """Without the sentences that also stand word for word in the training text."""
    known = {
        row.tobytes()
        for length in tables.keys() & training.keys()
        for row in training[length].numpy()
    }
    new = {
        length: np.array([row.tobytes() not in known for row in table.numpy()])
        for length, table in tables.items()
    }
    return {length: table[new[length]] for length, table in tables.items() if new[length].any()}


def english_nats(tables: dict[int, Any]) -> float:
    """Mean nats a token of the shipped prior, as `gradleak prior eval` takes it."""
    import torch

    from gradleak.priors.english import English
    from gradleak.targets.minilm import MiniLM

    prior = English().open(MiniLM().open(torch.device("cpu")))
    total = 0.0
    for length, table in tables.items():
        means = prior.nll(table.long(), torch.full((len(table),), length))
        total += float(means.double().sum()) * (length - 1)
    return total / sum(len(table) * (length - 1) for length, table in tables.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, nargs="+")
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument(
        "--unseen",
        action="store_true",
        help="judge only sentences that are nowhere in the training text",
    )
    chosen = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # before gradleak.targets turns it off
    from transformers import AutoTokenizer

    from gradleak.targets.minilm import installed_folder
    from gradleak.training.language_model_prior import read_corpus

    watch = time.monotonic
    began = watch()
    tokenizer = AutoTokenizer.from_pretrained(installed_folder())
    corpus = read_corpus(chosen.corpus, tokenizer, LONGEST)
    tables = unseen(corpus.held_out, corpus.training) if chosen.unseen else corpus.held_out
    text, held_out = (
        stream([table.numpy() for table in part.values()]) for part in (corpus.training, tables)
    )
    predicted = int((held_out.places > 0).sum())
    print(
        f"{len(text.tokens)} tokens for training; judged on {len(held_out.tokens)} tokens,"
        f" {predicted} of them predicted,"
    )
    print(
        f"of {sum(map(len, tables.values()))} of the {sum(map(len, corpus.held_out.values()))}"
        " sentences held out"
    )
    print(f"read in {watch() - began:.0f} s", flush=True)
    began = watch()
    model = train(text, len(tokenizer), chosen.order)
    for length, (order, each) in enumerate(
        zip(model.orders, probabilities(model, held_out), strict=True), start=1
    ):
        kept = int((order.highest.probabilities > 0).sum())
        print(
            f"{length}-gram: {-np.log(each).mean():.4f} nats a token, {kept} n-grams of that length"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"counted and judged in {watch() - began:.0f} s; {peak:.1f} GiB of memory at most so far",
        flush=True,
    )
    began = watch()
    print(f"english: {english_nats(tables):.4f} nats a token, in {watch() - began:.0f} s")


if __name__ == "__main__":
    main()
