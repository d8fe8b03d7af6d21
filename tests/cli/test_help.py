"""The help of every command, as it is printed."""

from collections.abc import Iterator

import click
import pytest
import typer

from gradleak.cli import main
from gradleak.cli.main import app


def commands(
    command: click.Command, *words: str
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group with the words that call it."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *words, name)


COMMANDS = dict(commands(typer.main.get_command(app)))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "gradleak")
def test_help_has_no_backslash_and_marks_what_is_required(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *words)
    assert "\\" not in text
    assert text.count("[required]") == sum(
        parameter.required for parameter in COMMANDS[words].params
    )


def test_the_help_of_ranges_arguments_and_inner_commands_reads_as_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Batches of examples to read. [all] [x>=1]" in printed(capsys, "finetune")
    assert "Positional arguments" not in printed(capsys, "report")
    assert "Arguments: RUN A record, or a folder of records. [required]" in printed(
        capsys, "report"
    )
    assert "OUT The packed file. [required]" in printed(capsys, "prior", "pack")


def test_at_eighty_columns_no_sentence_is_cut_and_no_line_is_longer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.partition("Commands:")[2] and max(map(len, text.splitlines())) <= 80
    group = COMMANDS[()]
    assert isinstance(group, click.Group)
    words = " ".join(text.split())
    for command in group.commands.values():
        first, _, _ = (command.help or "").partition("\n\n")
        assert " ".join(first.split()).partition(". ")[0].rstrip(".") in words
