"""Words searched by what they match of the whole update, through every kind of defense."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.energy.objective import find_needed_layers
from gradleak.attacks.gradient_matching.discrete import find_nearest_words
from gradleak.attacks.search.hypotheses import Assumptions
from gradleak.attacks.search.matched import Matched, find_labels
from gradleak.attacks.search.rematch import Rematch
from gradleak.attacks.search.search_rows import Rows, group_problems, lay_out
from gradleak.attacks.search.word_search import SearchEffort, WordSearch
from gradleak.core.attack import Bench
from gradleak.core.defense import Defense
from gradleak.core.observation import Fact, Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.defenses.few_bits import Quantisation, Sign
from gradleak.defenses.sparsification import Masking, Pruning
from gradleak.priors.english import FrequentWords
from gradleak.views import Lamp

TEXTS = ("my phone number is five", "the cat is red .", "she paid the bank")
Observe = Callable[..., Observation]
KINDS: list[tuple[Defense, ...]] = [
    (),
    (GaussianNoise(0.003),),
    (Masking(0.9),),
    (Pruning(0.1),),
    (Sign(),),
    (Quantisation(4),),
    (Clipping(0.1), GaussianNoise(0.0003)),
]


def seen_of(
    target: Target, observe: Observe, defenses: tuple[Defense, ...], count: int = 3
) -> list[Observation]:
    return [
        observe(target, [text], [1], index=index, view=Lamp(), defenses=defenses)
        for index, text in enumerate(TEXTS[:count])
    ]


def rows_of(seen: list[Observation]) -> Rows:
    return lay_out(group_problems(seen, Assumptions("known", "known"))[0])


def observations_of(rows: Rows) -> list[Observation]:
    return [problem.observation for problem in rows.problems]


def bench_of(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 3), FrequentWords().open(target))


def truth(rows: Rows) -> Tensor:
    ids = rows.frame.clone()
    for row, problem in enumerate(rows.problems):
        words = rows.target.encode([TEXTS[problem.observation.index]])[0]
        ids[row, 0, : len(words)] = torch.tensor(words)
    return ids


@pytest.mark.parametrize(
    "defenses", KINDS, ids=lambda chain: "+".join(one.name for one in chain) or "none"
)
def test_a_wrong_word_or_two_exchanged_ones_are_put_right_through_every_defense(
    defenses: tuple[Defense, ...], tiny64: Target, observe: Observe
) -> None:
    rows = rows_of(seen_of(tiny64, observe, defenses, count=2))
    right = truth(rows)
    start = right.clone()
    exchanged = torch.tensor([problem.observation.index == 0 for problem in rows.problems])
    start[exchanged, 0, 2:4] = start[exchanged, 0, 2:4].flip(-1)
    start[~exchanged, 0, 3] = rows.words[7]
    assert bool((start != right).any(-1).all())
    bench, near = bench_of(tiny64), find_nearest_words(rows, tiny64.embed(start))
    rematch = Rematch(bench, SearchEffort(restarts=0))
    found, _ = rematch.run(rows, Matched(observations_of(rows)), start, near)
    assert torch.equal(found, right)


@pytest.mark.parametrize("defenses", [(), (GaussianNoise(0.003),)], ids=["none", "noise"])
def test_all_places_in_one_pass_put_wrong_words_right_too(
    defenses: tuple[Defense, ...], tiny64: Target, observe: Observe
) -> None:
    rows = rows_of(seen_of(tiny64, observe, defenses))
    right = truth(rows)
    start = right.clone()
    start[:, 0, 3] = rows.words[7]
    bench, near = bench_of(tiny64), find_nearest_words(rows, tiny64.embed(start))
    settings = SearchEffort(restarts=0, at_once=True)
    search = WordSearch(rows, Matched(observations_of(rows)), bench, settings, near, start)
    found, _ = search.attempt(start)
    assert torch.equal(found, right)


@pytest.mark.parametrize(
    "defenses", KINDS, ids=lambda chain: "+".join(one.name for one in chain) or "none"
)
def test_some_of_the_observations_score_as_among_all(
    defenses: tuple[Defense, ...], tiny64: Target, observe: Observe
) -> None:
    rows = rows_of(seen_of(tiny64, observe, defenses))
    matched, places = Matched(observations_of(rows)), torch.tensor([2, 0, 2])
    guesses = rows.frame[:, None].clone()
    guesses[:, :, 0, 1] = rows.words[3]
    whole = matched.score(rows.token_batch(guesses), slice(None))
    part = rows.take(places)
    assert torch.allclose(
        matched.take(places).score(part.token_batch(guesses[places]), slice(None)), whole[places]
    )


def test_under_noise_scores_are_nats_and_the_truth_has_fewest(
    tiny64: Target, observe: Observe
) -> None:
    std = 0.01
    rows = rows_of(seen_of(tiny64, observe, (GaussianNoise(std),)))
    matched = Matched(observations_of(rows))
    right, wrong = truth(rows), truth(rows)
    wrong[:, 0, 2] = rows.words[7]
    scores = [
        matched.score(rows.token_batch(ids[:, None]), slice(None))[:, 0] for ids in (right, wrong)
    ]
    clear = rows_of(seen_of(tiny64, observe, ()))
    squares = torch.stack(
        [
            sum(
                (noisy.update.tensors[name] - plain.update.tensors[name]).square().sum()
                - std**2 * plain.update.tensors[name].numel()
                for name in matched.matcher.names
            )
            for noisy, plain in zip(observations_of(rows), observations_of(clear), strict=True)
        ]
    )
    assert torch.allclose(
        scores[0], squares / (2 * std**2), rtol=1e-6, atol=1e-3
    )  # the noise itself, less what is expected of it
    assert bool((scores[1] > scores[0] + 10).all())


def test_labels_are_known_or_read_and_left_alone_where_sentences_could_have_either(
    tiny64: Target, observe: Observe
) -> None:
    one = observe(tiny64, [TEXTS[0]], [1])
    assert find_labels(one) == find_labels(one.limit_to({Fact.LENGTHS, Fact.BATCH_SIZE})) == (1,)
    assert find_labels(observe(tiny64, TEXTS[:2], [1, 1])) == (1, 1)
    assert find_labels(observe(tiny64, TEXTS[:2], [0, 1])) is None


def test_more_noise_asks_for_more_layers_and_none_for_none(
    tiny64: Target, observe: Observe
) -> None:
    needed = [
        find_needed_layers(
            observe(
                tiny64, TEXTS[:1], [1], view=Lamp(), defenses=(GaussianNoise(std),) if std else ()
            )
        )
        for std in (0.0, 1e-4, 1.0)
    ]
    assert needed == [(), (1,), (1, 2)]


def test_the_judge_finds_what_energy_alone_cannot(tiny64: Target, observe: Observe) -> None:
    seen = seen_of(tiny64, observe, (GaussianNoise(0.05),), count=2)
    prior = FrequentWords().open(tiny64)

    def right(judge: bool) -> int:
        found = EnergyAttack(restarts=0, judge=judge).reconstruct(
            seen, Bench(Streams.root("attacker", 0), prior)
        )
        secrets = [tiny64.encode([text])[0] for text in TEXTS[:2]]
        pairs = zip(found, secrets, strict=True)
        return sum(
            a == b
            for guess, secret in pairs
            for a, b in zip(guess.sentences[0], secret, strict=True)
        )

    assert right(judge=True) > right(judge=False)


@pytest.mark.parametrize(
    "defenses", [(GaussianNoise(0.02),), (Pruning(0.1),), ()], ids=["noise", "pruning", "none"]
)
def test_the_loss_of_a_guess_is_the_objective_that_decided_and_its_penalty(
    tiny64: Target, observe: Observe, defenses: tuple[Defense, ...]
) -> None:
    attack, seen, prior = (
        EnergyAttack(restarts=0),
        seen_of(tiny64, observe, defenses)[-1:],
        FrequentWords().open(tiny64),
    )
    for one, guess in zip(
        seen, attack.reconstruct(seen, Bench(Streams.root("attacker", 0), prior)), strict=True
    ):
        objective = float(attack.objective([one], [tiny64.batch_of(guess.sentences, [1])])[0])
        assert guess.loss == pytest.approx(
            objective + attack.penalty(one, guess.sentences, prior), rel=1e-6
        )


def test_under_noise_energys_objective_is_the_likelihood_of_the_whole_update(
    tiny64: Target, observe: Observe
) -> None:
    attack, seen = EnergyAttack(), seen_of(tiny64, observe, (GaussianNoise(0.01),))[:1]
    right = tuple(tiny64.encode([TEXTS[0]])[0])
    wrong = (*right[:2], tiny64.encode(["bank"])[0][1], *right[3:])
    at_truth, at_wrong = (
        float(attack.objective(seen, [tiny64.batch_of([one], [1])])[0]) for one in (right, wrong)
    )
    update, observed = seen[0].simulate_undefended, seen[0].update.tensors
    squares = [
        sum(float((tensor - observed[name]).square().sum()) for name, tensor in sent.items())
        for sent in (
            update(tiny64.batch_of([one], [1])[None], []).tensors for one in (right, wrong)
        )
    ]
    # −log p, in nats
    assert at_wrong - at_truth == pytest.approx((squares[1] - squares[0]) / 2 / 0.01**2, rel=1e-6)
    assert at_wrong - at_truth > 10
    assert (
        attack.objective_scale(seen[0]).unit == "nats"
        and attack.penalty(seen[0], (right,), FrequentWords().open(tiny64)) > 0
    )
