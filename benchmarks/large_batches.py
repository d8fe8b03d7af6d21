"""What `rows` reads off one update of many texts: python benchmarks/large_batches.py --data cola
--batch-size 32 64 --batches 5 --seconds 0.

Prints a line a batch: words of the batch that were read (and whether any other was), words that
occur once and were placed where they stand, words placed wrongly, words at several positions whose
largest share lies at one of theirs. With --seconds above zero sentences are searched for so long at
most: sentences word for word, and pairs of neighbouring words in any guess of the batch. Batches
are rows --first and on of the data's split, one after the other. Times are of the processor, and of
the clock.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator

import torch

from gradleak.attacks.rows.embedding_rows import read_embedding_rows
from gradleak.attacks.rows.rows_attack import RowsAttack
from gradleak.audit import AuditSpec
from gradleak.audit.client import observe, private_batches
from gradleak.audit.scoring import pair_up
from gradleak.core.attack import Bench, Sentences
from gradleak.core.batch import PrivateBatch
from gradleak.core.memory import in_words, measured_peak
from gradleak.core.observation import Fact, Observation
from gradleak.core.prior import Prior, prior_of_texts
from gradleak.core.streams import Streams
from gradleak.metrics.texts import NeighboursFound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--data", nargs="+", default=["cola"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[32])
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--first", type=int, default=3000, help="row of the first batch")
    parser.add_argument("--seconds", type=float, default=0.0, help="of the search, a batch")
    parser.add_argument("--defense", nargs="*", default=[])
    parser.add_argument("--protocol", default="fedsgd")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    for data in chosen.data:
        for size in chosen.batch_size:
            measure(chosen, data, size)


def measure(chosen: argparse.Namespace, data: str, size: int) -> None:
    """Prints a line for each batch of this size."""
    last = chosen.first + size * chosen.batches - 1
    settings = {
        "target": chosen.target,
        "data": {"name": data, "selection": "all", "rows": [f"{chosen.first}-{last}"]},
        "attacks": ["rows"],
        "limit": chosen.batches,
        "batch_size": size,
        "protocol": chosen.protocol,
        "defenses": chosen.defense,
        "know": [str(Fact.BATCH_SIZE)],
    }
    spec = AuditSpec.from_plain(settings)
    target = spec.target.open(torch.device("cpu"))
    prior = prior_of_texts(spec.prior.open(target))
    for index, private in enumerate(private_batches(spec, target)):
        seen = observe(spec, target, private, index).limit_to({Fact.BATCH_SIZE})
        said = [describe_words(seen, private)]
        if chosen.seconds:
            said.append(describe_sentences(seen, private, prior, chosen.seconds))
        print(f"{data} B={size} batch {index}: {', '.join(said)}", flush=True)


def describe_words(seen: Observation, private: PrivateBatch) -> str:
    """Reads words and positions, and holds them against the truth."""
    processor, wall = time.process_time(), time.monotonic()
    rows = read_embedding_rows(seen, RowsAttack().longest)
    if rows is None:
        return "no words to be read"
    placed, shares = rows.placed, rows.shares
    processor, wall = time.process_time() - processor, time.monotonic() - wall
    places: dict[int, list[int]] = {}
    for sentence in list_sentences(private):
        for place, word in enumerate(sentence):
            places.setdefault(word, []).append(place)
    words = rows.words.tolist()
    once = [word for word, at in places.items() if len(at) == 1]
    right = sum(placed.get(word) == places[word][0] for word in once)
    wrong = sum({place} != set(places.get(word, ())) for word, place in placed.items())
    rest = [row for row, word in enumerate(words) if word not in placed]
    top = sum(int(shares[row].argmax()) in places.get(words[row], ()) for row in rest)
    others = "" if set(words) <= set(places) else f" and {len(set(words) - set(places))} others"
    return (
        f"{sum(map(len, places.values()))} tokens, words {len(set(words) & set(places))}"
        f"/{len(places)}{others}, once at their position {right}/{len(once)}, placed wrongly"
        f" {wrong}/{len(placed)}, several: largest share right {top}/{len(rest)},"
        f" {processor:.1f} s cpu {wall:.1f} s"
    )


def describe_sentences(
    seen: Observation, private: PrivateBatch, prior: Prior, seconds: float
) -> str:
    """Searches sentences, and holds them against the truth."""
    deadline = time.monotonic() + seconds
    bench = Bench(Streams.root("attacker", 0), prior, deadline=deadline)
    processor, wall = time.process_time(), time.monotonic()
    with measured_peak(seen.target.device) as peak:
        (guess,) = RowsAttack().reconstruct([seen], bench)
    processor, wall = time.process_time() - processor, time.monotonic() - wall
    secrets, found = list_sentences(private), Counter(guess.sentences)
    right = (Counter(secrets) & found).total()
    pairs = pair_up(seen.target, [private], [guess])
    neighbours = [value for value in NeighboursFound().values(pairs) if value is not None]
    return (
        f"sentences {right}/{len(secrets)}, neighbours"
        f" {100 * sum(neighbours) / len(neighbours):.0f} %, {'' if guess.certified else 'not '}"
        f"certified, {guess.cost.steps} rounds, {processor:.0f} s cpu {wall:.0f} s, peak"
        f" {in_words(peak.bytes or 0)}"
    )


def list_sentences(private: PrivateBatch) -> Sentences:
    """The true sentences, special tokens included."""
    return tuple(_read(private))


def _read(private: PrivateBatch) -> Iterator[tuple[int, ...]]:
    assert private.batch.ids is not None
    for row, length in zip(private.batch.ids.tolist(), private.lengths, strict=True):
        yield tuple(row[:length])


if __name__ == "__main__":
    main()
