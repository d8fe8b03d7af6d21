"""Who watches an audit. Attacks never see this side: they write on a blackboard that watchers read."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradleak.core.attack import Progress


class Display:
    """A watcher that shows nothing; the terminal's one is in gradleak.report."""

    def say(self, sentence: str) -> None:
        """One line of news."""

    @contextmanager
    def watch(self, title: str, progress: Progress) -> Iterator[None]:
        """Follows a blackboard while the block runs."""
        yield
