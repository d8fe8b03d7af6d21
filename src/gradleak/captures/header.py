"""What a capture says of itself: where its tensors come from, and what an attacker may know."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gradleak.core.errors import GradleakError
from gradleak.records.files import RecordError
from gradleak.records.plain import from_plain, to_plain

FORMAT = "gradleak.capture/1"
METADATA = "__metadata__"  # in safetensors' header, beside the names of tensors
KINDS = ("gradients", "difference", "weights", "tensors")
PROTOCOLS = ("fedsgd", "fedavg")
LONGEST_NAME = 512  # letters of a tensor's name; those of models have at most about 120
LONGEST_TEXT = 1000  # letters of a text in the header
SHOWN = 60  # letters of a foreign name that a message quotes
# Brackets, braces and commas of a JSON text: 8 MiB of "[],[],…" would take 200 MB when read. A
# tensor has ten of them, counted with its name in the model's list
MOST_MARKS = 500_000
LIBRARIES = ("gradleak", "torch", "safetensors", "transformers")
HASH = re.compile(r"[0-9a-f]{64}")
MOST = 2**31  # above it a count, a label or a round is a mistake


class CaptureError(GradleakError):
    """A capture that cannot be written, found, read or matched with a model. The message is a
    whole sentence with the fix."""


@dataclass(frozen=True)
class ModelFacts:
    """The model that the update was computed on."""

    class_name: str
    config: dict[str, Any]
    # SHA-256 over sorted names, shapes and values of its weights before; "" if not known
    weights_hash: str
    names: tuple[str, ...]  # of its parameters, in its own order
    tokenizer_hash: str = ""  # SHA-256 over its words with their ids; "" if not known


@dataclass(frozen=True)
class ProtocolFacts:
    """How the update was computed; none where that is not known."""

    name: str  # "fedsgd" or "fedavg"
    learning_rate: float | None
    steps: int | None
    optimiser: str = "sgd"
    # What was sent is this many times the mean gradient: sums over accumulated batches are
    scale: float = 1.0
    # Where tokens have labels: what was sent is of a mean over "tokens", as transformers takes it
    # of a batch, or over "texts", as where batches of one text were accumulated
    loss_over: str = "tokens"


@dataclass(frozen=True)
class Granted:
    """What the user lets an attacker know of the private batch; none is not told."""

    batch_size: int | None = None
    lengths: tuple[int, ...] | None = None  # in tokens, of each example
    labels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CaptureHeader:
    """Everything of a capture but its tensors."""

    # "gradients", "difference" (weights after minus before), "weights" (as they are) or "tensors"
    kind: str
    model: ModelFacts
    protocol: ProtocolFacts
    granted: Granted = Granted()
    # As the user states them, in the command line's form: "clipping:clip=1"
    defenses: tuple[str, ...] = ()
    when: str = ""  # where in the loop it was taken, in words: "after backward()"
    round: int | None = None
    client: str = ""
    # What left the client beside the arrays: metrics, counts
    other_records: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""  # ISO 8601
    # What a framework that federates says of itself: its name, what it did, its own privacy budget
    platform: dict[str, Any] = field(default_factory=dict)


def write_header(header: CaptureHeader) -> str:
    """Returns the header as JSON, if a reader would take it."""
    try:
        text = json.dumps(to_plain(header), ensure_ascii=False, allow_nan=False)
    except RecordError as error:
        raise CaptureError(f"its header: {error}") from error
    except RecursionError as error:
        raise CaptureError(
            "its header is nested too deeply: keep config and other_records flat."
        ) from error
    read_header_text(text)
    return text


def read_header_text(text: str) -> CaptureHeader:
    """Returns the header that a JSON text holds; raises a CaptureError that names what is wrong,
    without saying where the text stood."""
    plain = load_json(text)
    try:
        # Written as a code, half a character passes as text until it is printed or written again
        json.dumps(plain, ensure_ascii=False).encode()
        header: CaptureHeader = from_plain(CaptureHeader, plain, "header")
    except RecordError as error:
        reason = str(error).partition(";")[0]
        raise CaptureError(reason[:1].lower() + reason[1:]) from error
    except UnicodeEncodeError as error:
        raise CaptureError("the header holds half a character (a lone surrogate)") from error
    except (OverflowError, RecursionError) as error:
        raise CaptureError("a value of the header is too large or nested too deeply") from error
    check_header(header)
    return header


def load_json(text: str) -> Any:
    """Reads JSON as strictly as a foreign file needs it: no name twice in one object, finite
    numbers, bounded depth and size."""
    if sum(map(text.count, "[{,")) > MOST_MARKS:
        raise CaptureError(f"its JSON holds more than {MOST_MARKS:,} values")
    try:
        return json.loads(
            text,
            object_pairs_hook=_refuse_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_read_finite,
        )
    except RecursionError as error:
        raise CaptureError("its JSON is nested too deeply") from error
    except ValueError as error:  # also of whole numbers with thousands of digits
        reason = str(error).partition(":")[0]
        raise CaptureError(f"its JSON cannot be read ({reason[:1].lower()}{reason[1:]})") from error


def check_header(header: CaptureHeader) -> None:
    """Refuses a header whose values cannot be."""
    for where, value, choices in (
        ("kind", header.kind, KINDS),
        ("protocol.name", header.protocol.name, PROTOCOLS),
        ("protocol.loss_over", header.protocol.loss_over, ("tokens", "texts")),
    ):
        if value not in choices:
            raise CaptureError(f"{where} must be one of {', '.join(choices)}, not {quote(value)}")
    texts = {
        "model.class_name": header.model.class_name,
        "protocol.optimiser": header.protocol.optimiser,
        "when": header.when,
        "client": header.client,
        **{f"defenses[{place}]": line for place, line in enumerate(header.defenses)},
        **{f"versions.{quote(name)}": version for name, version in header.versions.items()},
    }
    for where, value in texts.items():
        if len(value) > LONGEST_TEXT or not value.isprintable():
            raise CaptureError(
                f"{where} must be one line of at most {LONGEST_TEXT} letters without control"
                " characters"
            )
    hashes = {
        "model.weights_hash": header.model.weights_hash,
        "model.tokenizer_hash": header.model.tokenizer_hash,
    }
    for where, value in hashes.items():
        if value and not HASH.fullmatch(value):
            raise CaptureError(f"{where} must be the 64 hexadecimal digits of a SHA-256, or empty")
    check_names(header.model.names)
    if len(set(header.model.names)) < len(header.model.names):
        raise CaptureError("model.names holds a name twice")
    _check_numbers(header)
    if header.created:
        try:
            datetime.fromisoformat(header.created)
        except ValueError as error:
            raise CaptureError("created must be a date and time in ISO 8601") from error


def check_names(names: Iterable[str]) -> None:
    """Refuses tensor names that no model has and that a screen or a path may stumble over."""
    for name in names:
        if not name or len(name) > LONGEST_NAME:
            raise CaptureError(
                f"tensor names have 1 to {LONGEST_NAME} letters, and one has {len(name)}"
            )
        if not name.isprintable() or "/" in name or "\\" in name:
            raise CaptureError(
                f"the tensor name {quote(name)} holds a slash or a control character, which no"
                " model's names do"
            )
        if name == METADATA:
            raise CaptureError(f"{quote(name)} is safetensors' own name, and no tensor's")


def quote(text: str) -> str:
    """A foreign text for a message or a screen: in quotes, on one line, without control
    characters, not too long."""
    cut = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
    return f"“{write_printable(cut)}”"


def write_printable(text: str) -> str:
    """The text with everything that is not printable written as its code."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise CaptureError(f"it holds {quote(twice)} twice")
    return found


