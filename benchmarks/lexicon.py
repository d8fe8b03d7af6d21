"""How far up the lexicon the words of a text stand: python benchmarks/lexicon.py 3:query 6:value
--limit 6.

For one matrix at a time (LAYER:MODULE) the vocabulary is ranked as the energy attack ranks it;
prints the share of the texts' words among the first 64 and 256 and their median rank.
"""

import argparse

import torch

from gradleak.attacks.energy.lexicon import rank_words
from gradleak.attacks.energy.objective import choose_matrices
from gradleak.audit import AuditSpec
from gradleak.audit.client import observe, private_batches
from gradleak.core.attack import Bench
from gradleak.core.streams import Streams
from gradleak.priors.english import FrequentWords

MATRICES = ["1:query", "3:query", "5:query", "5:attention_output", "6:key", "6:value", "6:query"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("matrices", nargs="*", default=MATRICES)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--data", default="canaries")
    parser.add_argument("--limit", type=int, default=6)
    chosen = parser.parse_args()
    for matrix in chosen.matrices:
        ranks = torch.tensor(ranks_of(chosen, matrix)).float()
        first = [
            f"{100 * float((ranks < count).float().mean()):.0f} % among the first {count}"
            for count in (64, 256)
        ]
        print(
            f"{chosen.target} {chosen.data} {matrix}: {len(ranks)} words, {', '.join(first)},"
            f" median rank {int(ranks.median())}"
        )


def ranks_of(chosen: argparse.Namespace, matrix: str) -> list[int]:
    layer, _, module = matrix.partition(":")
    settings = {
        "target": chosen.target,
        "data": chosen.data,
        "limit": chosen.limit,
        "attacks": ["energy"],
    }
    spec = AuditSpec.from_plain(
        settings | {"view": {"name": "parts", "layers": layer, "modules": [module]}}
    )
    target = spec.target.open(torch.device("cpu"))
    private = private_batches(spec, target)
    seen = [observe(spec, target, batch, index) for index, batch in enumerate(private)]
    words = target.vocabulary.allowed.nonzero()[:, 0]
    bench = Bench(Streams.root("lexicon", 0), FrequentWords().open(target))
    pairs = list(zip(*choose_matrices(seen, None), strict=True))
    ranked = rank_words(seen, words, pairs, bench).argsort(1).argsort(1)
    found = []
    for row, batch in zip(ranked, private, strict=True):
        assert batch.batch.ids is not None
        found += [
            int(row[place])
            for word in batch.batch.ids[0]
            for place in (words == word).nonzero()[:, 0]
        ]
    return found


if __name__ == "__main__":
    main()
