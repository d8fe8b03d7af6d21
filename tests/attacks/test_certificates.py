"""Certificates: what is proven is the batch, and what gives the same update is never proven."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.attacks.certificate import certify, certify_all, with_certificates
from gradleak.attacks.certificate.contributions import compute_gradients, make_contributions
from gradleak.attacks.certificate.counting import Counting, list_labellings
from gradleak.attacks.certificate.neighbourhood import Neighbour, Neighbourhood
from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.span import Span
from gradleak.core.attack import Bench, Reconstruction
from gradleak.core.defense import Defense
from gradleak.core.observation import Fact, Observation, View
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.defenses.clipping_and_noise import Clipping, GaussianNoise
from gradleak.defenses.few_bits import Rounding, Sign
from gradleak.matching.exact import OuterSums, Tied, gradients_of
from gradleak.matching.inputs import matrix_of
from gradleak.matching.linear_algebra import orthonormalise
from gradleak.priors.english import FrequentWords
from gradleak.protocols.fedavg import FedAvg
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import Tiny, TinyCausal, tiny_tokenizer
from gradleak.views import Everything, Lamp, PartsView

Observe = Callable[..., Observation]
A, B, C = "the cat is red .", "my phone number is five .", "she sold my car soon"


def encode(target: Target, *texts: str) -> list[tuple[int, ...]]:
    return [tuple(row) for row in target.encode(texts)]


def bench_for(target: Target) -> Bench:
    return Bench(Streams.root("attacker", 0), FrequentWords().open(target))


def loaded_hunt() -> Any:
    """benchmarks/certificates.py, as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "certificates.py"
    spec = importlib.util.spec_from_file_location("certificates_hunt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["certificates_hunt"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", range(8))
def test_the_hunt_finds_no_false_certificate(number: int) -> None:
    tally = loaded_hunt().hunt(f"random-{number}", planted=1, attacked=0)
    assert tally.wrong == []
    assert tally.plain_certified >= 0.9 * tally.plain_true
    assert tally.certified > 0


@pytest.mark.parametrize("defenses", [(), (Clipping(0.1),)], ids=["none", "clipping"])
@pytest.mark.parametrize("labels", [(1, 1, 0), (1, 0, 0), (0, 1, 1)])
def test_a_sentence_that_is_there_twice_is_counted_twice_or_nothing_is_proven(
    tiny: Target, observe: Observe, defenses: Sequence[Defense], labels: Sequence[int]
) -> None:
    seen = observe(tiny, (A, A, B), labels, defenses=tuple(defenses)).limit_to(
        [Fact.BATCH_SIZE, Fact.DEFENSE]
    )
    (found,) = Span().reconstruct([seen], bench_for(tiny))
    assert not found.certified or sorted(found.sentences) == sorted(encode(tiny, A, A, B))
    told = certify(seen, encode(tiny, A, B))
    assert not told.proven or sorted(told.sentences) == sorted(encode(tiny, A, A, B))


def test_what_a_rotary_model_was_fed_has_no_order_and_still_nothing_wrong_is_proven(
    observe: Observe,
) -> None:
    target = TinyCausal(shape="llama").open(torch.device("cpu"))
    text = "she gave her friend a red book"
    seen = observe(target, (text,), view=PartsView("1", ("query", "key", "value")))
    (right,) = encode(target, text)
    for order in ((3, 6, 1, 5, 0, 2, 4), (0, 2, 1, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1, 0)):
        inside = right[: len(order)]
        assert not certify(
            seen, [(*(inside[place] for place in order), *right[len(order) :])]
        ).proven
    (found,) = EnergyAttack(restarts=1).reconstruct([seen], bench_for(target))
    assert not found.certified or found.sentences == (right,)


