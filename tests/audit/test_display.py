"""What an attack can reach through its progress: nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradleak.audit import AuditSpec, run_audit
from gradleak.core.attack import Display, Progress, Silent


class Watcher:
    """Keeps the blackboards it was asked to watch."""

    def __init__(self) -> None:
        self.boards: list[Progress] = []

    def say(self, sentence: str) -> None: ...

    @contextmanager
    def watch(self, title: str, progress: Progress) -> Iterator[None]:
        self.boards.append(progress)
        yield


def test_progress_never_references_the_display() -> None:
    watcher = Watcher()
    run_audit(
        AuditSpec.from_plain({"target": "tiny", "attacks": ["tag:steps=2"], "limit": 1}),
        display=watcher,
    )
    (board,) = watcher.boards
    assert type(board) is Progress
    assert set(vars(board)) == {"done", "total", "loss", "guesses", "phases", "tries"}
    assert board.done == board.total == 2
    counted = [value for phase in board.phases for value in vars(phase).values()]
    assert counted
    for value in (board.done, board.total, board.loss, board.tries, *board.guesses, *counted):
        assert value is None or type(value) in (int, float, str)


def test_both_watchers_are_displays() -> None:
    from gradleak.report.terminal.console import open_console
    from gradleak.report.terminal.live import TerminalDisplay

    assert isinstance(Silent(), Display)
    assert isinstance(TerminalDisplay(open_console()), Display)
