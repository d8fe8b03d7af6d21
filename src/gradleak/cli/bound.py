"""`gradleak bound`: what no attack could do, written into records of audits."""

from typing import TYPE_CHECKING, Annotated

from gradleak.cli.command import (
    Device,
    RecordPath,
    open_display,
    open_terminal,
    option,
    resolve_device,
)
from gradleak.core.errors import GradleakError

if TYPE_CHECKING:
    from gradleak.core.attack import Display
    from gradleak.core.batch import Example
    from gradleak.records.schema import Record

ALL = "all"


def bound(
    run: RecordPath,
    words: Annotated[
        str,
        option(
            "Words on each list of the oracle, the true one and the likeliest others, or all: the"
            " whole vocabulary. [150]"
        ),
    ] = "150",
    rounds: Annotated[
        int, option("Updates of the same batch that are seen while the model stands still. [1]")
    ] = 1,
    secrets: Annotated[
        bool,
        option(
            "Hold marked secrets with a form (up to 4 digits, a day, 555-01xx, a made-up name)"
            " against all others of that form: thousands of passes each.",
            "--secrets",
        ),
    ] = False,
    sweeps: Annotated[
        int,
        option(
            "Sweeps of a chain that starts at the truth, for a ceiling of searches that are not"
            " told the other words; takes --words all and many passes. [0]"
        ),
    ] = 0,
    device: Device = "auto",
) -> None:
    """Computes what no attack could do on each record's setting, and writes it into the record.

    For updates that were clipped and noised (dp_sgd, client_dp, gaussian_noise): an oracle that is
    told everything but one word, the information in an update, and what the noise guarantees.
    docs/bounds.md says what each rests on. Secrets are read again from the data, as score does.
    Records of other settings are named and left as they are.
    """
    from gradleak.records.store import read_record, record_paths, rewrite_record
    from gradleak.report.terminal.record_screen import print_bracket
    from gradleak.study.private_data import SecretFinder

    most = read_words(words)
    where, finder = resolve_device(device), SecretFinder(run, network=True)
    console, display = open_terminal(), open_display()
    paths, refused = record_paths(run), list[GradleakError]()
    for path in paths:
        record = read_record(path)
        try:
            examples = finder.require(record, path)
            bounded = add_bounds(record, examples, most, where, display, rounds, secrets, sweeps)
        except GradleakError as error:
            refused.append(error)
            console.print(f"{path.name}: {error}", soft_wrap=True)
            continue
        rewrite_record(path, bounded)
        console.print(f"{path.name}", style="bold", soft_wrap=True)
        print_bracket(console, bounded)
    if len(refused) == len(paths):
        raise GradleakError(f"No record got a bound. {refused[0]}")


def add_bounds(
    record: "Record",
    examples: "list[Example] | None",
    words: int | None,
    device: str,
    display: "Display",
    rounds: int = 1,
    secrets: bool = False,
    sweeps: int = 0,
) -> "Record":
    """Returns the record with what no attack could do on its setting."""
    from dataclasses import replace

    from gradleak.audit import bound_setting
    from gradleak.audit.rescoring import spec_of

    bounds = bound_setting(
        spec_of(record),
        examples=examples,
        words=words,
        rounds=rounds,
        device=device,
        secrets=secrets,
        sweeps=sweeps,
        display=display,
    )
    return replace(record, bounds=bounds)


def read_words(text: str) -> int | None:
    """A number of words; none for all."""
    if text == ALL:
        return None
    if not text.isdecimal() or int(text) < 2:
        raise GradleakError(f"--words is a number from 2 on, or all, not {text!r}.")
    return int(text)
