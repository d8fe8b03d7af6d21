"""Words and sentences of large batches, past the width of the model, in four steps.

1. embedding_rows.py   Which words are there, and at which positions?
2. sentence_spaces.py  What tells one sentence of the batch from another?
3. sentence_search.py  Which sentences are there?
4. account.py          What is left of the update without those found so far?

What is found ends as a guess of whole sentences: those that hold exactly, then the nearest ones.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from gradleak.attacks.certificate import with_certificates
from gradleak.attacks.rows.embedding_rows import EmbeddingRows, read_embedding_rows
from gradleak.attacks.rows.sentence_search import SearchResult, SentenceSearch
from gradleak.attacks.rows.sentence_spaces import open_sentence_spaces
from gradleak.attacks.search.search_rows import compute_distances, score_batches
from gradleak.core.attack import Attack, Bench, Cost, Reconstruction
from gradleak.core.batch import Batch
from gradleak.core.defense import Channel
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.registry import Count, register
from gradleak.matching import Cosine, for_observations


@register("attack", "rows")
@dataclass(frozen=True)
class RowsAttack(Attack):
    """Finds words by the embeddings' rows, then sentences one by one by the last layer's span.

    For classifiers; as many texts as the model is wide, however long. Knows no labels or lengths.
    """

    cites = "ours; spans of layer inputs are from Petrov et al., NeurIPS 2024 (DAGER)"

    rounds: Count = 500  # of the search, at most
    patience: Count = 50  # rounds in which nothing is found, after which it ends
    climbs: Count = 16  # sentences searched at once
    tries: Count = 24  # words that the slope promises, tried for each in a round
    longest: Count = 512  # tokens of a text, where positions are not seen

    @property
    def uses(self) -> frozenset[Fact]:
        """To tell a text that is there twice from one whose gradient is twice as large."""
        return frozenset({Fact.BATCH_SIZE})

    def adapts_to(self, channel: Channel) -> bool:
        return channel.only_scaled

    def reconstruct(
        self, observations: Sequence[Observation], bench: Bench
    ) -> list[Reconstruction]:
        return [self._reconstruct(observation, bench) for observation in observations]

    def objective(
        self, observations: Sequence[Observation], batches: Sequence[Batch]
    ) -> Float[Tensor, "observations"]:
        """The cosine distance of the whole update: not what each sentence is searched by, but what
        tells a guess that lacks some from the truth."""
        return score_batches(
            observations,
            batches,
            lambda observation: observation.channel.kind,
            lambda seen, held: compute_distances(for_observations(seen, Cosine()), held),
        )

    def _reconstruct(self, observation: Observation, bench: Bench) -> Reconstruction:
        began = time.monotonic()
        refuse_hidden_rows(observation)
        refuse_several_steps(observation)
        rows = read_embedding_rows(observation, self.longest)
        if rows is None:
            raise GradleakError(
                "rows reads words off the word embeddings' gradient, in which only the rows of a"
                " batch's words may have moved: this update is noisy or has every row moved. Use"
                " another attack."
            )
        spaces = open_sentence_spaces(observation)
        if spaces is None:
            raise GradleakError(
                "rows tries sentences one by one in the last layer, whose gradient must be seen,"
                " without noise, of a classifier that reads its answer at one token, from fewer"
                " texts than the layer is wide. Words alone: bag_of_words."
            )
        search = SentenceSearch(observation, spaces, rows, bench, self.climbs, self.tries)
        result = search.run(self.rounds, self.patience)
        guess = conclude(observation, rows, result, spaces.rank)
        if not search.left:
            (guess,) = with_certificates([observation], [guess], bench)
        return replace(guess, cost=Cost(time.monotonic() - began, result.rounds))


def refuse_hidden_rows(observation: Observation) -> None:
    """Refuses word embeddings that are frozen, hidden or tied to the output, and says which."""
    target = observation.target
    names = target.groups["word_embedding"]
    if target.labels_are_tokens or target.words_are_outputs:
        raise GradleakError(
            "rows needs word embeddings that are looked up only, of a classifier: a language model"
            " has a gradient at every word and every token. Use span or energy."
        )
    if not names:
        raise GradleakError(
            "rows reads words off the word embeddings' gradient, and they are frozen in this model:"
            " no row of them is sent. Of large batches the last layer's span is left, which tells"
            " whether a sentence that somebody has in mind was there. Use span or energy for small"
            " ones."
        )
    if not any(name in observation.update.tensors for name in names):
        raise GradleakError(
            "rows reads words off the word embeddings' gradient, which this view does not show:"
            " choose a view that does, or use span or energy."
        )


def refuse_several_steps(observation: Observation) -> None:
    """Refuses updates that no single gradient is: the model that read a sentence is not known."""
    if not observation.protocol.one_gradient:
        raise GradleakError(
            "rows takes one gradient apart, and this protocol sends the sum of several local steps,"
            " each by another model. The words of the batch are among the findings all the same."
        )


def conclude(
    observation: Observation, rows: EmbeddingRows, result: SearchResult, distinct: int
) -> Reconstruction:
    """Makes a guess of what was found: every sentence as often as it is there, then the nearest
    ones, up to the size of the batch."""
    size = observation.knows.batch_size or distinct
    sentences, labels = list[tuple[int, ...]](), list[int | None]()
    for sentence, (label, times) in result.found.items():
        sentences += [sentence] * times
        labels += [label] * times
    found = len(sentences)
    sentences += result.unfinished[: max(0, size - found)]
    known = tuple(label for label in labels if label is not None)
    whole = len(known) == len(sentences)
    note = ""
    if len(result.found) < distinct:
        note = (
            f"{len(result.found)} of {distinct} different sentences were found: each lies in the"
            " last layer's span to the last bit that rounding leaves. The others are the nearest"
            f" that the search came to. Of {len(rows.words)} words that are all there is,"
            f" {len(rows.placed)} stand at one position, which is known."
        )
    return Reconstruction(tuple(sentences), labels=known if whole else None, note=note)
