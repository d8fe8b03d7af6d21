"""Bounds as records: each number with what it is of, and what it rests on in sentences."""

from collections.abc import Sequence

from gradleak.bounds.ceiling import ceiling_of
from gradleak.bounds.exposure import Exposure
from gradleak.bounds.information import most_success, most_success_of_run
from gradleak.bounds.oracle import SentenceOdds
from gradleak.core.defense import Sampling
from gradleak.records.judgement import GUARANTEE, GUARANTEE_OF_RUN
from gradleak.records.schema import BoundRecord
from gradleak.records.statistics import interval

ORACLE = (
    "The attacker is told the labels, the lengths, the defense and every other word of the batch,"
    " and has unlimited time. For secrets drawn from the prior it is a theorem; on these texts it"
    " is an estimate. At the words' places: a guess that is aligned with the secrets afterwards has"
    " more chances."
)
GUARANTEED = (
    "Whatever the attacker: a theorem, for an event of the chance that stands beside it. That is"
    " the upper end of the 95 % interval of what the oracle gets right without the update. Nothing"
    " is subtracted for not knowing who takes part."
)
GUARANTEED_OF_RUN = (
    "Whatever the attacker, who sees all {steps:,} updates of the run and does not know in which of"
    " them the {protects} takes part: in each with a chance of {rate:.3g}, independently. A theorem"
    " for the event of the chance that stands beside it, by dp-accounting's trade-off curve."
)
COUNTED = (
    "Words that would have sent what cannot be told from what arrived, to a ten-thousandth of each"
    " tensor's largest entry, with all else given. Counted on these texts among the words of each"
    " list, the true one among them; no statement about other words."
)
CEILING = (
    "As the oracle, but not told the other words: the root of the share of words that a chain"
    " which starts at the truth still has. For secrets drawn from the prior it is a theorem; on"
    " these texts it is an estimate."
)
EXPOSURE = (
    "The attacker is told the form, the labels, the lengths, the defense and all of the text but"
    " the secret, which is one of {:,} or fewer, all alike likely. For secrets drawn so it is a"
    " theorem; on these it is an estimate."
)


def record_oracle(odds: Sequence[tuple[int, SentenceOdds]], prior: str) -> list[BoundRecord]:
    batches = [batch for batch, _ in odds]
    sentences = [one for _, one in odds]
    assumes = f"Prior: {prior}. {ORACLE}"

    def estimate(of: str, values: list[float], without: list[float], unit: str) -> BoundRecord:
        found = interval(values, batches)
        chance = sum(without) / len(without)
        return BoundRecord(
            *("oracle", of, found.mean, found.low, found.high, chance, unit, "estimate", found.n),
            assumes,
        )

    made = [
        estimate(
            "token_accuracy",
            [one.mean(lambda word: word.is_right) for one in sentences],
            [one.mean(lambda word: word.is_right_without) for one in sentences],
            "fraction",
        ),
        estimate(
            "exact_match",
            [float(one.is_right) for one in sentences],
            [float(one.is_right_without) for one in sentences],
            "fraction",
        ),
    ]
    if all(word.is_whole for one in sentences for word in one.words):
        made += [
            estimate(
                "largest_posterior",
                [one.mean(lambda word: word.largest) for one in sentences],
                [one.mean(lambda word: word.largest_prior) for one in sentences],
                "fraction",
            ),
            estimate(
                "bits_of_a_word",
                [one.mean(lambda word: word.bits) for one in sentences],
                [0.0] * len(sentences),
                "bits",
            ),
        ]
    return made


def record_chains(kept: Sequence[tuple[int, float]], prior: str) -> list[BoundRecord]:
    if not kept:
        return []
    found = interval([share for _, share in kept], [batch for batch, _ in kept])
    mean, low, high = (ceiling_of(share) for share in (found.mean, found.low, found.high))
    assumes = f"Prior: {prior}. {CEILING}"
    return [
        BoundRecord(
            *("ceiling", "token_accuracy", mean, low, high, None, "fraction", "estimate"),
            *(found.n, assumes),
        )
    ]


