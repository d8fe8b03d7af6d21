"""`gradleak capture`: what an update that left a client holds."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.command import PlainHelp

if TYPE_CHECKING:
    from gradleak.captures import Capture, CaptureHeader

capture_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Reads captures: updates that left a client."
)
WIDTH, LABEL = 80, 16  # columns of the screen, and of what stands before a colon
MOST_LINES = 20  # of what left beside the arrays
NOT_TOLD = "not told"
KINDS = {
    "gradients": "gradients",
    "difference": "the difference of weights: after training minus before",
    "weights": "weights, as they were sent",
    "tensors": "named tensors of any meaning",
}
# Where a tensor lies, by its name alone: the first that matches. What is within a layer is looked
# up before, among the paths of linear layers that every opened model is read with.
OUTSIDE = r"\b(classifier|score|lm_head|embed_out|predictions|fc)\b"
PLACES = (
    (r"(?i)(norm|\bln_?\w*)\b.*\.?(weight|bias)$", "layernorm"),
    (r"\b(pooler)\b", "pooler"),
    (OUTSIDE, "head"),
    (r"(wpe|position_embeddings|embed_positions)\.weight$", "position_embedding"),
    (r"(c_attn|Wqkv|query_key_value)\.weight$", "query_key_value"),
    (r"\bconv\w*\.weight$", "convolution"),
    (r"bias$", "bias"),
)


@capture_app.callback()
def capture() -> None:
    """Reads captures: updates that left a client."""


@capture_app.command(cls=PlainHelp)
def show(
    path: Annotated[Path, typer.Argument(help="A capture, or a folder of captures.")],
) -> None:
    """Says what a capture holds and what an attacker would know, or lists the captures of a
    folder.

    Nothing is attacked. Names, counts and norms are shown, and what left the client beside the
    arrays; no entry of a tensor is.
    """
    from gradleak.captures import read_capture

    for line in list_folder(path) if path.is_dir() else describe(path, read_capture(path)):
        typer.echo(line)


def list_folder(folder: Path) -> Iterator[str]:
    """A line for each capture of a folder, by round and client."""
    from gradleak.captures import CaptureError, survey_folder

    found = survey_folder(folder)
    if not found.captures and not found.unreadable:
        raise CaptureError(
            f"{folder} holds no captures. Name a folder with files that end in .safetensors."
        )
    if found.captures:
        rows = [("round", "client", "kind", "file")] + [
            (
                "-" if header.round is None else str(header.round),
                cut(header.client or "-", 16),
                header.kind,
                clean(path.name),
            )
            for path, header in found.captures
        ]
        yield from align(rows)
    if found.unreadable:
        raise CaptureError("\n".join(f"{path}: {reason}" for path, reason in found.unreadable))


def describe(path: Path, capture: "Capture") -> Iterator[str]:
    """All that is known of a capture, in plain words."""
    from gradleak.captures import read_layout

    header = capture.header
    yield from wrap(f"{clean(str(path))} holds {KINDS[header.kind]}.", "")
    yield ""
    yield "What it holds"
    digits = header.model.weights_hash
    versions = (f"{name} {number}" for name, number in header.versions.items())
    facts = {
        "model": header.model.class_name,
        "weights": digits and f"SHA-256 {digits[:16]}…",
        "protocol": write_protocol(header),
        "taken": header.when,
        "round": "" if header.round is None else str(header.round),
        "client": header.client,
        "written": ", ".join(filter(None, [header.created, *versions])),
    }
    for label, fact in facts.items():
        yield from say(label, fact or NOT_TOLD)
    yield ""
    yield from describe_tensors(capture, read_layout(path).tied)
    yield ""
    if header.other_records:
        yield from describe_records("Beside the arrays", header.other_records)
    else:
        yield from wrap("Beside the arrays: this file speaks of nothing else.", "")
    yield ""
    if header.platform:
        yield from describe_records("What the platform says", header.platform)
        yield ""
    yield "What an attacker would know"
    yield from describe_knowledge(header)


def write_protocol(header: "CaptureHeader") -> str:
    """`fedavg, 4 steps of sgd, learning rate 0.1, 4 times the mean gradient`"""
    from gradleak.report.numbers import write_count

    protocol = header.protocol
    steps = "steps" if protocol.steps is None else write_count(protocol.steps, "step", "steps")
    told = f"{steps} of {protocol.optimiser}" + (" (how many: not told)" * (protocol.steps is None))
    rate = NOT_TOLD if protocol.learning_rate is None else f"{protocol.learning_rate:g}"
    scale = "" if protocol.scale == 1 else f", {protocol.scale:g} times the mean gradient was sent"
    return f"{protocol.name}, {told}, learning rate {rate}{scale}"


def describe_tensors(capture: "Capture", tied: Mapping[str, str]) -> Iterator[str]:
    """The tensors by layer and module, each with its share of the squared norm."""
    import torch

    squares = {
        name: float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
        for name, tensor in capture.tensors.items()
    }
    whole = sum(squares.values())
    entries = sum(tensor.numel() for tensor in capture.tensors.values())
    size = sum(tensor.numel() * tensor.element_size() for tensor in capture.tensors.values())
    of_model = len(capture.header.model.names)
    count = f"{len(capture.tensors)}" + (f" of the model's {of_model}" if of_model else "")
    yield from wrap(
        f"Tensors: {count}, {entries:,} numbers, {size / 1e6:,.2f} MB, norm {whole**0.5:.4g}", ""
    )
    groups: dict[tuple[int, str], list[str]] = {}
    for name, own in name_in_order(capture).items():
        groups.setdefault(find_place(own), []).append(name)
    rows = [("layer", "module", "tensors", "dtype", "share of norm²", "shapes")]
    for (layer, module), names in sorted(groups.items(), key=lambda group: group[0][0]):
        share = sum(squares[name] for name in names) / whole
        held = [capture.tensors[name] for name in names]
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in held)
        shapes = dict.fromkeys("×".join(map(str, tensor.shape)) or "1" for tensor in held)
        rows.append(
            (
                str(layer) if layer else "-",
                module,
                str(len(names)),
                ", ".join(dtypes),
                f"{100 * share:.2f} %",
                ", ".join(shapes),
            )
        )
    yield from align(rows)
    for name, stored in tied.items():
        yield from wrap(f"{clean(name)} is the same tensor as {clean(stored)}.")


def name_in_order(capture: "Capture") -> dict[str, str]:
    """The sent names in the model's order where that is known, and the model's name of each:
    lists without names have as many tensors as the model."""
    from gradleak.captures.tensor_names import strip_wrappers

    own = [strip_wrappers(name) for name in capture.header.model.names]
    sent = list(capture.tensors)
    if len(sent) == len(own) and all(name.isdecimal() for name in sent):
        return dict(zip(sorted(sent, key=int), own, strict=True))
    places = {name: place for place, name in enumerate(own)}
    stripped = {name: strip_wrappers(name) for name in sent}
    ordered = sorted(sent, key=lambda name: places.get(stripped[name], len(own)))
    return {name: stripped[name] for name in ordered}


def find_place(name: str) -> tuple[int, str]:
    """The layer, from 1, and the module that a tensor's name speaks of; layer 0 is outside of
    them."""
    from gradleak.captures.tensor_names import WORDS
    from gradleak.targets.weights import ROLES

    numbered = re.match(r"((?:.*?\.)?)(\d+)\.(.+)$", name)
    layer, within = 0, name
    if numbered and not re.search(OUTSIDE, numbered[1]):
        layer, within = int(numbered[2]) + 1, re.split(r"(?:^|\.)\d+\.", name)[-1]
    path, adapter, _ = re.sub(r"\.(weight|bias)$", "", within).partition(".lora_")
    note = " (LoRA)" if adapter else ""
    if path in ROLES and not within.endswith("bias"):
        return layer, ROLES[path] + note
    if any(name.endswith(end) for end in WORDS):
        return layer, "word_embedding"
    for pattern, module in PLACES:
        if re.search(pattern, within):
            return layer, module + note
    return layer, "other" + note


def describe_records(title: str, records: Mapping[str, Any]) -> Iterator[str]:
    """Nested records, a line each, under their title; of very many the first."""
    yield title
    lines = list(flatten(records))
    width = max(LABEL, *(min(len(clean(name)), 30) + 2 for name, _ in lines[:MOST_LINES]))
    for name, value in lines[:MOST_LINES]:
        yield from say(clean(name), clean(value), width)
    if len(lines) > MOST_LINES:
        yield f"  and {len(lines) - MOST_LINES} more"


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested records as lines of `metrics.loss` and a value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, cut(json.dumps(value, ensure_ascii=False), 200)


def describe_knowledge(header: "CaptureHeader") -> Iterator[str]:
    """What the capture lets an attacker know, beyond the update and the model."""
    granted = header.granted
    facts = {
        "batch size": granted.batch_size,
        "lengths": granted.lengths and ", ".join(map(str, granted.lengths)),
        "labels": granted.labels and ", ".join(map(str, granted.labels)),
    }
    for label, fact in facts.items():
        yield from say(label, NOT_TOLD if fact is None else str(fact))
    stated = " + ".join(header.defenses)
    yield from say("defenses", f"{stated} (as stated)" if stated else "none are stated")


def say(label: str, text: str, width: int = LABEL) -> Iterator[str]:
    """A line `label  text`, its text wrapped below itself."""
    if len(label) >= width:
        yield from wrap(f"{label}  {text}")
    else:
        yield from wrap(f"{label:<{width}}{text}", rest=" " * (width + 2))


def wrap(text: str, indent: str = "  ", rest: str | None = None) -> list[str]:
    """Lines that fit the screen, whatever long words are in them."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if rest is None else rest,
        break_on_hyphens=False,
    ) or [""]


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table whose last column is wrapped below itself."""
    *columns, _ = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    start = sum(widths) + 2 * len(widths) + 2
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row[:-1], widths, strict=True)]
        room = max(10, WIDTH - start)
        first, *more = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
        yield f"  {'  '.join(cells)}  {first}"
        yield from (" " * start + line for line in more)


def cut(text: str, most: int) -> str:
    """The text, or its beginning where it is too long for its place."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def clean(text: str) -> str:
    """A foreign text without what a terminal would act upon."""
    from gradleak.captures.header import write_printable

    return write_printable(text)
