"""Secrets above the guesses made of them."""

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from gradleak.records.png import PREFIX
from gradleak.records.schema import AttackRecord, BatchRecord, ExampleRecord, Record
from gradleak.report.numbers import number
from gradleak.report.shown_guesses import coloured, printable
from gradleak.report.terminal.picture_lines import picture_line

Secrets = Mapping[tuple[int, int], str]  # text by batch and position, of those that may be shown
SHOWN = 3  # the first ones, not the best: chosen examples would flatter the attack


def kept_secrets(record: Record) -> Secrets:
    """The private texts the record itself holds."""
    return {(secret.batch, secret.position): secret.text for secret in record.secrets if secret.text is not None}


def reconstructions(record: Record, attack: AttackRecord, secrets: Secrets, shown: int = SHOWN) -> Table:
    """The first examples and what the attack made of them."""
    hashes = {(secret.batch, secret.position): secret.hash for secret in record.secrets}
    table = _grid()
    for number_shown, example in enumerate(attack.examples[:shown], start=1):
        place = (example.batch, example.position)
        secret = secrets.get(place)
        hidden = Text(f"not kept (hash {hashes.get(place, '?')[:12]})", style="dim")
        table.add_row(f"{number_shown} secret", hidden if secret is None else _secret(secret))
        table.add_row("  guess", _guess(example, secret))
    return table


def trace(attack: AttackRecord, secrets: Secrets) -> Iterator[tuple[str, Table]]:
    """The guesses of every batch as the search went on."""
    for batch in attack.batches:
        table = _grid()
        for step, sentences in batch.guesses:
            for position, sentence in enumerate(sentences):
                label = f"step {step}" if position == 0 else ""
                table.add_row(label, _traced(sentence, batch, len(sentences), secrets))
        yield f"batch {batch.batch}{_losses(batch)}", table


def _secret(secret: str) -> Text:
    return Text("a picture", style="dim") if secret.startswith(PREFIX) else Text(printable(secret))


def _guess(example: ExampleRecord, secret: str | None) -> Text:
    if example.guess is None:
        return Text("not kept", style="dim")
    if example.guess.startswith(PREFIX):
        return picture_line(example)
    text = Text(printable(example.guess)) if secret is None else coloured(secret, example.guess)
    if example.values.get("rouge1") is not None:
        text.append(f"  (rouge1 {number(example.values['rouge1'], 'fraction')})", style="dim")
    if example.certified:
        text.append("  (proven by the update)", style="bold not dim")
    return text


def _traced(sentence: str, batch: BatchRecord, sentences: int, secrets: Secrets) -> Text:
    """Coloured where the batch has one example: on the way, guesses are not yet aligned to secrets."""
    secret = secrets.get((batch.batch, 0)) if sentences == 1 else None
    return Text(printable(sentence)) if secret is None else coloured(secret, sentence)


def _losses(batch: BatchRecord) -> str:
    if len(batch.losses) < 2:
        return ""
    (_, first), (step, last) = batch.losses[0], batch.losses[-1]
    return f": objective {number(first, 'objective')} at the start, {number(last, 'objective')} at step {step}"


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
