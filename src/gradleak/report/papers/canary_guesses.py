"""Guesses as the search went on (LAMP's Table 6) and at its end: of the canaries alone, which are nobody's messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gradleak.records.schema import Record
from gradleak.report.page.gallery import spread
from gradleak.report.page.markdown import table
from gradleak.report.papers.answers import Answer, Answered

CELLS_WITH_STEPS = 4  # of a larger study only the last guess is shown
STEPS = 6
SECRETS = 3
Texts = Mapping[tuple[int, int], str]  # by batch and position


def guesses_markdown(answered: Sequence[Answered], texts_of: Callable[[Record], Texts]) -> Iterator[str]:
    """A table for each of the first secrets; nothing for data that is not our own."""
    shown = [(one, found) for one in answered for found in one.answers if is_canaries(found.record)]
    known = [found for _, found in shown if not found.source.is_published]  # published files hold no guesses
    if not known or len(known) < sum(len(one.answers) for one in answered):
        return
    steps = STEPS if len(shown) <= CELLS_WITH_STEPS else 1
    yield from ("## Guesses", "", "The data is made up for this purpose, so that guesses can be shown.", "")
    wholes = [(one, found, found.source.whole()) for one, found in shown]
    places = [(secret.batch, secret.position) for secret in wholes[0][2].secrets][:SECRETS]
    for number, place in enumerate(places, start=1):
        secret = next((text for _, _, whole in wholes if (text := texts_of(whole).get(place)) is not None), None)
        yield from (f"Secret {number}: {secret}" if secret is not None else f"Secret {number}: not at hand", "")
        rows = [
            [_title(one, found), step, guess]
            for one, found, whole in wholes
            for step, guess in _guesses(whole, found, place, steps)
        ]
        yield from table(["cell", "step", "guess"], rows)


def is_canaries(record: Record) -> bool:
    data = record.spec.get("data")
    return isinstance(data, Mapping) and data.get("name") == "canaries"


def _title(one: Answered, found: Answer) -> str:
    return ", ".join([*(value for axis, value in one.cell.axes.items() if axis != "attacks"), one.attack(found)])


def _guesses(whole: Record, found: Answer, place: tuple[int, int], steps: int) -> Iterator[tuple[str, str]]:
    """Some of the guesses on the way, and the answer. On the way a batch's are in no order: only single ones are shown."""
    attack = whole.attacks[found.key]
    if steps > 1:
        way = next(batch.guesses for batch in attack.batches if batch.batch == place[0])
        for step, sentences in spread([one for one in way if len(one[1]) == 1], steps):
            yield str(step), sentences[0]
    last = next(example.guess for example in attack.examples if (example.batch, example.position) == place)
    yield "answer", last or "–"