def record_exposure(exposed: Sequence[tuple[int, Exposure]]) -> list[BoundRecord]:
    """Returns, by form, how many bits the right secret stands out by, and how often it is first."""
    made = []
    for form in dict.fromkeys(one.form for _, one in exposed):
        some = [(batch, one) for batch, one in exposed if one.form == form]
        batches, most = [batch for batch, _ in some], max(one.options for _, one in some)
        bits = interval([one.bits for _, one in some], batches)
        first = interval([float(one.rank == 1) for _, one in some], batches)
        chance = sum(1 / one.options for _, one in some) / len(some)
        assumes = EXPOSURE.format(most)
        for of, found, without, unit in (
            (f"bits of {form}", bits, 0.0, "bits"),
            (f"{form} first", first, chance, "fraction"),
        ):
            ends = (found.mean, found.low, found.high)
            made.append(
                BoundRecord("exposure", of, *ends, without, unit, "estimate", found.n, assumes)
            )
    return made


def record_guarantees(
    odds: Sequence[tuple[int, SentenceOdds]], shift: float, run: Sampling | None, protects: str
) -> list[BoundRecord]:
    """Returns what the noise guarantees to what it protects: to one who is known to take part,
    and over a run, where a library for it is installed, to one who may."""
    batches = [batch for batch, _ in odds]
    chances = {
        "token_accuracy": [one.mean(lambda word: word.is_right_without) for _, one in odds],
        "exact_match": [float(one.is_right_without) for _, one in odds],
    }
    made = []
    for of, values in chances.items():
        chance = interval(values, batches)
        found: list[tuple[str, float | None, str]] = [
            (GUARANTEE, most_success(chance.high, shift), GUARANTEED)
        ]
        if run is not None:
            assumes = GUARANTEED_OF_RUN.format(steps=run.steps, rate=run.rate, protects=protects)
            found.append((GUARANTEE_OF_RUN, most_success_of_run(chance.high, run), assumes))
        made += [
            BoundRecord(
                *(bound, of, most, None, None, chance.high, "fraction", "theorem", chance.n),
                *(assumes, protects),
            )
            for bound, most, assumes in found
            if most is not None
        ]
    return made


def record_counts(counts: Sequence[tuple[int, int, int]]) -> BoundRecord:
    """Returns how many words fit in the mean; of each place its batch, the words that fit and
    those that were tried."""
    found = interval([float(fit) for _, fit, _ in counts], [batch for batch, _, _ in counts])
    tried = sum(tried for _, _, tried in counts) / len(counts)
    return BoundRecord(
        *("count", "words", found.mean, found.low, found.high, tried, "words", "count"),
        *(len(counts), COUNTED),
    )


def remark_on_counts(counts: Sequence[tuple[int, int, int]]) -> tuple[str, ...]:
    alone, most = sum(fit == 1 for _, fit, _ in counts), max(fit for _, fit, _ in counts)
    where = (
        "at every place"
        if alone == len(counts)
        else f"at {alone} of {len(counts)} places, and at most {most} words at the others"
    )
    return (
        f"One word alone fits {where}.",
        "No noise stands between, so that no share is given: nothing but the prior chooses among"
        " words that fit.",
    )


def remark_on_exposure(exposed: Sequence[tuple[int, Exposure]]) -> tuple[str, ...]:
    if not exposed:
        return ("No marked secret has a form whose members can be listed.",)
    dropped = sum(one.dropped for _, one in exposed)
    if not dropped:
        return ()
    total = sum(one.options + one.dropped for _, one in exposed)
    return (
        f"Of {total} secrets that were tried for {len(exposed)} marked ones, {dropped} give the"
        " text another number of tokens than is known and were left out.",
    )


def remark_on_noise(
    odds: Sequence[tuple[int, SentenceOdds]],
    words: int | None,
    is_clipped: bool,
    run: Sampling | None,
) -> tuple[str, ...]:
    """Returns what is not bounded, and why."""
    remarks = []
    if not is_clipped:
        remarks.append(
            "Nothing is clipped, so that no guarantee holds for every text: one with a larger"
            " gradient stands out more."
        )
    elif run is not None and most_success_of_run(0.5, run) is None:
        remarks.append(
            "The guarantee is for who knows that the example took part. One for who does not, by"
            " the sampling rate of the run, needs dp-accounting: pip install 'gradleak[dp]'."
        )
    if not all(word.is_whole for _, one in odds for word in one.words):
        remarks.append(
            f"The oracle chooses among {words} words at each place, the true one and the"
            " likeliest others: leaving words out makes it right more often, never less. How sure"
            " it is, and bits, are given for the whole vocabulary only."
        )
    return tuple(remarks)
