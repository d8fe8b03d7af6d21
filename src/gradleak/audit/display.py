"""Who watches an audit. Attacks never see this side: they write on a blackboard that watchers
read."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from gradleak.core.attack import Progress


@runtime_checkable
class Display(Protocol):
    """A watcher; the terminal's one is in gradleak.report, which may not import this."""

    def say(self, sentence: str) -> None:
        """One line of news."""

    def watch(self, title: str, progress: Progress) -> AbstractContextManager[None]:
        """Follows a blackboard while the block runs."""


class Silent:
    """A watcher that shows nothing."""

    def say(self, sentence: str) -> None:
        """Nobody hears."""

    @contextmanager
    def watch(self, title: str, progress: Progress) -> Iterator[None]:
        """Nobody looks."""
        yield