@pytest.mark.parametrize(
    "architecture", ["Bert", "Roberta", "MPNet", "Electra", "Albert", "GPT2", "Llama", "GPTNeoX"]
)
def test_exact_gradients_are_those_of_plain_autograd(
    random_target: Callable[..., Target], architecture: str
) -> None:
    target = random_target(architecture)
    batch = target.batch_of(encode(target, A, "my dog was bad !"), [0, 1])
    made = gradients_of(target, tuple(target.parameters)).of(batch)
    for row in range(2):
        one = batch[row : row + 1][None]
        wanted = FedSGD().update(target.in_double, one).tensors
        for name, gradients in made.items():
            mine, tensor = gradients.take(torch.tensor([row])), wanted[name][0]
            size = float(mine.summands()) ** 2 + 1e-30
            assert float(mine.along(tensor)) == pytest.approx(
                float(tensor.square().sum()), abs=1e-12 * size
            )
            assert float(mine.products(mine)) == pytest.approx(
                float(tensor.square().sum()), abs=1e-12 * size
            )
            assert float(mine.pair_up(mine)) == pytest.approx(
                float(mine.products(mine)), abs=1e-12 * size
            )


@pytest.mark.parametrize("architecture", ["Bert", "GPT2", "Llama"])
def test_errors_of_output_gradients_lie_in_the_span_of_the_inputs(
    random_target: Callable[..., Target], observe: Observe, architecture: str
) -> None:
    target, texts = random_target(architecture), (A, "my dog was bad !")
    seen = observe(target, texts, (0, 1))
    guess = tuple(encode(target, *texts))
    columns = make_contributions(seen, guess, compute_gradients(seen, guess))
    whole, spans = columns.compute_floors(), columns.compute_span_floors()
    assert bool((spans <= whole).all())
    linear = [name for name in columns.names if isinstance(columns.gradients[name], OuterSums)]
    assert linear
    for name in linear:
        rows = matrix_of(target, target.part(name), seen.update.tensors[name])[0].double()
        basis = orthonormalise(columns.gradients[name].inputs.flatten(0, 1).mT)
        outside = float((rows - (rows @ basis) @ basis.mT).norm())
        assert outside <= float(spans[columns.names.index(name)])


def test_a_tied_table_is_the_sum_of_what_is_read_and_predicted() -> None:
    target = TinyCausal(shape="gpt2").open(torch.device("cpu"))
    (name,) = target.groups["word_embedding"]
    batch = target.batch_of(encode(target, A, "the cat is the red cat ."), None)
    made = gradients_of(target, (name,)).of(batch)[name]
    assert isinstance(made, Tied)
    rows = [
        FedSGD().update(target.in_double, batch[row : row + 1][None]).tensors[name].flatten()
        for row in range(2)
    ]
    slow = torch.stack(rows)
    torch.testing.assert_close(made.products(made), slow @ slow.mT)
    turned = made.take(torch.tensor([1, 0]))
    torch.testing.assert_close(made.pair_up(turned), (slow @ slow.mT)[[0, 1], [1, 0]])
    torch.testing.assert_close(made.products(turned), (slow @ slow.mT)[:, [1, 0]])


@pytest.mark.parametrize(
    "protocol", [FedAvg(learning_rate=1.0), FedAvg(learning_rate=5e-5)], ids=["1.0", "5e-5"]
)
def test_one_local_step_of_plain_sgd_is_certified_through_its_rounding(
    tiny: Target, observe: Observe, protocol: FedAvg
) -> None:
    seen = observe(tiny, (A,), (1,), protocol=protocol)
    assert certify(seen, encode(tiny, A)).proven
    assert not certify(seen, encode(tiny, "the cat is bad .")).proven


def test_several_local_steps_noise_signs_and_dropout_are_never_certified(
    tiny: Target, observe: Observe
) -> None:
    steps = observe(tiny, (A,), (1,), protocol=FedAvg(learning_rate=1.0, steps=2))
    dropped = observe(tiny, (A,), (1,), protocol=FedSGD(dropout=True))
    noisy, signs = (
        observe(tiny, (A,), (1,), defenses=(one,)) for one in (GaussianNoise(1e-9), Sign())
    )
    for seen in (steps, dropped, noisy, signs):
        told = certify(seen, encode(tiny, A))
        assert not told.proven and told.note


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_a_channel_rounds_off_is_part_of_the_floor(
    tiny: Target, observe: Observe, dtype: Any
) -> None:
    seen = observe(tiny, (A, C), (1, 0), defenses=(Rounding(dtype),))
    assert certify(seen, encode(tiny, A, C)).proven
    assert not certify(seen, encode(tiny, A, "she sold our car soon")).proven


