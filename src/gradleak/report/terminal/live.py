"""The live view of a running audit: a bar with the time left, and the guesses as they change."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradleak.report.numbers import write_duration
from gradleak.report.shown_guesses import make_printable

POLLS_PER_SECOND = 4
SENTENCES = 6  # lines of guesses on screen
BAR = 30  # columns


class Blackboard(Protocol):
    """What an attack writes and this reads; nothing leads from it to the display."""

    done: int
    total: int
    loss: float | None
    guesses: tuple[str, ...]


class TerminalDisplay:
    """Watches an audit on a console.

    Where that is no terminal it says single lines only, and nothing at all if `quiet`.
    """

    def __init__(self, console: Console, *, quiet: bool = False, show_guesses: bool = True) -> None:
        self.console, self.quiet, self.show_guesses = console, quiet, show_guesses

    def say(self, sentence: str) -> None:
        """Says one line of news."""
        if not self.quiet:
            self.console.print(Text(make_printable(sentence), style="dim"))

    @contextmanager
    def watch(self, title: str, progress: Blackboard) -> Iterator[None]:
        """Follows a blackboard while the block runs; the view is gone afterwards."""
        if self.quiet or not self.console.is_terminal:
            yield
            return
        view = LiveView(title, progress, self.show_guesses)
        # Live's own thread asks for the view: the attack is not called from here and calls nobody
        with Live(
            get_renderable=view.draw,
            console=self.console,
            refresh_per_second=POLLS_PER_SECOND,
            transient=True,
        ):
            yield


class LiveView:
    """One blackboard, drawn as often as asked."""

    def __init__(self, title: str, progress: Blackboard, show_guesses: bool) -> None:
        self.title, self.progress, self.show_guesses = title, progress, show_guesses
        self.first: tuple[float, int] | None = (
            None  # when the first step was seen, and which it was
        )

    def draw(self) -> RenderableType:
        """Draws the bar, and below it the sentences of the current guess."""
        done, total = self.progress.done, self.progress.total
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=total or None, completed=done, width=BAR, pulse=not total)
        head.add_row(Text(self.title), bar, Text(self._status(done, total), style="dim"))
        sentences = self.progress.guesses[:SENTENCES] if self.show_guesses else ()
        return Group(
            head,
            *(
                Text("  " + make_printable(one), no_wrap=True, overflow="ellipsis")
                for one in sentences
            ),
        )

    def _status(self, done: int, total: int) -> str:
        if not total:
            return "preparing"
        loss = self.progress.loss
        objective = f", objective {loss:.4g}" if loss is not None and math.isfinite(loss) else ""
        return f"{done}/{total}{objective}{self._time_left(done, total)}"

    def _time_left(self, done: int, total: int) -> str:
        now = time.monotonic()
        if (
            self.first is None or done < self.first[1]
        ):  # an attack may count several searches one after the other
            self.first = (now, done)
        began, before = self.first
        if done <= before:
            return ""
        return f", {write_duration((now - began) * (total - done) / (done - before))} left"
