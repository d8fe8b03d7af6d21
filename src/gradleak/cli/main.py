"""The `gradleak` command: its parts, its exit codes, and errors as sentences.

A terminal that cannot show every letter is given the nearest ASCII instead of a crash.
"""

import codecs
import io
import re
import shutil
import sys
import textwrap
import traceback
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import click
import typer

from gradleak import __version__
from gradleak.cli import (
    audit,
    bound,
    capture,
    check,
    check_component,
    compare,
    components,
    doctor,
    federated,
    finetune,
    gate,
    prior,
    purge,
    report,
    run,
    score,
    show,
    status,
    tables,
    tradeoff,
    tune,
)
from gradleak.cli import map as maps
from gradleak.cli.command import Command, PlainGroup
from gradleak.core.errors import GradleakError
from gradleak.records.files import RecordError

BAD_INPUT, RUN_FAILED, INTERRUPTED = 2, 3, 130
# What ASCII has instead of a letter or a sign that is no accented letter
NEAREST = {
    **dict(zip("·–—−─━│×•✓✗", "------|x*+x", strict=True)),
    **{"…": "...", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "±": "+-", "≈": "~"},
    **{"√": "sqrt", "∞": "inf", "‘": "'", "’": "'", "“": '"', "”": '"', "„": '"'},
    **{"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l"},
    **{"α": "alpha", "β": "beta", "δ": "delta", "ε": "epsilon", "σ": "sigma", "Σ": "sum", "∂": "d"},
}
EPILOG = """\b
Exit codes:
  0    done
  2    bad input: nothing was run
  3    the run failed, or some cells of a study did
  4    the gate is shut: a bound is passed, a cell missing, or flags forbid it
  130  interrupted: the same command goes on from what was finished
"""

# Plain help: typer's rich one takes twice as long and cuts lines when piped
app = typer.Typer(
    cls=PlainGroup, rich_markup_mode=None, pretty_exceptions_enable=False, epilog=EPILOG
)
COMMANDS: dict[str, Callable[..., None]] = {  # in the order of the help
    "audit": audit.audit,
    "check": check.check,
    "run": run.run,
    "status": status.status,
    "tune": tune.tune,
    "map": maps.leak_map,
    "tradeoff": tradeoff.tradeoff,
    "finetune": finetune.finetune,
    "show": show.show,
    "report": report.report,
    "compare": compare.compare,
    "score": score.score,
    "bound": bound.bound,
    "tables": tables.tables,
    "publish": tables.publish,
    "purge": purge.purge,
    "gate": gate.gate,
    "list": components.list_components,
    "check-component": check_component.check_component,
    "doctor": doctor.doctor,
}
GROUPS = {
    "prior": prior.prior_app,
    "capture": capture.capture_app,
    "federated": federated.federated_app,
}
# Those whose help lists the exit codes
TELL_CODES = ("audit", "check", "run", "tune", "map", "tradeoff", "gate")
for name, function in COMMANDS.items():
    app.command(name, cls=Command, epilog=EPILOG if name in TELL_CODES else None)(function)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def print_version(wanted: bool) -> None:
    """`gradleak 0.1.0`, then nothing more."""
    if wanted:
        typer.echo(f"gradleak {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def gradleak(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors; may stand anywhere.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugin", help="A Python file with components of your own; may stand anywhere."
        ),
    ] = None,
) -> None:
    """Measures how much private training data can be rebuilt from federated-learning updates."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    fall_back(words)
    try:
        code = typer.main.get_command(app).main(
            take_plugins([word for word in words if word != "--debug"]),
            prog_name="gradleak",
            standalone_mode=False,
        )
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except Exception as error:  # whatever it is, a person reads a sentence
        if debug:
            traceback.print_exc()
        return explain(error)
    if code == INTERRUPTED:
        say_error("Interrupted.")
    return int(code or 0)


def take_plugins(words: Sequence[str]) -> list[str]:
    """Returns the words without `--plugin FILE`, wherever it stands, and loads the files."""
    left, files = list[str](), list[str]()
    following = iter(words)
    for word in following:
        name, equals, value = word.partition("=")
        if name == "--plugin":
            files.append(value if equals else next(following, ""))
        else:
            left.append(word)
    if files:
        from gradleak.core.plugins import name_plugins

        name_plugins(files)
    return left


def explain(error: Exception) -> int:
    """Says what went wrong in one sentence and returns the exit code."""
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "gradleak"
        # Click and typer both suggest
        said = re.sub(r"(Did you mean [^?]+\?)( \1)+", r"\1", error.format_message())
        say_error(f"{said}{'' if said.endswith(('.', '?')) else '.'} See {command} --help.")
    elif isinstance(error, (GradleakError, RecordError, click.ClickException)):
        say_error(str(error))
    else:
        reason = " ".join(str(error).split()) or "no message"
        say_error(
            f"The run failed with {type(error).__name__}: {reason.rstrip('.')}. Add --debug for the"
            " traceback."
        )
        return RUN_FAILED
    return error.exit_code if isinstance(error, (GradleakError, RecordError)) else BAD_INPUT


def say_error(sentence: str) -> None:
    """On standard error, so that standard output holds results only. A terminal's lines are
    broken between words; elsewhere they stay whole, so that they can be searched for."""
    lines = f"Error: {sentence}".split("\n")
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in break_line(line, width)]
    # Not click's echo, which writes UTF-8 on terminals that read ASCII
    print("\n".join(lines), file=sys.stderr)


def break_line(line: str, width: int) -> list[str]:
    """Breaks a line between words; the lines under it are indented by two more than it is. A path
    stays whole, so that it can be copied."""
    margin = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


def fall_back(words: Sequence[str]) -> None:
    """Lets both streams write what their encoding has no letter for: as the nearest ASCII, or in
    JSON as `\\u00e9`."""
    codecs.register_error("gradleak.nearest", write_nearest)
    codecs.register_error("gradleak.escaped", write_escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().replace(
            "-", ""
        ).startswith("utf"):
            is_json = "--json" in words and stream is sys.stdout
            stream.reconfigure(errors="gradleak.escaped" if is_json else "gradleak.nearest")


def write_nearest(error: UnicodeError) -> tuple[str, int]:
    """For `str.encode`: letters without their accents, signs as above, a question mark for the
    rest."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(nearest, error.object[error.start : error.end])), error.end


def write_escaped(error: UnicodeError) -> tuple[str, int]:
    """For `str.encode`: as JSON writes letters that must not stand in it, which reads back as
    the same text."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return (
        "".join(
            f"\\u{units[place]:02x}{units[place + 1]:02x}" for place in range(0, len(units), 2)
        ),
        error.end,
    )


def nearest(letter: str) -> str:
    """The nearest that ASCII has."""
    if letter in NEAREST:
        return NEAREST[letter]
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"
