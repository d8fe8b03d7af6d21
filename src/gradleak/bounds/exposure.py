"""How far a secret with a form stands out: every secret of that form is tried in its place.

Carlini et al. (USENIX Security 2019) call log2 |forms| − log2 rank the exposure of a secret. Here
the rank is by the exact likelihood of what was seen, with all of the text but the secret given, so
that no attack finds a form with one of even chances more often in the mean (docs/bounds.md).
"""

import datetime
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradleak.bounds.oracle import TIE, Score
from gradleak.core.batch import Batch, Example
from gradleak.core.target import Target

FIRST_YEAR, LAST_YEAR = 1930, 2029
BEGINNINGS = "Al Bel Cor Dan El Far Gal Hel Il Jor Kal Lin Mar Nor Or Pel Quin Ros Sel Tor".split()
MIDDLES = "ba chi do fe gu la mo ni pe vu".split()
ENDINGS = (
    "bert da dric gan lia lin mond na ra ric rin sa son ta th va vin wen ya zo kar mer nel res tis"
).split()


@dataclass(frozen=True)
class Form:
    """A rule that says what a secret could have been, all alike likely."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Exposure:
    """How far the true one stands out among all that have its form."""

    form: str
    options: int  # that the text has the known number of tokens with
    dropped: int  # that it has another number with: known not to be it
    rank: int  # 1: nothing is likelier; ties are counted for the attacker
    posterior: float  # of the true one

    @property
    def bits(self) -> float:
        return math.log2(self.options) - math.log2(self.rank)


def find_form(secret: str) -> Form | None:
    """Returns the form of a secret; none of one that has none of these."""
    if re.fullmatch(r"[0-9]{2,4}", secret):
        size = len(secret)
        numbers = tuple(f"{number:0{size}}" for number in range(10**size))
        return Form(f"{size} digits", numbers)
    if re.fullmatch(r"555-01[0-9]{2}", secret):
        return Form("555-01xx", tuple(f"555-01{number:02}" for number in range(100)))
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", secret):
        days = _list_days()
        return Form("a day", days) if secret in days else None
    names = make_names()
    return Form("a made-up name", names) if secret in names else None


def _list_days() -> tuple[str, ...]:
    first, last = datetime.date(FIRST_YEAR, 1, 1), datetime.date(LAST_YEAR, 12, 31)
    count = (last - first).days + 1
    return tuple((first + datetime.timedelta(day)).isoformat() for day in range(count))


def make_names() -> tuple[str, ...]:
    """Returns 5,000 names of three syllables that belong to nobody, in a fixed order."""
    return tuple(map("".join, itertools.product(BEGINNINGS, MIDDLES, ENDINGS)))


@dataclass(frozen=True)
class Options:
    """All that a marked secret could have been, as sentences; the true one first."""

    form: str
    ids: Int[Tensor, "options tokens"]
    dropped: int


def list_options(
    target: Target,
    example: Example,
    batch: Batch,
    place: int,
    length: int,
    span: tuple[int, int],
    form: Form,
) -> Options | None:
    """Returns the sentence with each option in the place of the secret; none where the text the
    model reads does not hold it whole, or nothing else of its form has as many tokens.

    Two options that the tokenizer reads alike count as one.
    """
    assert batch.ids is not None
    before, after = example.text[: span[0]], example.text[span[1] :]
    rows = target.encode([f"{before}{option}{after}" for option in form.options])
    true = batch.ids[place, :length].tolist()
    if target.encode([example.text])[0] != true:
        return None  # it was cut
    fitting = {tuple(row) for row in rows if len(row) == length} - {tuple(true)}
    if not fitting:
        return None
    ids = batch.ids[place].repeat(len(fitting) + 1, 1)
    ids[1:, :length] = torch.tensor(sorted(fitting), device=ids.device)
    return Options(form.name, ids, sum(len(row) != length for row in rows))


def rank(options: Options, log_likelihood: Float[Tensor, "options"]) -> Exposure:
    """Returns how far the true one stands out."""
    found = log_likelihood.double()
    place = 1 + int((found[1:] > found[0] + TIE).sum())
    posterior = float(found.softmax(0)[0])
    return Exposure(options.form, len(found), options.dropped, place, posterior)


@torch.no_grad()
def expose(
    target: Target,
    example: Example,
    batch: Batch,
    place: int,
    length: int,
    span: tuple[int, int],
    form: Form,
    score: Score,
) -> Exposure | None:
    """Returns how far one marked secret stands out; none where nothing can be held against it."""
    options = list_options(target, example, batch, place, length, span, form)
    return None if options is None else rank(options, score(options.ids))


def list_forms(example: Example) -> Sequence[tuple[tuple[int, int], Form]]:
    """Returns the marked spans of an example that have a form."""
    found = ((span, find_form(example.text[span[0] : span[1]])) for span in example.secrets)
    return [(span, form) for span, form in found if form is not None]
