"""Which words the first layer asks for through heavy pruning, beside least squares by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.search.first_layer import FirstLayer, find_first_layer
from gradleak.attacks.search.hypotheses import Assumptions
from gradleak.attacks.search.search_rows import Rows, group_problems, lay_out
from gradleak.core.attack import Bench
from gradleak.core.batch import Batch
from gradleak.core.defense import Defense
from gradleak.core.observation import Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.defenses.sparsification import Masking, Pruning
from gradleak.matching.inputs import ModuleInputs, first_inputs, module_of
from gradleak.priors.english import FrequentWords
from gradleak.views import Lamp

TEXTS = ("my phone number is five", "she paid the bank")
Observe = Callable[..., Observation]
HEAVY = Pruning(0.02)


def rows_of(target: Target, observe: Observe, *defenses: Defense) -> Rows:
    seen = [
        observe(target, [text], [1], index=index, view=Lamp(), defenses=defenses)
        for index, text in enumerate(TEXTS)
    ]
    rows = lay_out(group_problems(seen, Assumptions("unused", "known"))[0])
    return replace(rows, labels=torch.ones(len(TEXTS), 1, dtype=torch.int64))


def truth_of(rows: Rows) -> Tensor:
    ids = rows.frame.clone()
    for row, problem in enumerate(rows.problems):
        words = rows.target.encode([TEXTS[problem.observation.index]])[0]
        ids[row, 0, : len(words)] = torch.tensor(words)
    return ids


def asked_of(rows: Rows) -> FirstLayer:
    first_layer = find_first_layer(rows)
    assert first_layer is not None
    return first_layer


def with_wrong_words(rows: Rows, ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 0, 2] = rows.words[-7]
    return ids


def fit_by_hand(first_layer: FirstLayer, rows: Rows, ids: Tensor, row: int, place: int) -> Tensor:
    """Returns the misfits of all words at a place, each matrix fitted with autograd's gradients."""
    target, total = rows.target, torch.zeros(len(rows.words))
    problem = rows.problems[row]
    length = problem.hypothesis.lengths[0]
    parts = {module_of(part): part for part in target.parts if part.parameter.endswith("weight")}
    made = first_inputs(
        ModuleInputs(target, [parts[first_layer.modules[0]]]), rows.words, ids.shape[-1]
    )[place]
    words = ids[row, 0, :length]
    for number, name in enumerate(first_layer.modules):
        module, calls = target.module.get_submodule(name), []
        handle = module.register_forward_hook(
            lambda _, given, output, calls=calls: calls.append((given[0], output))
        )
        batch = Batch(
            embeddings=target.embed(words[None]).detach().requires_grad_(),
            mask=torch.ones(1, length, dtype=torch.bool),
            labels=torch.ones(1, dtype=torch.int64),
        )
        loss = target.losses(batch).sum()
        handle.remove()
        inputs, output = calls[0]
        deltas = torch.autograd.grad(loss, output)[0][0]
        inputs = inputs[0].detach()
        seen = first_layer.observed[number, row]
        survived = seen != 0
        own = torch.outer(deltas[place], inputs[place])[survived]
        whole = (deltas.T @ inputs)[survived]
        size = (whole @ seen[survived] / (whole @ whole)).clamp_min(0)
        left = seen[survived] - size * (whole - own)
        columns = torch.stack([torch.outer(deltas[place], word)[survived] for word in made])
        amount = (columns @ left).clamp_min(0) / columns.square().sum(1).clamp_min(1e-30)
        misses = (left - amount[:, None] * columns).square().sum(1)
        total += (misses / seen.square().sum()).clamp_min(1e-9).log()
    return total


def test_every_word_is_ranked_as_least_squares_over_the_survivors_would(
    tiny64: Target, observe: Observe
) -> None:
    rows = rows_of(tiny64, observe, HEAVY)
    ids, first_layer = with_wrong_words(rows, truth_of(rows)), asked_of(rows)
    places = torch.tensor([2, 3])
    found = first_layer.rank_words(rows, ids, places)
    for row in range(2):
        by_hand = fit_by_hand(first_layer, rows, ids, row, int(places[row]))
        # A word that the place hardly sees is held back, which by hand it is not.
        close = (found[row] - by_hand).abs() < 1e-3
        assert float(close.double().mean()) > 0.98


def test_a_wrong_word_is_told_from_the_right_one(tiny64: Target, observe: Observe) -> None:
    rows = rows_of(tiny64, observe, HEAVY)
    right, first_layer = truth_of(rows), asked_of(rows)
    ids = with_wrong_words(rows, right)
    ranked = first_layer.rank_words(rows, ids, torch.tensor([2, 2]))
    for row in range(2):
        word = int((rows.words == right[row, 0, 2]).nonzero())
        better = int((ranked[row] < ranked[row, word]).sum())
        assert better < len(rows.words) / 4


def test_words_chosen_are_so_many_and_begin_with_what_speaks_for_itself(
    tiny64: Target, observe: Observe
) -> None:
    rows = rows_of(tiny64, observe, HEAVY)
    ids, first_layer = truth_of(rows), asked_of(rows)
    others = rows.words[None, 5:15].repeat(2, 1)
    chosen = first_layer.choose_words(rows, ids, torch.tensor([2, 2]), others, 8)
    assert chosen.shape == (2, 1 + 8 + 2)
    assert bool((chosen[:, 0] == others[:, 0]).all())
    assert set(chosen[0, 9:].tolist()) <= set(others[0].tolist())


@pytest.mark.parametrize(
    "defenses", [(), (Pruning(0.5),), (Masking(0.5),), (HEAVY, GaussianNoise(0.01))]
)
def test_the_first_layer_is_asked_only_where_few_right_entries_arrive(
    defenses: tuple[Defense, ...], tiny64: Target, observe: Observe
) -> None:
    assert find_first_layer(rows_of(tiny64, observe, *defenses)) is None


def test_energy_begins_with_the_first_layer_and_finds_words_through_heavy_pruning(
    tiny64: Target, observe: Observe
) -> None:
    rows = rows_of(tiny64, observe, HEAVY)
    seen, right = [problem.observation for problem in rows.problems], truth_of(rows)
    bench = Bench(Streams.root("attacker", 3), FrequentWords().open(tiny64))
    attack = EnergyAttack(restarts=0, proposals=16, sweeps=2)
    found = attack.reconstruct(seen, bench)
    words = [
        sum(word == wanted for word, wanted in zip(guess.sentences[0], row.tolist(), strict=False))
        for guess, row in zip(found, right[:, 0], strict=True)
    ]
    assert sum(words) > 2 * len(words) + 2  # more than the special tokens and a word or two
