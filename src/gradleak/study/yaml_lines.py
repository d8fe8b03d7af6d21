"""Where in a YAML file a value stands, so that a problem can be pointed at."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml


class Lines:
    """Line numbers of the keys and items of a file, from 1."""

    def __init__(self, text: str) -> None:
        self.root: Any = yaml.compose(text, Loader=yaml.SafeLoader)

    def at(self, *path: str | int) -> int | None:
        """The line of a key or item; of the last on the way that can be found."""
        node, line = self.root, None
        for step in path:
            found = _inside(node, step)
            if found is None:
                break
            line, node = found
        return line

    def twice(self) -> Iterator[tuple[int, str]]:
        """Keys that stand twice in one mapping: YAML takes the last and says nothing."""
        yield from _twice(self.root)


def _inside(node: Any, step: str | int) -> tuple[int, Any] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):
            if key.value == str(step):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    return None


def _twice(node: Any) -> Iterator[tuple[int, str]]:
    if isinstance(node, yaml.MappingNode):
        counts = Counter(key.value for key, _ in node.value)
        for key, value in node.value:
            if counts[key.value] > 1:
                counts[key.value] = 0
                yield key.start_mark.line + 1, str(key.value)
            yield from _twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _twice(item)
