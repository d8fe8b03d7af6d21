"""Through a defense, with the labels known: a last search by what words match of the whole update, over all guesses together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from gradleak.attacks import evidence
from gradleak.attacks.energy.rematch import Rematch, filled
from gradleak.attacks.energy.settings import SearchSettings
from gradleak.attacks.energy.words import filler_of
from gradleak.attacks.search.matched import Matched
from gradleak.attacks.search.rows import Problem, Rows, lay_out
from gradleak.core.attack import Bench, Sentences
from gradleak.core.observation import Observation
from gradleak.matching.rough import rough_products


@dataclass(frozen=True)
class Draft:
    """A guess to go on from, and words that may be in it."""

    problem: Problem
    sentences: Sentences
    few: Int[Tensor, "few"]
    many: Int[Tensor, "many"]


def can_judge(observation: Observation) -> bool:
    """Whether a defense is to be seen through, and the update of given words can be held against what it let pass."""
    return not observation.channel.only_scaled and labels_of(observation) is not None


def judged(drafts: Sequence[Draft], bench: Bench, settings: SearchSettings) -> list[Sentences]:
    """The guesses after the search, in their order."""
    found: list[Sentences] = [draft.sentences for draft in drafts]
    for places in _alike(drafts):
        if bench.out_of_time:
            break
        some = [drafts[place] for place in places]
        rows = _rows(some)
        observations = [draft.problem.observation for draft in some]
        width = max(len(draft.few) for draft in some), max(len(draft.many) for draft in some)
        few = torch.stack([filled(draft.few, width[0]) for draft in some])
        many = torch.stack([filled(draft.many, width[1]) for draft in some])
        with rough_products(observations):
            matched, ids = Matched(observations), _ids(rows, some)
            going = (~matched.fits(rows.batch(rows.target.embed(ids[:, None])), bench)).nonzero()[:, 0]
            if len(going):
                rematch = Rematch(bench, settings, filler_of(rows.target))
                ids[going], _ = rematch.run(rows.take(going), matched.take(going), ids[going], (few[going], many[going]))
        for row, place in enumerate(places):
            found[place] = rows.sentences(ids[row], row)
    return found


def labels_of(observation: Observation) -> tuple[int, ...] | None:
    """The labels as known, or as the update shows them; none where it is open which sentence has which."""
    if observation.target.labels_are_tokens:
        return ()
    known = observation.knows.labels
    shown = evidence.labels(observation) if known is None else None
    labels = tuple(known.tolist()) if known is not None else shown.values if shown is not None else ()
    return labels if len(set(labels)) == 1 else None


def _alike(drafts: Sequence[Draft]) -> list[list[int]]:
    """Where drafts stand that can go together: one kind of defense, the same tensors, one length where padding is read."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, draft in enumerate(drafts):
        one = draft.problem.observation
        width = None if one.target.padding_is_free else max(draft.problem.hypothesis.lengths)
        groups.setdefault((one.channel.kind, *one.update.tensors, width), []).append(place)
    return list(groups.values())


def _rows(drafts: Sequence[Draft]) -> Rows:
    rows = lay_out([draft.problem for draft in drafts])
    if rows.target.labels_are_tokens:
        return rows
    labels = [labels_of(draft.problem.observation) for draft in drafts]
    return replace(rows, labels=torch.tensor(labels, device=rows.frame.device))


def _ids(rows: Rows, drafts: Sequence[Draft]) -> Int[Tensor, "rows examples tokens"]:
    ids = rows.frame.clone()
    for row, draft in enumerate(drafts):
        for place, sentence in enumerate(draft.sentences):
            ids[row, place, : len(sentence)] = torch.tensor(sentence, device=ids.device)
    return ids
