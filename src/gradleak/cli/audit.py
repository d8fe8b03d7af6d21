"""`gradleak audit`: one setting, attacked and scored."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gradleak.cli.command import (
    AllowPickle,
    BatchSize,
    Device,
    Know,
    Memory,
    Out,
    PriorName,
    PrivateData,
    Seed,
    open_display,
    open_terminal,
    option,
    print_json,
    resolve_device,
    resolve_memory,
)
from gradleak.core.errors import GradleakError

if TYPE_CHECKING:
    from gradleak.audit import AuditSpec
    from gradleak.core.attack import Display
    from gradleak.core.dataset import Dataset
    from gradleak.records.schema import Record


def audit(
    target: Annotated[
        str,
        option("Model under audit: a name, a hub id or a folder. [minilm]", "--target", "--model"),
    ] = "minilm",
    data: PrivateData = "canaries",
    limit: Annotated[int, option("Client batches to attack. [4]")] = 4,
    batch_size: BatchSize = 1,
    protocol: Annotated[str, option("How a batch becomes an update. [fedsgd]")] = "fedsgd",
    defense: Annotated[
        list[str] | None, option("What clients do to updates; repeat for a chain, in order. [none]")
    ] = None,
    attack: Annotated[
        list[str] | None,
        option("Who guesses; repeat for several. [portfolio: span, energy, LAMP in turn]"),
    ] = None,
    know: Know = None,
    view: Annotated[str | None, option("Which part of the update is seen. [everything]")] = None,
    layers: Annotated[
        str | None,
        option("See these layers only: all, 5, 3-6 or 1,4-6. Short for --view parts:layers=…"),
    ] = None,
    modules: Annotated[
        str | None,
        option(
            "See these modules only, with commas: query, key, value, attention_output, ffn_in,"
            " ffn_out, convolution, adapter_in, adapter_out, layernorm, bias, word_embedding,"
            " position_embedding, pooler, head, other. With --layers: of these layers."
        ),
    ] = None,
    prior: PriorName = "auto",
    metric: Annotated[
        list[str] | None, option("How guesses are scored; repeat for several. [ROUGE and others]")
    ] = None,
    device: Device = "auto",
    memory: Memory = None,
    draws: Annotated[
        int, option("Updates attacked of each batch, each with other randomness. [1]")
    ] = 1,
    seed: Seed = 0,
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
    capture: Annotated[
        list[Path] | None,
        option(
            "Attack updates that were captured, and no data: a file or a folder; repeat for"
            " several. The target is the model that they are of."
        ),
    ] = None,
    truth: Annotated[
        Path | None,
        option(
            "Beside --capture, the texts behind it, one a row, for a score and a record; of"
            " several captures as many texts each, in their order."
        ),
    ] = None,
    public: Annotated[
        str | None,
        option("What attacks that learn may learn from: a name or a file. [what the data offers]"),
    ] = None,
    out: Out = Path("runs"),
    again: Annotated[
        bool, option("Attack again though this very audit has a record already.", "--again")
    ] = False,
    bounds: Annotated[
        bool,
        option(
            "Compute what no attack could do, too: see gradleak bound, which adds it to any"
            " record.",
            "--bounds",
        ),
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
    allow_pickle: AllowPickle = False,
) -> None:
    """Attacks one setting and says how much was rebuilt.

    Components take their fields on one line: --attack tag:steps=500,learning_rate=0.1. `gradleak
    list attacks` names them. The same audit again is answered from its record, as long as data and
    model are the same.
    """
    settings = {
        "target": target,
        "data": drop_bad_rows(data) if skip_bad else data,
        "limit": limit,
        "batch_size": batch_size,
        "protocol": protocol,
        "defenses": defense,
        "attacks": attack,
        "know": know,
        "view": choose_view(view, layers, modules),
        "prior": prior,
        "metrics": metric,
        "draws": draws,
        "seed": seed,
        "dtype": dtype,
        "time_limit": time_limit,
        "public": public,
        "truncate": truncate,
    }
    if capture:
        from gradleak.cli.captured import audit_captures

        audit_captures(
            capture,
            settings,
            truth=truth,
            device=device,
            memory=memory,
            out=out,
            as_json=as_json,
            keep_secrets=keep_secrets,
            show=show,
            allow_pickle=allow_pickle,
        )
        return
    if truth is not None:
        raise GradleakError("--truth goes with --capture: name the captured update.")
    given = {field: value for field, value in settings.items() if value is not None and value != []}
    # Flags that contradict one another have been answered: what follows takes seconds to load
    from gradleak.audit import AuditSpec, run_audit

    spec = AuditSpec.from_plain(given, allow_pickle)
    if bounds:
        refuse_unbounded(spec)
    visible = show or spec.data.made_up
    display = open_display(quiet=as_json, show_guesses=visible)
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
    if bounds:
        record = bound_finished(record, place, display, out)
    if as_json:
        from gradleak.records.schema import without_texts

        print_json((record if show else without_texts(record)).to_json())
    else:
        print_finished(spec, record, out / f"{record.id}.json", visible)


def refuse_unbounded(spec: "AuditSpec") -> None:
    """Refuses a setting that has no bound before it is attacked."""
    from gradleak.matching.noisy_channel import read_channel

    if spec.target.medium != "text":
        raise GradleakError("--bounds are for texts, and this audit is of pictures.")
    read_channel(spec.defenses, spec.protocol, spec.batch_size)


def bound_finished(record: "Record", device: str, display: "Display", out: Path) -> "Record":
    """The record with what no attack could do, written where it lies."""
    from gradleak.cli.bound import add_bounds
    from gradleak.records.store import write_record

    if record.bounds is None:
        from gradleak.audit.bounding import WORDS

        record = add_bounds(record, None, WORDS, device, display)
        write_record(out, record)
    return record


def drop_bad_rows(data: str) -> "Dataset":
    """Opens the data without rows that cannot be used."""
    from gradleak.datasets import resolve_dataset

    return resolve_dataset(data).without_bad_rows()


def choose_view(
    view: str | None, layers: str | None, modules: str | None
) -> str | dict[str, Any] | None:
    """The view that the flags describe."""
    if layers is None and modules is None:
        return view
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


def answer(spec: "AuditSpec", out: Path, keep_secrets: bool) -> "Record | None":
    """The record that an earlier run of this audit left, of the same data and model; none
    without the secrets that are wanted."""
    from gradleak.audit import Inputs, find_record

    record = find_record(out, spec, Inputs(out))
    if record is None or (keep_secrets and any(secret.text is None for secret in record.secrets)):
        return None
    return record


def print_finished(spec: "AuditSpec", record: "Record", path: Path, visible: bool) -> None:
    """The record, with secrets beside guesses where they may be seen."""
    from gradleak.audit.client import private_examples
    from gradleak.audit.scoring import show_content
    from gradleak.report.terminal.record_screen import print_record

    examples = private_examples(spec) * spec.draws if visible else []
    secrets = {
        divmod(place, spec.batch_size): show_content(example.content)
        for place, example in enumerate(examples)
    }
    console = open_terminal()
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
