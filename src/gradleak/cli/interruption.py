"""What a command says when it is interrupted: that finished parts are kept, where there are any."""

from pathlib import Path

from gradleak.core.errors import GradleakError

# By the end of a path: records and trainings (named by hashes), parts of a call, fits and
# checkpoints of what learns.
KEPT = ("[0-9a-f]" * 16 + ".json", "parts/*/[0-9]*-*-*.*", "fits/*", "checkpoint.pt")
KEPT_SENTENCE = (
    "Interrupted. Finished parts are kept; run the same command again to go on from them."
)
LOST_SENTENCE = (
    "Interrupted before a part was finished: the same command begins where this one began."
)


class Interrupted(GradleakError):
    """An interruption by hand, and what is left of the work."""

    exit_code = 130


def interrupted(out: str | Path | None, began: float) -> Interrupted:
    """The error of a command that writes into `out`, if anywhere, and began at that time
    (time.time)."""
    if out is None:
        return Interrupted("Interrupted.")
    return Interrupted(KEPT_SENTENCE if has_kept(Path(out), began) else LOST_SENTENCE)


def has_kept(folder: Path, since: float) -> bool:
    """Whether anything that the same command would go on from was written there since then."""
    paths = (path for path in folder.rglob("*") if any(path.match(pattern) for pattern in KEPT))
    return any(
        path.is_file() and path.suffix != ".tmp" and path.stat().st_mtime >= since for path in paths
    )
