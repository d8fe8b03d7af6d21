"""The `gradleak` command: its parts, its exit codes, and errors as sentences."""

import re
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import click
import typer

from gradleak import __version__
from gradleak.cli.audit import audit
from gradleak.cli.capture import capture_app
from gradleak.cli.check import check
from gradleak.cli.compare import compare
from gradleak.cli.components import list_components
from gradleak.cli.doctor import doctor
from gradleak.cli.encoding import fall_back
from gradleak.cli.finetune import finetune
from gradleak.cli.gate import gate
from gradleak.cli.index import Command
from gradleak.cli.map import leak_map
from gradleak.cli.prior import prior_app
from gradleak.cli.publish import publish
from gradleak.cli.purge import purge
from gradleak.cli.report import report
from gradleak.cli.run import run
from gradleak.cli.score import score
from gradleak.cli.show import show
from gradleak.cli.status import status
from gradleak.cli.tables import tables
from gradleak.cli.tradeoff import tradeoff
from gradleak.cli.tune import tune
from gradleak.core.errors import GradleakError
from gradleak.records.errors import RecordError

BAD_INPUT, RUN_FAILED, INTERRUPTED = 2, 3, 130
EPILOG = """\b
Exit codes:
  0    done
  2    bad input: nothing was run
  3    the run failed, or some cells of a study did
  4    the gate is shut: a bound is passed, something is missing, or flags stand against it
  130  interrupted: the same command goes on from the parts that were finished, if any
"""

# Plain help: typer's rich one takes twice as long and cuts lines when piped
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=EPILOG)
command = partial(app.command, cls=Command)
command(epilog=EPILOG)(audit)
command(epilog=EPILOG)(check)
command(epilog=EPILOG)(run)
command()(status)
command(epilog=EPILOG)(tune)
command("map", epilog=EPILOG)(leak_map)
command(epilog=EPILOG)(tradeoff)
command()(finetune)
command()(show)
command()(report)
command()(compare)
command()(score)
command()(tables)
command()(publish)
command()(purge)
command(epilog=EPILOG)(gate)
command("list")(list_components)
command()(doctor)
app.add_typer(prior_app, name="prior")
app.add_typer(capture_app, name="capture")


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
            [word for word in words if word != "--debug"],
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


def explain(error: Exception) -> int:
    """Says what went wrong in one sentence and returns the exit code."""
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "gradleak"
        # Click and typer both suggest
        said = re.sub(r"(Did you mean [^?]+\?)( \1)+", r"\1", error.format_message())
        say_error(f"{said}{'' if said.endswith(('.', '?')) else '.'} See {command} --help.")
        return BAD_INPUT
    if isinstance(error, (GradleakError, RecordError)):
        say_error(str(error))
        return error.exit_code
    if isinstance(error, click.ClickException):
        say_error(str(error))
        return BAD_INPUT
    reason = " ".join(str(error).split()) or "no message"
    say_error(
        f"The run failed with {type(error).__name__}: {reason.rstrip('.')}. Add --debug for the"
        " traceback."
    )
    return RUN_FAILED


def say_error(sentence: str) -> None:
    """On standard error, so that standard output holds results only."""
    # Not click's echo, which writes UTF-8 on terminals that read ASCII
    print(f"Error: {sentence}", file=sys.stderr)
