"""`gradleak audit --capture`: what leaks from updates that somebody's clients really sent."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.cli.command import (
    open_display,
    open_terminal,
    print_json,
    resolve_device,
    resolve_memory,
)
from gradleak.core.errors import GradleakError
from gradleak.report.numbers import write_count

if TYPE_CHECKING:
    from gradleak.audit.own_guesses import RebuiltText, Reconstructions
    from gradleak.core.target import TargetSpec

# Options of an audit that a capture answers by itself, with what they are where nobody gave them
ANSWERED: dict[str, Any] = {
    "data": "canaries",
    "limit": 4,
    "batch_size": 1,
    "protocol": "fedsgd",
    "defenses": None,
    "know": None,
    "view": None,
    "metrics": None,
    "draws": 1,
    "dtype": "float32",
    "public": None,
    "truncate": "on",
}
TENSORS_SHOWN = 8  # of those that a guess explains least
WHOLE = 0.999  # of a tensor that is explained so far, nothing more is said


def audit_captures(
    captures: Sequence[Path],
    settings: Mapping[str, Any],
    *,
    truth: Path | None,
    device: str,
    memory: str | None,
    out: Path,
    as_json: bool,
    keep_secrets: bool,
    show: bool,
    allow_pickle: bool,
) -> None:
    """Attacks captured updates; with the truth beside them the result is a record."""
    _refuse_answered(settings)
    from gradleak.audit.own_guesses import reconstruct
    from gradleak.audit.own_score import refuse_unlike
    from gradleak.audit.own_update import observe_capture
    from gradleak.targets import resolve_target

    files = list(_list_files(captures))
    texts = None if truth is None else _read_truth(truth, len(files))
    spec = resolve_target(settings["target"], allow_pickle)
    place = resolve_device(device)
    open_display(quiet=as_json).say(f"Opening {settings['target']} on {place}")
    import torch

    target = spec.open(torch.device(place))
    observations = [observe_capture(file, target=target) for file in files]
    if texts is not None:
        refuse_unlike(observations)
    found = reconstruct(
        observations,
        attacks=settings["attacks"] or None,
        prior=settings["prior"],
        seed=settings["seed"],
        time_limit=settings["time_limit"],
        memory=resolve_memory(memory),
    )
    if texts is not None:
        _print_record(found, spec, texts, out, as_json, keep_secrets, show)
    elif as_json:
        print_json(_describe(found, files, show))
    else:
        _print_guesses(found, files, show)


def _refuse_answered(settings: Mapping[str, Any]) -> None:
    for name, usual in ANSWERED.items():
        if settings.get(name) not in (usual, [] if usual is None else usual):
            option = {"defenses": "defense", "metrics": "metric"}.get(name, name).replace("_", "-")
            raise GradleakError(
                f"--{option} does not go with --capture: the capture says what was sent, how and"
                " what is known of it (gradleak capture show FILE)."
            )


def _list_files(captures: Sequence[Path]) -> Iterator[Path]:
    """Yields the files that are named, and those of folders in the order of their index."""
    from gradleak.captures import index_folder

    for path in captures:
        files = [file for file, _ in index_folder(path)] if path.is_dir() else [path]
        if not files:
            raise GradleakError(f"There is no capture in the folder {path}.")
        yield from files


def _read_truth(path: Path, updates: int) -> list[list[tuple[str, Any]]]:
    """Returns texts with labels for each update; rows of several updates name theirs."""
    from gradleak.datasets import resolve_dataset

    rows = [(example.text, example.label) for example in resolve_dataset(str(path)).load()]
    if len(rows) % updates:
        raise GradleakError(
            f"{path} has {len(rows)} texts for {updates} captures, which is no whole number each:"
            " audit them one by one."
        )
    size = len(rows) // updates
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _print_record(
    found: "Reconstructions",
    spec: "TargetSpec",
    truth: list[list[tuple[str, Any]]],
    out: Path,
    as_json: bool,
    keep_secrets: bool,
    show: bool,
) -> None:
    from gradleak.audit.own_score import score
    from gradleak.records.schema import without_texts
    from gradleak.report.terminal.record_screen import print_record

    texts = [[text for text, _ in rows] for rows in truth]
    given = [[label for _, label in rows] for rows in truth]
    labels = given if all(label is not None for rows in given for label in rows) else None
    record = score(found, texts, labels=labels, out=out, keep_secrets=keep_secrets, target=spec)
    if as_json:
        return print_json((record if show else without_texts(record)).to_json())
    secrets = {
        (batch, place): text for batch, rows in enumerate(texts) for place, text in enumerate(rows)
    }
    console = open_terminal()
    print_record(console, record, secrets if show else {}, guesses=show)
    console.print(f"Record: {out / f'{record.id}.json'}", soft_wrap=True)


def _print_guesses(found: "Reconstructions", files: Sequence[Path], show: bool) -> None:
    """Says what was rebuilt, how sure that is and what it explains, where nobody gave the truth."""
    console = open_terminal()
    for update, file in enumerate(files):
        guesses = [guess for guess in found if guess.update == update]
        console.print(f"{file}", style="bold", soft_wrap=True)
        for line in found.list_findings(update):
            console.print(f"  {line}", soft_wrap=True)
        console.print(f"  {tell_rebuilt(guesses)}.", soft_wrap=True)
        for guess in guesses:
            text = guess.text if show else "withheld, since a good guess is private: add --show"
            adds = "" if guess.adds is None or len(guesses) == 1 else f" (adds {guess.adds:.1%})"
            console.print(f"  {guess.place + 1}. {text}{adds}", markup=False, soft_wrap=True)
        if guesses and guesses[0].explains is not None:
            subject = "It explains" if len(guesses) == 1 else "Together they explain"
            console.print(f"  {subject} {guesses[0].explains:.1%} of the update.")
        every = found.explains_by_tensor(update)
        least = sorted(every.items(), key=lambda one: one[1])
        missed = [(name, part) for name, part in least if part < WHOLE][:TENSORS_SHOWN]
        if missed:
            console.print(f"  Least is explained, of {len(every)} tensors, of")
        for name, part in missed:
            console.print(f"    {part:7.1%}  {name}", soft_wrap=True)
    console.print(
        "Without the truth (--truth texts.jsonl) there is no score: a guess that is proven, or that"
        " explains all, is what the client had; one that does not proves nothing."
    )


def tell_rebuilt(guesses: "Sequence[RebuiltText]") -> str:
    """Returns `2 texts rebuilt by span, 1 proven by the update`."""
    told = f"{write_count(len(guesses), 'text', 'texts')} rebuilt"
    if not guesses:
        return told
    proven = sum(guess.certified for guess in guesses)
    return f"{told} by {guesses[0].attack}, {proven} proven by the update"


def _describe(found: "Reconstructions", files: Sequence[Path], show: bool) -> dict[str, Any]:
    names = ("update", "place", "attack", "certified", "explains", "adds", *["text"] * show)
    return {
        "captures": [str(file) for file in files],
        "guesses": [{name: getattr(guess, name) for name in names} for guess in found],
        "explained_by_tensor": [
            dict(found.explains_by_tensor(update)) for update in range(len(files))
        ],
    }
