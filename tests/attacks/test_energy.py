"""The explained-energy search: its objective, what it knows of each layer, and sentences out of
single matrices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradleak.attacks.certificate import certify
from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.energy.lexicon import rank_words, read_first_layer
from gradleak.attacks.energy.objective import Energy, choose_matrices
from gradleak.attacks.energy.structure import Structure, find_structures
from gradleak.attacks.search.changes import list_neighbours
from gradleak.attacks.search.search_rows import group_problems, lay_out
from gradleak.attacks.search.word_search import WordSearch
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation, View
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.priors.english import FrequentWords
from gradleak.views import Everything, PartsView

TEXTS = ("my phone number is five zero .", "the cat is red .", "she never paid the bank again")
Observe = Callable[..., Observation]
ATTACK = EnergyAttack(restarts=10, proposals=128)


def seen_of(
    target: Target, observe: Observe, view: View, texts: tuple[str, ...] = TEXTS
) -> list[Observation]:
    return [
        observe(target, [text], [1], index=index, view=view) for index, text in enumerate(texts)
    ]


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target))


def search_of(seen: list[Observation]) -> WordSearch:
    rows = lay_out(group_problems(seen, ATTACK.assumptions)[0])
    energy = Energy([problem.observation for problem in rows.problems])
    some = rows.words[None, :8].repeat(len(rows.problems), 1)
    bench = bench_for(rows.target)
    start = read_first_layer(rows, bench)
    return WordSearch(rows, energy, bench, ATTACK.effort, (some, some), start)


def truth(search: WordSearch) -> Tensor:
    ids = search.rows.frame.clone()
    for row, problem in enumerate(search.rows.problems):
        words = search.rows.target.encode([TEXTS[problem.observation.index]])[0]
        ids[row, 0, : len(words)] = torch.tensor(words)
    return ids


@pytest.mark.parametrize(
    "module", ["query", "key", "value", "attention_output", "ffn_in", "ffn_out"]
)
@pytest.mark.parametrize("layer", ["1", "2"])
def test_the_truth_explains_every_matrix_of_every_layer(
    module: str, layer: str, tiny64: Target, observe: Observe
) -> None:
    search = search_of(seen_of(tiny64, observe, PartsView(layers=layer, modules=(module,))))
    assert bool((search.score(truth(search)[:, None])[:, 0] < -11).all())


def test_the_share_explained_is_that_of_a_projection(tiny64: Target, observe: Observe) -> None:
    search = search_of(
        seen_of(tiny64, observe, PartsView(layers="1", modules=("query",)), TEXTS[:1])
    )
    wrong = truth(search)
    wrong[0, 0, 2] = wrong[0, 0, 3]
    batch = search._embed(wrong[:, None], slice(None))
    gradient = next(iter(search.rows.problems[0].observation.update.tensors.values()))[0]
    inputs = next(iter(search.objective.inputs(batch).values()))[0, 0, 0]
    basis = torch.linalg.qr(inputs.T).Q
    expected = 1 - (gradient @ basis).square().sum() / gradient.square().sum()
    assert torch.allclose(
        search.objective.measure_unexplained(batch, slice(None))[0, 0, 0], expected, rtol=1e-3
    )


def test_structure_is_read_off_the_architecture(tiny64: Target) -> None:
    def structure(layer: int, module: str) -> Structure:
        part = next(part for part in tiny64.parts if part.layer == layer and part.module == module)
        return find_structures(tiny64, [part])[0]

    assert structure(1, "query") == structure(1, "value") == structure(1, "ffn_in") == Structure()
    assert structure(1, "key") == structure(2, "key") == Structure(centred=True)
    # Only [CLS] is fed on
    assert structure(2, "query") == structure(2, "ffn_out") == Structure(place=0)
    assert structure(2, "value") == Structure()


@pytest.mark.parametrize(
    "view", [PartsView("1", ("query",)), PartsView("1", ("ffn_in",)), PartsView("1")]
)
def test_sentences_come_out_of_one_matrix_and_are_certified(
    view: View, tiny64: Target, observe: Observe
) -> None:
    seen = seen_of(tiny64, observe, view)
    guesses = ATTACK.reconstruct(seen, bench_for(tiny64))
    assert [tiny64.decode(guess.sentences[0]) for guess in guesses] == [
        tiny64.decode(tiny64.encode([text])[0]) for text in TEXTS
    ]
    assert all(guess.certified for guess in guesses)


def test_a_slip_opens_one_gap_and_a_fitting_one_comes_first(
    tiny64: Target, observe: Observe
) -> None:
    search = search_of(
        seen_of(tiny64, observe, PartsView(layers="1", modules=("value",)), TEXTS[:1])
    )
    right = truth(search)
    wrong = right.clone()
    # A word lost, those after it moved up
    wrong[0, 0, 2:6] = torch.cat([right[0, 0, 3:6], right[0, 0, 6:7]])
    slips = [search.open_gap(wrong, choice) for choice in range(3)]
    assert all(int((slip == search.filler).sum()) == 1 for slip in slips)
    missing = right.clone()
    missing[0, 0, 2] = search.filler
    assert bool((slips[0] == missing).all())


def test_many_words_are_tried_at_weak_places_and_special_ones_stay(
    tiny64: Target, observe: Observe
) -> None:
    search = search_of(
        seen_of(tiny64, observe, PartsView(layers="1", modules=("value",)), ("red",))
    )
    search.many = search.rows.words[None]
    found = search.try_many_words(torch.where(search.rows.fixed, search.rows.frame, search.filler))
    assert found[0, 0].tolist() == tiny64.encode(["red"])[0]


def test_near_misses_are_not_certified(tiny64: Target, observe: Observe) -> None:
    for seen, text in zip(seen_of(tiny64, observe, PartsView(layers="2")), TEXTS, strict=True):
        (right,) = tiny64.encode([text])
        dog = tiny64.encode(["dog"])[0][1]
        assert certify(seen, [right]).proven
        for wrong in ((*right[:2], dog, *right[3:]), (*right[:2], right[3], right[2], *right[4:])):
            assert not certify(seen, [wrong]).proven


def test_a_batch_of_which_tokens_have_not_mixed_is_certified_only_if_it_is_right(
    tiny64: Target, observe: Observe
) -> None:
    unmixed = PartsView(layers="1", modules=("query", "key", "value"))
    right = sorted(map(tuple, tiny64.encode(TEXTS[:2])))
    for view, proven in ((unmixed, None), (PartsView(layers="1"), True)):
        found = ATTACK.reconstruct(
            [observe(tiny64, list(TEXTS[:2]), [1, 0], view=view)], bench_for(tiny64)
        )[0]
        assert found.certified is (sorted(found.sentences) == right if proven is None else proven)


def test_noise_is_never_certified(tiny64: Target, observe: Observe) -> None:
    seen = seen_of(tiny64, observe, PartsView(layers="1"), TEXTS[:1])[0]
    generator = Streams.root("noise", 0).generator()
    noisy = {
        name: (
            tensor
            + 0.1
            * tensor.std()
            * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        )
        for name, tensor in seen.update.tensors.items()
    }
    changed = Observation(
        0, (type(seen.rounds[0])(seen.target, Update(noisy)),), seen.knows, seen.protocol
    )
    assert (
        not EnergyAttack(restarts=1, proposals=64)
        .reconstruct([changed], bench_for(tiny64))[0]
        .certified
    )


def test_a_length_that_is_not_known_is_found(tiny64: Target, observe: Observe) -> None:
    seen = seen_of(tiny64, observe, PartsView(layers="1"), TEXTS[1:2])
    guess = EnergyAttack(restarts=2, proposals=64, lengths="enumerate", longest=9).reconstruct(
        seen, bench_for(tiny64)
    )[0]
    assert tiny64.decode(guess.sentences[0]) == "the cat is red."


def test_moves_are_permutations_of_free_places(tiny64: Target, observe: Observe) -> None:
    rows = lay_out(group_problems(seen_of(tiny64, observe, Everything()), ATTACK.assumptions)[0])
    orders = list_neighbours(rows)
    places = torch.arange(orders.shape[-1])
    assert torch.equal(orders.sort(-1).values, places.expand_as(orders))
    moved = orders != places
    assert not bool((moved & rows.fixed.flatten(1)[:, None]).any())


def test_an_update_without_matrices_of_layers_is_refused(tiny64: Target, observe: Observe) -> None:
    with pytest.raises(GradleakError, match="none is visible"):
        ATTACK.reconstruct(
            seen_of(tiny64, observe, PartsView(modules=("layernorm",))), bench_for(tiny64)
        )


def test_the_words_of_a_text_stand_first_in_its_lexicon(tiny64: Target, observe: Observe) -> None:
    seen = seen_of(tiny64, observe, PartsView(layers="1", modules=("value",)))
    words = tiny64.vocabulary.allowed.nonzero()[:, 0]
    pairs = list(zip(*choose_matrices(seen, None), strict=True))
    misfits = rank_words(seen, words, pairs, bench_for(tiny64))
    for text, misfit in zip(TEXTS, misfits, strict=True):
        ranks = misfit.argsort().argsort()
        own = [
            int(ranks[(words == word).nonzero()[0, 0]])
            for word in tiny64.encode([text])[0]
            if bool((words == word).any())
        ]
        assert sum(own) / len(own) < len(words) / 4  # by chance a half


def test_the_first_layer_says_every_word_at_once(tiny64: Target, observe: Observe) -> None:
    for module in ("query", "key", "value"):
        rows = search_of(seen_of(tiny64, observe, PartsView(layers="1", modules=(module,)))).rows
        found = read_first_layer(rows, bench_for(tiny64))
        for row, problem in enumerate(rows.problems):
            expected = tiny64.encode([TEXTS[problem.observation.index]])[0]
            assert found[row, 0, : len(expected)].tolist() == expected
