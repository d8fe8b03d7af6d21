"""Private contents of a run removed: guesses, texts and all that was made of them, and captures,
which they can be made of. Scores stay unless all is to go."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from gradleak.captures import holds_captures, is_capture, is_of_captures
from gradleak.core.errors import GradleakError
from gradleak.records.files import RecordError
from gradleak.records.run_folder import FAILED_SUFFIX, FILE, SCHEMA, claim
from gradleak.records.schema import texts_of, without_texts
from gradleak.records.store import (
    DETAILS,
    TRAININGS,
    is_record,
    read_summary,
    rewrite_record,
    rewrite_summary,
)
from gradleak.study.private_data import KEY

# Folders of a run whose contents are private: guesses, the key that texts could be tested by,
# weights learnt from the data.
FOLDERS = {"parts": "unfinished parts", "fits": "fits", "keys": "keys", "claims": "claims"}
CAPTURES = "captures"
# What reports say of themselves near their beginning; those of earlier versions have the title only
MARKS = (
    b'<meta name="generator" content="gradleak">',
    b"<title>gradleak: ",
    b"# What leaks: ",
    b'"schema": "gradleak.report/',
)
PDF_TITLES = (b"gradleak: ", "gradleak: ".encode("utf-16-be"))
PICTURE = re.compile(r"[0-9a-f]{16}-\d+-\w+\.png")
OF_DETAILS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.json")
HALF_WRITTEN = re.compile(r"\..+\.tmp")
# Files of a run that hold no text. They stay, and are read through for texts all the same.
WITHOUT_TEXT = (
    *(
        FILE,
        "pace.json",
        "map.json",
        "heat_map.svg",
        "tradeoff.json",
        "tradeoff.svg",
        "tuning.json",
        "published.xz",
    ),
    *("results.md", "results.csv", "examples.csv", "tables.md", "tables.csv", "tables.tex"),
)
Read = TypeVar("Read")
SHORTEST_TEXT = 8  # letters: a shorter guess may stand anywhere


@dataclass
class Purge:
    """What is in a run's folders, by what is to become of it."""

    remove: dict[str, list[Path]] = field(default_factory=dict)  # by what they are
    records: list[Path] = field(default_factory=list)  # rewritten without texts
    bare: list[Path] = field(default_factory=list)  # records that hold none
    keep: list[Path] = field(default_factory=list)  # ours, without texts
    foreign: list[Path] = field(default_factory=list)  # not ours: never touched

    def mark(self, kind: str, path: Path) -> None:
        """Notes a path to be removed."""
        self.remove.setdefault(kind, []).append(path)


def plan_purge(root: Path, *, everything: bool = False) -> Purge:
    """Looks through a run folder, a folder of captures or a folder of such folders, or at one
    capture; refuses any other, and one that a run is working in."""
    found = Purge()
    if is_capture(root):
        found.mark(CAPTURES, root)
        return found
    if not root.is_dir():
        raise GradleakError(
            f"{root} is not a folder. Name the folder that an audit or a study wrote its records"
            " into, or a capture."
        )
    is_ours = is_run(root) or not _has_foreign_files(root)
    below = next((one for one in sorted(root.iterdir()) if one.is_dir() and _is_private(one)), None)
    if not _is_private(root) and (below is None or not is_ours):
        hint = (
            f"It holds runs: name one of them, such as {below}."
            if below
            else "Name the --out of a run."
        )
        raise GradleakError(
            f"{root} is not a folder of a run, and nothing in it was touched. {hint}"
        )
    # Captures may lie beside anybody's files: what is in folders below is then not looked at
    for folder in _folders(root) if is_ours else [root]:
        _refuse_at_work(folder)
        _sort_folder(folder, found, everything)
    return found


def is_run(folder: Path) -> bool:
    """Whether an audit or a study wrote into this very folder."""
    return (
        any(map(is_record, folder.glob("*.json")))
        or (folder / KEY).is_file()
        or _is_study(folder / FILE)
    )


def _is_private(folder: Path) -> bool:
    return is_run(folder) or holds_captures(folder)


def purge(plan: Purge) -> list[Path]:
    """Does what was planned. Returns the files that still hold a text of these records: they are
    not ours to remove."""
    texts: set[str] = set()
    for path in plan.records:
        summary = read_summary(path)
        record = _if_readable(summary.whole)
        if record is None:  # its guesses were lost: only what the record itself says is left
            rewrite_summary(replace(summary, record=without_texts(summary.record)))
            continue
        texts |= {
            text.casefold() for text in texts_of(record) if len(text.strip()) >= SHORTEST_TEXT
        }
        rewrite_record(path, without_texts(record))
    # The keys go last: whoever is interrupted finds a folder that can be purged again.
    for kind in sorted(plan.remove, key=lambda kind: kind == FOLDERS["keys"]):
        for path in plan.remove[kind]:
            remove(path)
    for path in [path for path in plan.keep if _holds(path, texts)]:
        plan.keep.remove(path)
        plan.mark("files with guesses in them", path)
        remove(path)
    return [path for path in plan.foreign if _holds(path, texts)]


