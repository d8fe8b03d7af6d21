"""`gradleak audit`: one setting, attacked and scored."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.options import Device, Memory, Out, option

if TYPE_CHECKING:
    from gradleak.audit import AuditSpec
    from gradleak.core.dataset import Dataset
    from gradleak.records.schema import Record


def audit(
    target: Annotated[
        str, option("Model under audit: a name, a hub id or a folder. [minilm]")
    ] = "minilm",
    data: Annotated[str, option("Private examples: a name or a file. [canaries]")] = "canaries",
    limit: Annotated[int, option("Client batches to attack. [4]")] = 4,
    batch_size: Annotated[int, option("Examples in a client batch. [1]")] = 1,
    protocol: Annotated[str, option("How a batch becomes an update. [fedsgd]")] = "fedsgd",
    defense: Annotated[
        list[str] | None, option("What clients do to updates; repeat for a chain, in order. [none]")
    ] = None,
    attack: Annotated[
        list[str] | None,
        option("Who guesses; repeat for several. [portfolio: span, energy, LAMP in turn]"),
    ] = None,
    know: Annotated[
        list[str] | None,
        option(
            "What the attacker is told: labels, lengths, batch_size, defense, with commas or"
            " repeated; or none. [all]"
        ),
    ] = None,
    view: Annotated[str | None, option("Which part of the update is seen. [everything]")] = None,
    layers: Annotated[
        str | None,
        option("See these layers only: all, 5, 3-6 or 1,4-6. Short for --view parts:layers=…"),
    ] = None,
    modules: Annotated[
        str | None,
        option(
            "See these modules only, with commas: query, key, value, attention_output, ffn_in,"
            " ffn_out, convolution, layernorm, "
            "bias, word_embedding, position_embedding, pooler, head, other. With --layers: of these"
            " layers."
        ),
    ] = None,
    prior: Annotated[
        str, option("What the attacker believes of text beforehand. [auto: english where it fits]")
    ] = "auto",
    metric: Annotated[
        list[str] | None, option("How guesses are scored; repeat for several. [ROUGE and others]")
    ] = None,
    device: Device = "auto",
    memory: Memory = None,
    draws: Annotated[
        int, option("Updates attacked of each batch, each with other randomness. [1]")
    ] = 1,
    seed: Annotated[int, option("Of the random streams of both sides. [0]")] = 0,
    dtype: Annotated[str, option("float32 or float64. [float32]")] = "float32",
    time_limit: Annotated[
        float | None,
        option(
            "Seconds for each attack on each group of batches; the best guess so far then counts."
            " [none]"
        ),
    ] = None,
    truncate: Annotated[
        str,
        option(
            "on or off: cut texts longer than the model reads, as its tokenizer does, or refuse"
            " them. [on]"
        ),
    ] = "on",
    skip_bad: Annotated[
        bool,
        option(
            "Leave out rows of a file that cannot be used (empty, no label), and say which.",
            "--skip-bad",
        ),
    ] = False,
    public: Annotated[
        str | None,
        option("What attacks that learn may learn from: a name or a file. [what the data offers]"),
    ] = None,
    out: Out = Path("runs"),
    again: Annotated[
        bool, option("Attack again though this very audit has a record already.", "--again")
    ] = False,
    as_json: Annotated[
        bool, option("Print the record as JSON, guesses in it only with --show.", "--json")
    ] = False,
    keep_secrets: Annotated[
        bool, option("Store the private texts or pictures in the record.", "--keep-secrets")
    ] = False,
    show: Annotated[
        bool,
        option(
            "Show private data and guesses here, pictures as files; made-up ones always are.",
            "--show",
        ),
    ] = False,
    allow_pickle: Annotated[
        bool, option("Load pickled weights, which can run code.", "--allow-pickle")
    ] = False,
) -> None:
    """Attacks one setting and says how much was rebuilt.

    Components take their fields on one line: --attack tag:steps=500,learning_rate=0.1. `gradleak
    list attacks` names them. The same audit again is answered from its record, as long as data and
    model are the same.
    """
    settings = {
        "target": target,
        "data": usable(data) if skip_bad else data,
        "limit": limit,
        "batch_size": batch_size,
        "protocol": protocol,
        "defenses": defense,
        "attacks": attack,
        "know": know,
        "view": seen(view, layers, modules),
        "prior": prior,
        "metrics": metric,
        "draws": draws,
        "seed": seed,
        "dtype": dtype,
        "time_limit": time_limit,
        "public": public,
        "truncate": truncate,
    }
    run_and_print(settings, device, memory, out, as_json, keep_secrets, show, allow_pickle, again)


def usable(data: str) -> "Dataset":
    """The data without rows that cannot be used."""
    from gradleak.datasets import resolve_dataset

    return resolve_dataset(data).without_bad_rows()


def seen(view: str | None, layers: str | None, modules: str | None) -> str | dict[str, Any] | None:
    """The view that the flags describe."""
    if layers is None and modules is None:
        return view
    from gradleak.core.errors import GradleakError

    names = [word.strip() for word in (modules or "").split(",") if word.strip()]
    if view is not None:
        raise GradleakError(
            "--layers and --modules describe a view of their own: leave --view out, or leave them"
            " out."
        )
    if not layers and not names:
        raise GradleakError(
            "--layers and --modules name nothing: write for example --layers 3-6 --modules"
            " query,key."
        )
    return {"name": "parts", "layers": layers or "", "modules": names}


def run_and_print(
    settings: dict[str, Any],
    device: str,
    memory: str | None,
    out: Path,
    as_json: bool,
    keep_secrets: bool,
    show: bool,
    allow_pickle: bool,
    again: bool,
) -> None:
    """Runs the audit the flags describe, or shows its record; flags that were not given have the
    audit's own defaults."""
    from gradleak.audit import AuditSpec, run_audit
    from gradleak.cli.device import resolve_device, resolve_memory
    from gradleak.report.terminal.console import open_console
    from gradleak.report.terminal.live import TerminalDisplay

    given = {field: value for field, value in settings.items() if value is not None and value != []}
    spec = AuditSpec.from_plain(given, allow_pickle)
    visible = show or spec.data.made_up
    display = TerminalDisplay(open_console(to_stderr=True), quiet=as_json, show_guesses=visible)
    place, most = resolve_device(device), resolve_memory(memory)
    record = None if again else answer(spec, out, keep_secrets)
    if record is None:
        record = run_audit(
            spec, device=place, memory=most, out=out, keep_secrets=keep_secrets, display=display
        ).record
    else:
        display.say(
            f"Answered from its record of {record.created}: nothing was attacked. Add --again to"
            " attack again."
        )
    if as_json:
        from gradleak.records.withheld import without_texts

        printed = record if show else without_texts(record)
        typer.echo(json.dumps(printed.to_json(), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print_finished(spec, record, out / f"{record.id}.json", visible)


def answer(spec: "AuditSpec", out: Path, keep_secrets: bool) -> "Record | None":
    """The record that an earlier run of this audit left, of the same data and model; none
    without the secrets that are wanted."""
    from gradleak.audit.answered import Inputs, finished

    record = finished(out, spec, Inputs(out))
    if record is None or (keep_secrets and any(secret.text is None for secret in record.secrets)):
        return None
    return record


def print_finished(spec: "AuditSpec", record: "Record", path: Path, visible: bool) -> None:
    """The record, with secrets beside guesses where they may be seen."""
    from gradleak.audit.client import private_examples
    from gradleak.audit.picture_records import shown
    from gradleak.report.terminal.console import open_console
    from gradleak.report.terminal.record_screen import print_record

    examples = private_examples(spec) * spec.draws if visible else []
    secrets = {
        divmod(place, spec.batch_size): shown(example.content)
        for place, example in enumerate(examples)
    }
    console = open_console()
    print_record(console, record, secrets, guesses=visible)
    console.print(f"Record: {path}", soft_wrap=True)
    if visible:
        for picture in write_pictures(record, secrets, path):
            console.print(f"Pictures, secrets above guesses: {picture}", soft_wrap=True)


def write_pictures(
    record: "Record", secrets: Mapping[tuple[int, int], str], beside: Path
) -> list[Path]:
    """A picture file for each attack that guessed pictures, beside the record."""
    from gradleak.records.files import write_whole_bytes
    from gradleak.report.terminal.record_screen import draw_picture_grid, has_pictures

    written = []
    for place, attack in enumerate(record.attacks.values()):
        if has_pictures(attack):
            path = beside.with_name(f"{beside.stem}-{place + 1}-{attack.spec['name']}.png")
            write_whole_bytes(path, draw_picture_grid(attack, secrets))
            written.append(path)
    return written