def _refuse_constant(constant: str) -> None:
    raise CaptureError(f"its JSON holds {constant}, which is no number")


def _read_finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise CaptureError("its JSON holds a number that is too large")
    return number


def _check_numbers(header: CaptureHeader) -> None:
    granted, protocol = header.granted, header.protocol
    lengths, labels = enumerate(granted.lengths or ()), enumerate(granted.labels or ())
    for where, value, least in (
        ("granted.batch_size", granted.batch_size, 1),
        ("protocol.steps", protocol.steps, 1),
        *((f"granted.lengths[{at}]", length, 1) for at, length in lengths),
        ("round", header.round, 0),
        *((f"granted.labels[{at}]", label, 0) for at, label in labels),
    ):
        if value is not None and not least <= value < MOST:
            raise CaptureError(f"{where} must be a whole number from {least}")
    for where, number in (
        ("protocol.learning_rate", protocol.learning_rate),
        ("protocol.scale", protocol.scale),
    ):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise CaptureError(f"{where} must be a number above 0")
    for of_what, values in (("lengths", granted.lengths), ("labels", granted.labels)):
        if None not in (values, granted.batch_size) and len(values or ()) != granted.batch_size:
            raise CaptureError(
                f"granted.{of_what} has {len(values or ())} values for a batch of"
                f" {granted.batch_size}"
            )


def complete(header: CaptureHeader) -> CaptureHeader:
    """The header with what its writer left open: when it was written, and by which libraries."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(
        header, created=header.created or now, versions=header.versions or find_versions()
    )


def find_versions() -> dict[str, str]:
    """Versions of what makes captures, as far as it is installed."""
    found: dict[str, str] = {}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


@contextmanager
def name_in_errors(subject: object, advice: str = "") -> Iterator[None]:
    """Says what an error is about. What needs another remedy than usual is a whole sentence, and
    says it itself."""
    try:
        yield
    except CaptureError as error:
        said = str(error)
        whole = said if said.endswith(".") else f"{said}.{advice}"
        raise CaptureError(f"{subject}: {whole}") from error