def remove(path: Path) -> None:
    """A file, a link or a whole folder; what is behind a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folders(root: Path) -> Iterator[Path]:
    """The folder and those below it that may be runs; never through a link."""
    yield root
    for below in sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()):
        if below.name not in (*FOLDERS, TRAININGS, DETAILS) or not is_run(root):
            yield from _folders(below)


def _sort_folder(folder: Path, found: Purge, everything: bool) -> None:
    if not is_run(folder):
        for path in filter(_is_file, sorted(folder.iterdir())):
            if is_of_captures(path):
                found.mark(CAPTURES, path)
            elif _is_report(path):
                found.mark("reports", path)
            else:
                found.foreign.append(path)
        return
    for name, kind in FOLDERS.items():
        if (folder / name).exists():
            found.mark(kind, folder / name)
    for path in sorted(folder.glob(f"{TRAININGS}/*")):
        if path.is_dir() or everything:
            found.mark("checkpoints" if path.is_dir() else "trainings", path)
        else:
            found.keep.append(path)
    for path in filter(_is_file, sorted(folder.iterdir())):
        removed_as = _kind(path)
        if removed_as is not None:
            found.mark(removed_as, path)
        elif is_record(path):
            continue  # sorted below, with what lies beside them
        elif path.name in WITHOUT_TEXT:
            found.mark("tables and plans", path) if everything else found.keep.append(path)
        else:
            found.foreign.append(path)
    _sort_records(folder, found, everything)


def _sort_records(folder: Path, found: Purge, everything: bool) -> None:
    """Sorts records and their details; what no record can be read with goes."""
    in_use = set[Path]()
    for path in filter(is_record, sorted(folder.iterdir())):
        summary = _if_readable(partial(read_summary, path))
        if everything:
            found.mark("records", path)
        elif summary is None:
            found.mark("records that cannot be read", path)
        else:
            record = _if_readable(summary.whole)
            in_use |= {summary.details_path} if record is not None else set()
            record = summary.record if record is None else record
            (found.bare if record == without_texts(record) else found.records).append(path)
    for path in sorted((folder / DETAILS).glob("*")):
        if not OF_DETAILS.fullmatch(path.name) and not HALF_WRITTEN.fullmatch(path.name):
            found.foreign.append(path)
        elif path not in in_use:
            found.mark("records" if everything else "guesses of no record", path)


def _if_readable(read: Callable[[], Read]) -> Read | None:
    """What a file of this version holds: of another nobody knows where its texts stand."""
    try:
        return read()
    except RecordError:
        return None


def _kind(path: Path) -> str | None:
    """What a file is that is removed whatever was asked for."""
    rules: Sequence[tuple[str, Callable[[Path], bool]]] = (
        ("failure files", lambda path: path.name.endswith(FAILED_SUFFIX)),
        (CAPTURES, is_of_captures),
        ("pictures", lambda path: PICTURE.fullmatch(path.name) is not None),
        ("half-written files", lambda path: HALF_WRITTEN.fullmatch(path.name) is not None),
        ("reports", _is_report),
    )
    return next((kind for kind, fits in rules if fits(path)), None)


def _is_report(path: Path) -> bool:
    """By what it says of itself, whatever it is called: a file that only has the name of one may
    be anybody's."""
    if (
        not path.is_file()
        or path.suffix not in (".html", ".md", ".json", ".pdf")
        or is_record(path)
    ):
        return False
    with path.open("rb") as file:
        start = file.read(4096)
    return any(mark in start for mark in MARKS) or (
        path.suffix == ".pdf" and any(title in path.read_bytes() for title in PDF_TITLES)
    )


def _is_file(path: Path) -> bool:
    return path.is_file() or path.is_symlink()


def _has_foreign_files(root: Path) -> bool:
    return any(
        _is_file(path)
        and not _is_report(path)
        and not is_of_captures(path)
        and path.name not in WITHOUT_TEXT
        for path in root.iterdir()
    )


def _refuse_at_work(folder: Path) -> None:
    for path in sorted(folder.glob("claims/*")) if is_run(folder) else ():
        with claim(folder, path.name) as free:
            if not free:
                raise GradleakError(
                    f"A run is working in {folder}. Wait until it ends, or end it; then purge."
                )


def _is_study(path: Path) -> bool:
    try:
        return (
            path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("schema") == SCHEMA
        )
    except (ValueError, AttributeError):
        return False


def _holds(path: Path, texts: set[str]) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    content = path.read_bytes().decode("utf-8", errors="ignore").casefold()
    return any(text in content for text in texts)
