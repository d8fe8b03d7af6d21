"""An inverter learns on clients that the attacker plays, and then reads updates it has never
seen, through any defense."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.attacks.blind import Blind
from gradleak.attacks.learning_to_invert.features import HashedFeatures
from gradleak.attacks.learning_to_invert.inversion import Inverter, InverterFit
from gradleak.attacks.learning_to_invert.medium import SeenClients
from gradleak.attacks.learning_to_invert.simulation import Simulation
from gradleak.attacks.learning_to_invert.text_attacks import (
    Lti,
    LtiP,
    MarginalTokens,
    RunningText,
    TextInversion,
    read_texts,
)
from gradleak.attacks.learning_to_invert.text_network import (
    ALIGNED,
    LOGITS_AT_ONCE,
    Perceptron,
    Scaling,
    TextNetwork,
    WordBeam,
    WordTable,
    linear_cross_entropy,
)
from gradleak.core.attack import Bench, ClientSetting
from gradleak.core.batch import Batch, Example
from gradleak.core.defense import Defense, channel_of, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Observation, View
from gradleak.core.prior import Prior
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.defenses.clipping_and_noise import GaussianNoise
from gradleak.defenses.few_bits import Sign
from gradleak.defenses.sparsification import Masking, Pruning
from gradleak.priors.english import FrequentWords
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.tiny import WORDS, Tiny, TinyCausal
from gradleak.views import Everything, Lamp

QUICK = LtiP(
    steps=60,
    training_batch=32,
    learning_rate=4e-3,
    features="factors",
    words="known",
    token_width=64,
)


def texts(count: int, words: int, seed: int) -> list[Example]:
    """Made-up sentences of frequent and rare words."""
    draw = random.Random(seed)
    known = [word for word in WORDS if word.isalpha()]
    chances = [1 / (rank + 3) for rank in range(len(known))]
    return [
        Example(" ".join(draw.choices(known, chances, k=words)), draw.randrange(2))
        for _ in range(count)
    ]


def setting_of(
    target: Target, *defenses: Defense, view: View | None = None, batch_size: int = 1
) -> ClientSetting:
    return ClientSetting(Tiny(), target, FedSGD(), defenses, view or Lamp(), batch_size)


def bench_of(target: Target, **more: Any) -> Bench:
    return Bench(Streams.root("attacker", 0), FrequentWords().open(target), **more)


def accuracy(found: list[Any], secrets: list[tuple[int, ...]]) -> float:
    pairs = [
        (true, guessed)
        for guess, row in zip(found, secrets, strict=True)
        for true, guessed in zip(row, guess, strict=False)
    ]
    return sum(true == guessed for true, guessed in pairs) / sum(map(len, secrets))


@pytest.mark.parametrize(
    "defenses",
    [(), (Sign(),), (Pruning(0.05),), (GaussianNoise(0.003),)],
    ids=["none", "sign", "pruning", "noise"],
)
def test_an_inverter_beats_the_blind_guess_by_far_through_each_defense(
    tiny: Target, observe: Callable[..., Observation], defenses: tuple[Defense, ...]
) -> None:
    secrets = [example.text for example in texts(24, 6, seed=2)]
    ids = [tuple(row) for row in tiny.encode(secrets)]
    bench = bench_of(tiny)
    # Through signs it learns late: a fifth of the words after 60 steps, two fifths after 120, and a
    # last bit moves either by 0.03
    fitted = replace(QUICK, steps=100).fit(
        setting_of(tiny, *defenses), texts(200, 6, seed=1), bench
    )
    seen = [
        observe(tiny, (text,), index=place, defenses=defenses, view=Lamp())
        for place, text in enumerate(secrets)
    ]
    guesses = [found.sentences[0] for found in fitted.reconstruct(seen, bench)]
    blind = [found.sentences[0] for found in Blind().reconstruct(seen, bench)]
    inside = [row[1:-1] for row in ids]
    ours, chance = (accuracy([guess[1:] for guess in made], inside) for made in (guesses, blind))
    assert ours > chance + 0.15
    labels = [found.labels[0] for found in fitted.reconstruct(seen, bench)]  # type: ignore[index]
    truths = [int(one.knows.labels[0]) for one in seen]  # type: ignore[index]
    assert sum(a == b for a, b in zip(labels, truths, strict=True)) >= 22


@pytest.fixture(scope="module")
def learnt(tiny: Target) -> Inverter:
    return replace(QUICK, steps=2).fit(
        setting_of(tiny, Sign()), texts(40, 5, seed=1), bench_of(tiny)
    )


@pytest.mark.parametrize(
    "attack", [replace(QUICK, steps=2), replace(QUICK, steps=2, features="hashed", words="learned")]
)
def test_a_saved_fit_makes_the_same_guesses(
    tiny: Target, observe: Callable[..., Observation], tmp_path: Path, attack: TextInversion
) -> None:
    setting, bench = setting_of(tiny), bench_of(tiny)
    fitted = attack.fit(setting, texts(40, 5, seed=1), bench)
    fitted.save(tmp_path / "fit.safetensors")
    again = attack.load(tmp_path / "fit.safetensors", setting)
    seen = [observe(tiny, (example.text,), view=Lamp()) for example in texts(4, 5, seed=2)]
    assert [one.sentences for one in again.reconstruct(seen, bench)] == [
        one.sentences for one in fitted.reconstruct(seen, bench)
    ]


def test_a_fit_is_refused_elsewhere_by_what_differs(
    tiny: Target, observe: Callable[..., Observation], learnt: Inverter, tmp_path: Path
) -> None:
    path = tmp_path / "fit.safetensors"
    learnt.save(path)
    attack = replace(QUICK, steps=2)
    with pytest.raises(GradleakError, match="fitted to another defense: sign, and here it is none"):
        attack.load(path, setting_of(tiny))
    with pytest.raises(GradleakError, match="fitted to another target"):
        attack.load(path, replace(setting_of(tiny, Sign()), spec=Tiny(seed=1)))
    with pytest.raises(GradleakError, match="holds another lti_p"):
        replace(attack, token_width=32).load(path, setting_of(tiny, Sign()))
    with pytest.raises(GradleakError, match="fitted through other defenses"):
        learnt.reconstruct([observe(tiny, ("the cat is red .",), view=Lamp())], bench_of(tiny))
    with pytest.raises(GradleakError, match="fitted to another view"):
        learnt.reconstruct(
            [observe(tiny, ("the cat is red .",), defenses=(Sign(),))], bench_of(tiny)
        )
    other = Tiny(seed=1).open(torch.device("cpu"))
    with pytest.raises(GradleakError, match="fitted to another target"):
        learnt.reconstruct(
            [observe(other, ("the cat is red .",), defenses=(Sign(),), view=Lamp())], bench_of(tiny)
        )
    with pytest.raises(GradleakError, match="has learnt nothing yet"):
        attack.reconstruct([], bench_of(tiny))
    path.write_bytes(b"no fit")
    with pytest.raises(GradleakError, match="Cannot read the fit"):
        attack.load(path, setting_of(tiny))


def test_an_interrupted_fit_goes_on_where_it_was(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradleak.attacks.learning_to_invert import training

    monkeypatch.setattr(training, "NEWS", 1)
    monkeypatch.setattr(training, "KEEP_SECONDS", 0.0)
    attack = replace(QUICK, steps=6, training_batch=4, token_width=8)
    setting, public = setting_of(tiny), texts(40, 5, seed=1)
    whole = attack.fit(setting, public, bench_of(tiny))
    steps: list[int] = []

    class Stopping(Exception):
        pass

    def stop(state: Any) -> None:
        steps.append(state["step"])
        if state["step"] == 3:
            raise Stopping

    keep = training.keep
    monkeypatch.setattr(training, "keep", lambda path, state: (keep(path, state), stop(state)))
    with pytest.raises(Stopping):
        attack.fit(setting, public, bench_of(tiny, checkpoint=tmp_path / "c.checkpoint"))
    resumed = attack.fit(setting, public, bench_of(tiny, checkpoint=tmp_path / "c.checkpoint"))
    assert steps == [1, 2, 3, 4, 5]
    for name, tensor in whole.network.state_dict().items():
        torch.testing.assert_close(resumed.network.state_dict()[name], tensor)


def test_words_are_drawn_by_their_frequency_and_frames_stay(tiny: Target) -> None:
    corpus = read_texts(setting_of(tiny), [Example("cat cat cat dog", 0)] * 10, None)
    drawn = MarginalTokens(tiny, corpus).draw(2000, 1, torch.Generator().manual_seed(0))
    assert drawn.ids is not None
    cat, dog = (tiny.encode([word])[0][1] for word in ("cat", "dog"))
    inside = drawn.ids[:, 0, 1:-1]
    assert float((inside == cat).float().mean()) == pytest.approx(0.75, abs=0.02)
    assert float((inside == dog).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert set(drawn.ids[:, 0, 0].tolist()) == set(tiny.vocabulary.prefix)
    assert set(drawn.ids[:, 0, -1].tolist()) == set(tiny.vocabulary.suffix)


def test_several_texts_in_a_batch_are_learnt_each_in_a_slot(
    tiny: Target, observe: Callable[..., Observation]
) -> None:
    bench = bench_of(tiny)
    attack = replace(QUICK, steps=10)
    fitted = attack.fit(
        setting_of(tiny, view=Everything(), batch_size=2), texts(100, 4, seed=1), bench
    )
    (found,) = fitted.reconstruct([observe(tiny, ("the cat is red", "my dog was bad"))], bench)
    assert len(found.sentences) == 2
    assert found.labels is not None and len(found.labels) == 2
    with pytest.raises(GradleakError, match="batches of 2, not of 1"):
        fitted.reconstruct([observe(tiny, ("the cat is red",))], bench)


def test_several_labelled_texts_find_their_slots_in_2_byte_numbers_too() -> None:
    torch.manual_seed(0)
    network = TextNetwork(
        6, Perceptron(6, 6, 5, 4), WordTable(4, 9, None), 2, 3, 0, WordBeam(0.0, 1, 1)
    )
    ids, labels = torch.randint(9, (4, 2, 3)), torch.randint(3, (4, 2))
    clients = Batch(ids=ids, mask=torch.ones_like(ids).bool(), labels=labels)
    lesson = SeenClients(torch.randn(4, 6), clients)
    low, whole = (network.loss(lesson, dtype).item() for dtype in (torch.bfloat16, torch.float32))
    assert low == pytest.approx(whole, rel=0.02)


def test_the_learning_rate_is_the_one_that_does_best_on_held_out_texts(tiny: Target) -> None:
    attack = replace(QUICK, steps=1, probe_steps=12, learning_rate=None)
    fitted = attack.fit(setting_of(tiny), texts(60, 5, seed=1), bench_of(tiny))
    # So few steps get nowhere at the smaller ones
    assert fitted.facts["rate"] == pytest.approx(1e-3 * (32 / 64) ** 0.5)


def test_nothing_to_learn_from_is_refused(tiny: Target) -> None:
    with pytest.raises(GradleakError, match="needs public texts"):
        Lti().fit(setting_of(tiny), [], bench_of(tiny))
    with pytest.raises(GradleakError, match="fraction must be above 0 and at most 1"):
        Lti(fraction=0.0).fit(setting_of(tiny), texts(40, 5, seed=1), bench_of(tiny))


class Likes(Prior):
    """Believes in one word."""

    def __init__(self, word: int) -> None:
        self.word = word

    def nll(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return (ids != self.word).float().sum(1) / (lengths - 1)

    def likely(self, length: int, streams: Streams) -> list[int]:
        return [self.word] * length

    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        return [self.likely(*one) for one in zip(lengths, streams, strict=True)]

    def likely_length(self) -> int:
        return 1


def test_a_prior_decides_where_the_inverter_is_in_doubt_and_only_there() -> None:
    scores = torch.tensor([[0.0, 5.0, 0.0], [0.0, 1.0, 0.9], [9.0, 0.0, 0.0]])
    assert WordBeam(0.0, sentences=4, candidates=3).search(scores, Likes(2)).tolist() == [1, 1, 0]
    assert WordBeam(1.0, sentences=4, candidates=3).search(scores, Likes(2)).tolist() == [1, 2, 0]
    assert WordBeam(1.0, sentences=1, candidates=1).search(scores, Likes(2)).tolist() == [1, 1, 0]


@pytest.mark.parametrize("aligned", [1, 8])
@pytest.mark.parametrize("known", [True, False])
def test_the_loss_in_pieces_is_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, known: bool, aligned: int
) -> None:
    monkeypatch.setitem(ALIGNED, "cpu", aligned)
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 20)
    generator = torch.Generator().manual_seed(0)
    states, table, bias = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in ((7, 4), (9, 4), (9,))
    )
    table.requires_grad_(not known)
    truth = torch.randint(9, (7,), generator=generator)
    plain = torch.nn.functional.cross_entropy(states @ table.mT + bias, truth)
    pieces = linear_cross_entropy(states, table, bias, truth)
    torch.testing.assert_close(pieces, plain)
    wanted = [states, bias, *([] if known else [table])]
    for ours, theirs in zip(
        torch.autograd.grad(3 * pieces, wanted), torch.autograd.grad(3 * plain, wanted), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("features", ["hashed", "factors"])
def test_noise_added_to_features_is_distributed_as_the_defenses_own(
    tiny: Target, features: str
) -> None:
    plain, noisy = setting_of(tiny), setting_of(tiny, GaussianNoise(0.5))
    fitting = InverterFit(
        replace(QUICK, features=features), noisy, texts(40, 5, seed=1), bench_of(tiny)
    )
    batch = fitting.lessons.source.draw(1, 1, torch.Generator().manual_seed(0))
    clean = Simulation(plain)(batch, Streams.root("here", 0))
    made = fitting.features
    by_code = [
        protect_in_turn(noisy.defenses, clean, [Streams.root("there", draw)]) for draw in range(150)
    ]
    theirs = torch.cat([made(sent) for sent in by_code]) - made(clean)
    ours = torch.cat(
        [fitting.simulated(batch, Streams.root("here", draw)) for draw in range(150)]
    ) - made(clean)
    some = slice(0, 400)
    torch.testing.assert_close(ours.std(0)[some], theirs.std(0)[some], rtol=0.5, atol=0)
    assert float(ours.square().mean()) == pytest.approx(float(theirs.square().mean()), rel=0.02)
    correlations = torch.corrcoef(theirs[:, :40].mT) - torch.eye(40)  # independent there too
    assert float(correlations.abs().max()) < 0.4


@pytest.mark.parametrize(
    ("defenses", "largest", "by_signs"),
    [
        ((Pruning(0.1),), "signs", True),
        ((Pruning(0.1),), "sizes", False),
        ((Masking(0.9),), "signs", False),
        ((), "signs", False),
    ],
)
def test_of_the_largest_entries_their_signs_are_read_and_not_of_those_that_chance_left(
    tiny: Target,
    observe: Callable[..., Observation],
    defenses: tuple[Defense, ...],
    largest: Any,
    by_signs: bool,
) -> None:
    features = HashedFeatures(setting_of(tiny, *defenses), 0.1, 0, signed=False, largest=largest)
    update = observe(tiny, ("the cat is red .",), defenses=defenses, view=Lamp()).update
    larger = Update({name: 3 * tensor for name, tensor in update.tensors.items()})
    assert torch.equal(features(update), features(larger)) == by_signs
    if by_signs:
        assert torch.equal(features(update), features(update).round())


def test_records_from_before_signs_were_read_are_of_another_attack_where_that_matters() -> None:
    assert LtiP().before(channel_of((Pruning(0.1),))) == {"largest": "sizes"}
    assert LtiP().before(channel_of((Sign(),))) == {} == LtiP().before(channel_of((Masking(0.5),)))


def test_features_that_few_clients_have_are_scaled_by_those_that_have_them() -> None:
    drawn = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    shares = torch.tensor([1.0, 0.1, 0.01, 0.0])
    rare = drawn * (torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)) < shares)
    scaling = Scaling(4)
    scaling.measure(rare)
    torch.testing.assert_close(scaling.get_buffer("spread")[:3], torch.ones(3), rtol=0.35, atol=0)
    # Of which nothing was seen: as the others
    assert float(scaling(torch.full((1, 4), 2.0))[0, 3]) == pytest.approx(2, rel=0.35)
    constant = torch.ones(10, 1)
    scaling = Scaling(1)
    scaling.measure(constant)
    assert float(scaling(2 * constant).abs().max()) == 0  # what never moves says nothing


def test_running_text_is_cut_at_any_token_and_only_where_texts_have_no_ends() -> None:
    target = TinyCausal().open(torch.device("cpu"))
    corpus = read_texts(
        setting_of(target),
        [Example(f"{one} walks home with a dog", None) for one in ("she", "he", "anna")],
        4,
    )
    drawn = RunningText(target, corpus).draw(64, 1, torch.Generator().manual_seed(0))
    stream = corpus.ids.flatten().tolist()
    starts = {tuple(row) for row in drawn.ids[:, 0].tolist()}
    assert starts == {tuple(stream[place : place + 4]) for place in range(len(stream) - 3)}
    assert drawn.mask.all()


def test_texts_with_special_tokens_are_not_cut_anew(tiny: Target) -> None:
    with pytest.raises(GradleakError, match="leave it out"):
        RunningText(tiny, read_texts(setting_of(tiny), texts(4, 5, seed=1), None))