def test_a_batch_whose_size_is_not_known_is_not_certified(tiny: Target, observe: Observe) -> None:
    told = certify(observe(tiny, (A, B), (1, 0)).limit_to(()), encode(tiny, A, B))
    assert not told.proven and "batch size" in told.note
    assert sorted(told.sentences) == sorted(encode(tiny, A, B))


def test_a_guess_of_too_many_sentences_is_cut_down_to_those_that_were_there(
    tiny: Target, observe: Observe
) -> None:
    told = certify(observe(tiny, (A, B), (1, 0)), encode(tiny, A, B, C))
    assert told.proven and sorted(told.sentences) == sorted(encode(tiny, A, B))


@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-5])
def test_words_with_nearly_one_embedding_are_not_told_apart_where_their_rows_are_hidden(
    random_model: Callable[..., Any], observe: Observe, apart: float
) -> None:
    model, tokenizer = random_model("Bert"), tiny_tokenizer()
    dog, cat = tokenizer.convert_tokens_to_ids(["dog", "cat"])
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[dog] = table[cat] * (1 + apart)
    target = TextClassifier("twins", model, tokenizer)
    for text in ("he saw the dog", "he saw the cat"):
        told = certify(observe(target, (text,), (1,), view=Lamp()), encode(target, text))
        assert not told.proven and "one of at least 2" in told.note
    assert certify(
        observe(target, ("he saw the car",), (1,), view=Lamp()), encode(target, "he saw the car")
    ).proven


def test_the_last_word_of_a_text_is_not_proven_where_another_is_predicted_alike(
    observe: Observe,
) -> None:
    text, view = "she sold my red car", PartsView("1")
    plain, alike = (TinyCausal(shape="llama").open(torch.device("cpu")) for _ in range(2))
    (right,) = encode(plain, text)
    other = next(
        word for word in plain.vocabulary.allowed.nonzero()[:, 0].tolist() if word not in right
    )
    output: Any = alike.module.get_output_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        output.weight[other] = output.weight[right[-1]]
    assert certify(observe(plain, (text,), view=view), [right]).proven
    told = certify(observe(alike, (text,), view=view), [right])
    assert not told.proven and "one of at least 2" in told.note


def test_a_place_that_does_not_matter_is_not_proven(
    random_model: Callable[..., Any], observe: Observe
) -> None:
    """Where a word's embedding and position are lost on the way in, any word would do."""
    model = random_model("Bert")
    with torch.no_grad():
        # Tokens no longer see each other: only [CLS] reaches the loss
        for layer in model.bert.encoder.layer:
            layer.attention.output.dense.weight.zero_()
    target = TextClassifier("deaf", model, tiny_tokenizer())
    seen = observe(target, (A,), (1,), view=PartsView("2", ("query", "ffn_in")))
    assert not certify(seen, encode(target, A)).proven


def test_counts_are_found_for_every_way_to_label_copies(tiny: Target, observe: Observe) -> None:
    sentences = tuple(encode(tiny, A, B))
    for labels in list_labellings(3, 2):
        chosen = [label for label, number in enumerate(labels) for _ in range(number)]
        seen = observe(tiny, (A, A, A, B), (*chosen, 1))
        columns = make_contributions(seen, sentences, compute_gradients(seen, sentences))
        best = Counting(columns, 4, scaled=False).find_counts()[0]
        assert best.totals == (3, 1) and best.numbers[0] == labels
        assert columns.measure_misfit(best.shares()) <= 1


def test_the_truth_is_far_below_its_floor_and_one_word_far_above(
    tiny: Target, observe: Observe
) -> None:
    seen = observe(tiny, (A, B), (1, 0))
    assert certify(seen, encode(tiny, A, B)).misfit < 0.5
    assert certify(seen, encode(tiny, "the cat is bad .", B)).misfit > 100


def test_a_guess_keeps_what_stands_against_its_certificate(tiny: Target, observe: Observe) -> None:
    guess = Reconstruction(tuple(encode(tiny, "the cat is bad .")))
    (told,) = with_certificates([observe(tiny, (A,), (1,))], [guess], bench_for(tiny))
    assert not told.certified and told.sentences == guess.sentences
    assert told.note == "The update does not follow from the guess."


