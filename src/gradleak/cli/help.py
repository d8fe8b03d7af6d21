"""Help as a person should read it, where typer's own goes wrong; and what is said when a command
is interrupted."""

import time
from typing import Any, get_type_hints

import click
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from gradleak.cli.interruption import interrupted


class PlainGroup(TyperGroup):
    """Commands listed with their whole first sentence, which click cuts at the line's end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        commands = [(name, self.get_command(ctx, name)) for name in names]
        rows = [
            (name, command.get_short_help_str(limit=1000))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class PlainHelp(TyperCommand):
    """A command whose help has `[required]` and `[x>=1]` without a backslash, and says what each
    argument is.

    Where rich is installed typer 0.20 escapes brackets for it, even in plain help.
    """

    def invoke(self, ctx: click.Context) -> Any:
        began = time.time()
        try:
            return TyperCommand.invoke(self, ctx)
        except KeyboardInterrupt as stop:
            raise interrupted(ctx.params.get("out"), began) from stop

    def get_help(self, ctx: click.Context) -> str:
        return TyperCommand.get_help(self, ctx).replace("\\[", "[")

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes nothing, since typer lists arguments with the options; gives them back the texts
        it is to list.

        click 8.5, which calls this first, has overwritten what typer 0.20 had set; an earlier one
        does neither.
        """
        declared = get_type_hints(self.callback, include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name is not None:
                notes = getattr(declared[parameter.name], "__metadata__", ())
                parameter.help = next(
                    (note.help for note in notes if isinstance(note, ArgumentInfo)), None
                )
