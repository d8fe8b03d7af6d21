"""The live display shows guesses on a terminal and nothing elsewhere."""

import io
import time
from dataclasses import dataclass

import pytest
from rich.console import Console

from gradleak.report.terminal.live import LiveView, TerminalDisplay


@dataclass
class Board:
    done: int = 0
    total: int = 0
    loss: float | None = None
    guesses: tuple[str, ...] = ()


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=80), file


def drawn(view: LiveView) -> str:
    screen, file = console(False)
    screen.print(view.draw())
    return file.getvalue()


def test_quiet_without_a_terminal() -> None:
    screen, file = console(False)
    with TerminalDisplay(screen).watch("tag", Board(1, 2, 0.5, ("my pin",))):
        time.sleep(0.3)
    assert file.getvalue() == ""


def test_says_plain_lines_without_a_terminal_and_none_if_quiet() -> None:
    screen, file = console(False)
    TerminalDisplay(screen, quiet=True).say("news")
    assert file.getvalue() == ""
    TerminalDisplay(screen).say("news [of] tag")
    assert file.getvalue() == "news [of] tag\n"


def test_guesses_change_on_a_terminal_as_the_blackboard_does() -> None:
    screen, file = console(True)
    board = Board(1, 10, 0.5, ("my first",))
    with TerminalDisplay(screen).watch("tag", board):
        board.guesses = ("my second",)
        time.sleep(0.6)
    assert "my second" in file.getvalue()


def test_the_view_is_taken_down_when_the_attack_fails() -> None:
    screen, file = console(True)
    with pytest.raises(RuntimeError), TerminalDisplay(screen).watch("tag", Board()):
        raise RuntimeError
    # The cursor is back
    assert file.getvalue().rstrip().endswith("\x1b[2K") or "\x1b[?25h" in file.getvalue()


def test_shows_steps_objective_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    board = Board(10, 100, 0.25)
    view = LiveView("tag", board, show_guesses=True)
    first = drawn(view).replace("\n", " ")
    board.done = 20
    second = drawn(view).replace("\n", " ")
    assert "10/100, objective 0.25" in first
    assert "left" not in first
    assert "1 min 20 s left" in second


def test_guesses_of_private_data_can_be_kept_off_the_screen() -> None:
    board = Board(1, 2, float("nan"), ("my pin",))
    assert "my pin" in drawn(LiveView("tag", board, show_guesses=True))
    assert "my pin" not in drawn(LiveView("tag", board, show_guesses=False))