def test_an_unknown_word_does_not_stop_a_certificate(tiny: Target, observe: Observe) -> None:
    text = "the xylophone is red ."
    seen = observe(tiny, (text, A), (1, 0))
    assert certify(seen, encode(tiny, text, A)).proven


def test_guesses_certified_together_are_certified_as_each_alone(
    tiny: Target, observe: Observe
) -> None:
    seen = [observe(tiny, texts, [1] * len(texts)) for texts in ((A,), (A, B), (C, C, B), (B,))]
    guesses = [encode(tiny, *texts) for texts in ((A,), (A, C), (C, B), (B,))]
    together = certify_all(seen, guesses)
    assert [one.proven for one in together] == [True, False, True, True]
    for one, observation, guess in zip(together, seen, guesses, strict=True):
        alone = certify(observation, guess)
        assert (alone.proven, alone.sentences, alone.labels, alone.note) == (
            one.proven,
            one.sentences,
            one.labels,
            one.note,
        )


@pytest.mark.parametrize("view", [Everything(), Lamp()], ids=["embeddings", "no_embeddings"])
def test_a_word_that_stands_once_and_has_a_gradient_of_its_own_is_not_changed(
    tiny: Target, observe: Observe, view: View
) -> None:
    seen, sentences = observe(tiny, (A, B), (1, 0), view=view), tuple(encode(tiny, A, B))
    columns = make_contributions(seen, sentences, compute_gradients(seen, sentences))
    near = Neighbourhood(columns, Counting(columns, 2, scaled=False).find_counts()[0])
    # "is" and "." stand twice
    once = set(encode(tiny, "the cat red my phone number five")[0][1:-1])
    assert near._find_bound_words() == (once if isinstance(view, Everything) else set())
    if isinstance(view, Everything):
        words = {
            sentences[change.places[0]][token]
            for change in near._list_neighbours()
            for token in _changed(change, sentences)
        }
        assert words.isdisjoint(once)
    assert near.count_others() == 0


def _changed(change: Neighbour, sentences: Sequence[tuple[int, ...]]) -> list[int]:
    """Where a change of one word is; nowhere for an exchange of two."""
    if len(change.places) > 1 or Counter(change.sentences[0]) == Counter(
        sentences[change.places[0]]
    ):
        return []
    pairs = zip(change.sentences[0], sentences[change.places[0]], strict=True)
    return [token for token, (new, old) in enumerate(pairs) if new != old]


@dataclass(frozen=True)
class Late(Bench):
    """A bench whose time is up at the third look."""

    looks: list[None] = field(default_factory=list)

    @property
    def out_of_time(self) -> bool:
        self.looks.append(None)
        return len(self.looks) > 2


def test_a_certificate_that_runs_out_of_time_says_so(tiny: Target, observe: Observe) -> None:
    # So that other words have to be tried
    seen, guess = observe(tiny, (A,), (1,), view=PartsView(layers="2")), encode(tiny, A)
    late = Late(Streams.root("attacker", 0), FrequentWords().open(tiny))
    (found,) = certify_all([seen], [guess], late)
    assert (found.proven, found.note) == (
        False,
        "There was no time to hold the guess against the update.",
    )
    assert len(late.looks) == 3 and certify(seen, guess).proven


def test_minilm_is_certified_and_one_word_away_is_not(minilm: Target, observe: Observe) -> None:
    text, other = (
        "the patient in room seven is allergic to penicillin.",
        "the patient in room eight is allergic to penicillin.",
    )
    for view in (Lamp(), PartsView("3", ("query",))):
        seen = observe(minilm, (text,), (1,), view=view)
        assert certify(seen, encode(minilm, text)).proven
        assert not certify(seen, encode(minilm, other)).proven


def test_a_narrow_model_full_of_tokens_is_not_certified_beyond_doubt(observe: Observe) -> None:
    """With as many tokens as directions every word fits the first layer: the sieve says so
    instead of passing all."""
    narrow = Tiny(layers=2, hidden=16).open(torch.device("cpu"))
    texts = (A, B, C, "he paid our doctor ?")
    told = certify(observe(narrow, texts, (0, 1, 0, 1), view=Lamp()), encode(narrow, *texts))
    assert told.proven or "Too many words fit" in told.note
