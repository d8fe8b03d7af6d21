"""Which parameters a target does not train: groups, modules or layers, by name."""

from collections.abc import Mapping, Sequence

from gradleak.core.errors import GradleakError
from gradleak.core.parts import MODULES, Part, select_parts

LAYERS = "layers:"  # `layers:1-3` among the names


def frozen_parameters(
    name: str, parts: Sequence[Part], groups: Mapping[str, tuple[str, ...]], frozen: Sequence[str]
) -> frozenset[str]:
    """Names of the parameters that `frozen` names; refuses what names nothing, half a matrix, or
    all there is."""
    chosen = {part for word in frozen for part in _named(name, parts, groups, word)}
    parameters = frozenset(part.parameter for part in chosen)
    for part in parts:
        if part.parameter in parameters and part not in chosen:
            raise GradleakError(
                f"{name} keeps query, key and value in one matrix, {part.parameter}, which trains"
                " as a whole or not at all: freeze all three, or a layer (layers:1)."
            )
    if len(parameters) == len({part.parameter for part in parts}):
        raise GradleakError(
            f"With {', '.join(frozen)} frozen nothing of {name} trains and no update is sent:"
            " freeze less."
        )
    return parameters


def _named(
    name: str, parts: Sequence[Part], groups: Mapping[str, tuple[str, ...]], word: str
) -> list[Part]:
    if word.startswith(LAYERS):
        return list(_layers(name, parts, word))
    if exact := [part for part in parts if part.parameter == word]:
        return exact
    if word not in groups and word not in MODULES:
        known = ", ".join(dict.fromkeys([*groups, *MODULES]))
        raise GradleakError(
            f"{name} has no group of parameters called {word!r} to freeze; groups are {known}, and"
            " layers as in layers:1-3."
        )
    found = (
        [part for part in parts if part.parameter in groups[word]]
        if word in groups
        else select_parts(parts, modules=[word])
    )
    if not found:
        raise GradleakError(f"{name} has no {word} to freeze.")
    return list(found)


def _layers(name: str, parts: Sequence[Part], word: str) -> Sequence[Part]:
    try:
        return select_parts(parts, layers=word.removeprefix(LAYERS).strip() or "?")
    except GradleakError as error:
        raise GradleakError(f"{name} cannot freeze {word!r}. {error}") from error
