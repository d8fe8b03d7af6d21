"""The worst case over attacks is held against as many blind guesses as there are attacks."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradleak.attacks.blind import Blind, draw_beside
from gradleak.attacks.recipes.baselines import Dlg, Tag
from gradleak.audit import AuditSpec, run_audit
from gradleak.cli import main
from gradleak.core.attack import Attack, Bench
from gradleak.core.observation import Observation
from gradleak.core.prior import pick, prior_of_texts
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.datasets.made_up import Shapes
from gradleak.priors.english import FrequentWords
from gradleak.priors.picture_priors import Grey, MeanPicture, load_generator
from gradleak.records.schema import AttackRecord, Record, Score
from gradleak.records.settings import settings_of, worst_score, worst_values
from gradleak.records.statistics import gain_of
from gradleak.records.store import (
    Column,
    Columns,
    columns_of,
    read_record,
    read_summaries,
    record_paths,
)
from gradleak.report.verdict import write_worst_case
from gradleak.targets.image_networks import TinyImage
from gradleak.training.picture_models import GeneratorTraining, stack_pictures, train_generator

TAG = Tag()
TWO = ["tag:steps=3", "dlg:steps=3"]
Observe = Callable[..., Observation]


def audited(**changes: Any) -> Record:
    plain = {"target": "tiny", "limit": 6, "attacks": TWO} | changes
    return run_audit(AuditSpec.from_plain(plain)).record


def beside(observations: Sequence[Observation], seed: int = 0, attack: Attack = TAG) -> list[Any]:
    prior = FrequentWords().open(observations[0].target)
    bench = Bench(Streams.root("attacker", seed), prior)
    return [one.sentences for one in draw_beside(attack, observations, bench)]


# What a draw is


def test_a_draw_depends_on_seed_attack_and_observation_and_not_on_the_update(
    tiny: Target, observe: Observe
) -> None:
    seen = [observe(tiny, ("the cat is red .",)), observe(tiny, ("my dog was bad !",))]
    assert not torch.equal(*(next(iter(one.update.tensors.values())) for one in seen))
    first, other = (beside([one]) for one in seen)
    assert first == other
    assert beside(seen[:1]) == first
    longer = observe(tiny, ("my phone number is five and the cat is very red .",))
    again = observe(tiny, ("my phone number is five and the cat is very red .",), index=1)
    others = [beside([longer], seed=1), beside([longer], attack=Dlg()), beside([again])]
    assert all(one != beside([longer]) for one in others)


def test_a_draw_is_the_same_whoever_shares_the_batch(tiny: Target, observe: Observe) -> None:
    texts = [("the cat is red .",), ("my dog", "she left my car"), ("he paid our doctor ?",)]
    seen = [observe(tiny, one, index=index) for index, one in enumerate(texts)]
    together = beside(seen)
    assert together == [beside([one])[0] for one in seen]
    lengths = [tuple(map(len, one)) for one in together]
    assert lengths == [one.knows.lengths for one in seen]


def test_the_draw_of_an_attack_is_not_the_blind_guess(tiny: Target, observe: Observe) -> None:
    seen = observe(tiny, ("my phone number is five and the cat is very red .",))
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(tiny))
    (guess,) = Blind().reconstruct([seen], bench)
    assert beside([seen]) != [guess.sentences]


def test_words_are_drawn_by_their_weights_whatever_the_last_bits() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0])
    shares = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    drawn = pick(weights.expand(len(shares), -1), shares)
    found = torch.bincount(drawn, minlength=5) / len(shares)
    torch.testing.assert_close(found, weights / 8, rtol=0, atol=0.02)
    assert found[0] == found[3] == 0
    off = weights * (1 + 1e-6 * torch.randn(5, generator=torch.Generator().manual_seed(1)))
    assert float((pick(off.expand(len(shares), -1), shares) != drawn).float().mean()) < 1e-3
    assert pick(weights[None], torch.tensor([1 - 2**-24])).tolist() == [4]
    assert pick(weights[None], torch.zeros(1)).tolist() == [1]


def test_a_generator_draws_other_pictures_a_mean_public_ones_and_grey_is_grey(
    tmp_path: Path,
) -> None:
    target = TinyImage().open(torch.device("cpu"), torch.float32)
    path = tmp_path / "generator.safetensors"
    public = Shapes("public", 8).load(32)
    settings = GeneratorTraining(latents=4, width=4, epochs=1)
    list(train_generator(settings, stack_pictures(public), path, torch.device("cpu")))
    priors = [
        load_generator(path),
        MeanPicture("shapes:part=public,side=8", 32).open(target),
        Grey().open(target),
    ]
    drawn = [[one.draw(Streams.root("test", seed)) for seed in (0, 0, 1, 2)] for one in priors]
    for prior, pictures in zip(priors, drawn, strict=True):
        assert all(picture.shape == prior.likely().shape for picture in pictures)
        assert all(bool(((picture >= 0) & (picture <= 1)).all()) for picture in pictures)
        assert torch.equal(pictures[0], pictures[1])
    assert not torch.equal(drawn[0][0], drawn[0][2])
    known = stack_pictures(public)
    assert all(bool((known == picture).flatten(1).all(1).any()) for picture in drawn[1])
    assert len({picture.numpy().tobytes() for picture in drawn[1]}) > 1
    assert all(torch.equal(picture, priors[2].likely()) for picture in drawn[2])
    with pytest.raises(TypeError, match="of pictures"):
        prior_of_texts(priors[0])


# What a worst case is held against


def tried(ours: Column, blind: Column, draw: Column | None, name: str = "tag") -> Any:
    columns = {"rouge1": ours}, {"rouge1": blind}
    draws = {} if draw is None else {"rouge1": draw}
    attack = AttackRecord({"name": name}, {}, (), ())
    return attack, Columns(tuple(range(len(ours))), *columns, draws=draws)


@pytest.mark.parametrize("seed", range(20))
def test_more_draws_are_never_worse_than_fewer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blind = rng.random(30).tolist()
    attacks = [tried(*(rng.random(30).tolist(), blind, rng.random(30).tolist())) for _ in range(5)]
    before = None
    for count in range(1, 6):
        _, chance = worst_values(attacks[:count], "rouge1", "higher")
        assert before is None or all(b >= a for a, b in zip(before, chance, strict=True))
        before = chance
    assert worst_values(attacks[:1], "rouge1", "higher")[1] == blind
    _, least = worst_values(attacks, "rouge1", "lower")
    assert all(b <= a for a, b in zip(blind, least, strict=True))


def test_attacks_that_guess_at_random_gain_nothing_however_many_there_are() -> None:
    """Against a single blind guess they would: the worst case is the best of twelve."""
    rng = np.random.default_rng(0)
    blind = rng.random(400).tolist()
    attacks = [tried(rng.random(400).tolist(), blind, rng.random(400).tolist()) for _ in range(12)]
    how = ("rouge1", list(range(400)), "fraction", "higher")
    fair = worst_score(attacks, *how)
    assert fair.blind_guesses == 12
    assert abs(gain_of(fair)) < 0.02
    unfair = worst_score([tried(c.values["rouge1"], blind, None) for _, c in attacks], *how)
    assert unfair.blind_guesses == 1
    assert gain_of(unfair) > 0.35


def test_the_blind_attack_is_none_of_them() -> None:
    blind = tried([0.9], [0.9], [0.95], "blind")
    attack, other = tried([0.2], [0.9], [0.5]), tried([0.3], [0.9], [0.99])
    assert worst_values([blind, attack], "rouge1", "higher") == ([0.2], [0.9])
    assert worst_values([blind, attack, other], "rouge1", "higher") == ([0.3], [0.99])
    assert worst_values([blind], "rouge1", "higher") == ([0.9], [0.9])


def test_attacks_that_are_told_different_things_bring_their_own_blind_guesses() -> None:
    attacks = [tried([0.1], [0.4], [0.2]), tried([0.1], [0.6], [0.3])]
    assert worst_values(attacks, "rouge1", "higher") == ([0.1], [0.6])
    assert worst_score(attacks, "rouge1", [0], "fraction", "higher").blind_guesses == 3


# In records


def test_with_one_attack_nothing_is_added() -> None:
    record = audited(attacks=TWO[:1])
    assert record.worst_case == record.attacks["tag"].scores
    assert all(one.blind_guesses == 1 for one in record.worst_case.values())


def test_with_two_attacks_the_better_of_two_guesses_stands_beside_the_worst_case() -> None:
    record = audited()
    alone = {
        name: audited(attacks=[line]).attacks[name]
        for name, line in zip(("tag", "dlg"), TWO, strict=True)
    }
    for name, attack in alone.items():
        assert record.attacks[name].scores == attack.scores
        assert record.attacks[name].examples == attack.examples
    tag, dlg = (record.attacks[name].examples for name in ("tag", "dlg"))
    assert [one.draw_values for one in tag] != [one.draw_values for one in dlg]
    assert all(one.draw_values.keys() == one.blind_values.keys() for one in (*tag, *dlg))
    for metric, score in record.worst_case.items():
        best = [
            max(a.blind_values[metric], b.draw_values[metric])
            for a, b in zip(tag, dlg, strict=True)
        ]
        assert score.blind == pytest.approx(sum(best) / len(best)), metric
        assert score.blind_guesses == 2
        assert score.blind >= record.attacks["tag"].scores[metric].blind
    assert "(best of 2)" in write_worst_case(record)


def test_records_of_one_client_that_are_judged_together_count_together(tmp_path: Path) -> None:
    both = run_audit(
        AuditSpec.from_plain({"target": "tiny", "limit": 6, "attacks": TWO}), out=tmp_path / "both"
    ).record
    for number, line in enumerate(TWO):
        run_audit(
            AuditSpec.from_plain({"target": "tiny", "limit": 6, "attacks": [line]}),
            out=tmp_path / "apart",
        )
        assert len(record_paths(tmp_path / "apart")) == number + 1
    (setting,) = settings_of(read_summaries(tmp_path / "apart"))
    for metric in setting.metrics():
        score, known = setting.worst(metric), both.worst_case[metric]
        assert score.blind_guesses == 2
        assert score.mean == pytest.approx(known.mean)


def test_scored_anew_the_worst_case_is_held_against_the_same_draws(tmp_path: Path) -> None:
    words = ["audit", "--target", "tiny", "--limit", "3", "--device", "cpu", "--batch-size", "2"]
    words += [word for line in TWO for word in ("--attack", line)]
    few, more = tmp_path / "few", tmp_path / "more"
    assert main([*words, "--metric", "rouge1", "--out", str(few)]) == 0
    metrics = ["--metric", "rouge1", "--metric", "rouge2"]
    assert main([*words, *metrics, "--out", str(more)]) == 0
    assert main(["score", str(few), "--device", "cpu", *metrics]) == 0
    scored, whole = (read_record(*record_paths(folder)) for folder in (few, more))
    # Metrics of words: a stored guess is cut into tokens again, not always as it was found.
    assert scored.worst_case == whole.worst_case
    assert all(score.blind_guesses == 2 for score in whole.worst_case.values())
    draws = [
        [one.draw_values for one in record.attacks["dlg"].examples] for record in (scored, whole)
    ]
    assert draws[0] == draws[1]


def test_a_record_without_draws_is_held_against_the_plain_blind_guesses() -> None:
    record = audited()
    plain = json.loads(json.dumps(record.to_json()))
    for attack in plain["attacks"].values():
        for example in attack["examples"]:
            del example["draw_values"]
    for score in plain["worst_case"].values():
        del score["blind_guesses"]
    without = Record.from_json(plain)
    tried_before = [(attack, columns_of(attack)) for attack in without.attacks.values()]
    for metric, score in without.worst_case.items():
        assert isinstance(score, Score) and score.blind_guesses == 1
        _, chance = worst_values(tried_before, metric, score.direction)
        assert chance == [one.blind_values[metric] for one in without.attacks["tag"].examples]


def test_pictures_are_held_against_draws_too() -> None:
    attacks = ["ig:steps=2", "ig:steps=3"]
    record = audited(target="tiny_image", data="shapes:side=8", attacks=attacks, limit=3)
    for metric, score in record.worst_case.items():
        assert score.blind_guesses == 2, metric
        first = record.attacks["ig:steps=2"].scores[metric]
        assert (score.blind - first.blind) * (1 if score.direction == "higher" else -1) >= 0
