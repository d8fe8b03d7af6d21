"""The cells of a leak map: every layer whole and by module, each of them an audit of its own
with a view of that part alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradleak.audit.spec import AuditSpec, read
from gradleak.core.errors import GradleakError
from gradleak.core.metric import Metric
from gradleak.core.parts import MODULES, WITHOUT_LAYER, Part, numbered, read_layers
from gradleak.core.registry import did_you_mean
from gradleak.core.target import Target
from gradleak.metrics import DEFAULT_METRICS
from gradleak.report.pictures.heat_map import WHOLE, Absent
from gradleak.views import Parts

MAPPED = (WHOLE, "query", "key", "value", "attention_output", "ffn_in", "ffn_out")
IN_LAYERS = (WHOLE, *(module for module in MODULES if module not in WITHOUT_LAYER))


@dataclass(frozen=True, eq=False)
class MapCell:
    """One layer and module, with the audit that sees nothing else."""

    layer: int
    module: str
    spec: AuditSpec
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class MapPlan:
    """What is mapped: the attack and all else the cells share (`base`), and where."""

    base: AuditSpec
    layers: str
    modules: tuple[str, ...]
    metric: str  # the one that is drawn; all are kept

    def numbers(self, target: Target) -> tuple[int, ...]:
        """The layers of the map."""
        return tuple(sorted(numbered(self.layers, (*target.parts, *target.frozen_parts))))

    def cells(self, target: Target) -> tuple[list[MapCell], list[Absent]]:
        """The cells there are, layer by layer, and those the model lacks or does not train; none
        at all is an error."""
        cells, absent = [], []
        for layer in self.numbers(target):
            for module in self.modules:
                try:
                    cells.append(self._cell(target, layer, module))
                except GradleakError as error:
                    absent.append(Absent(layer, module, str(error)))
        if not cells:
            raise GradleakError(f"There is nothing to map. {absent[0].reason}")
        return cells, absent

    def _cell(self, target: Target, layer: int, module: str) -> MapCell:
        view = Parts(str(layer), () if module == WHOLE else (module,))
        seen = tuple(target.part(name) for name in view.visible(target))
        return MapCell(layer, module, replace(self.base, view=view), seen)


def plan_map(
    attack: str, layers: str, modules: Sequence[str], metric: str, settings: Mapping[str, Any]
) -> MapPlan:
    """A map from plain values; what is wrong with them is said before anything is opened."""
    chosen = tuple(dict.fromkeys(modules))
    check_mapped(chosen)
    read_layers(layers)
    judge = read("metric", metric, Metric)
    # The usual ones in any case: so a map drawn by another of them takes the records that are
    # there.
    metrics = [*DEFAULT_METRICS, *([] if judge.name in DEFAULT_METRICS else [judge])]
    base = AuditSpec.from_plain({**settings, "attacks": [attack], "metrics": metrics})
    return MapPlan(base, layers, chosen, judge.name)


def check_mapped(modules: Sequence[str]) -> None:
    """Refuses names that no column of a map can have."""
    if not modules:
        raise GradleakError(f"A map needs modules: write for example --modules {WHOLE},query,key.")
    for module in modules:
        if module in WITHOUT_LAYER:
            raise GradleakError(
                f"{module} lies in no layer, so it has no column in a map of layers; see it alone"
                f" with gradleak audit --modules {module}."
            )
        if module not in IN_LAYERS:
            near = did_you_mean(module, list(IN_LAYERS))
            raise GradleakError(
                f"Unknown module {module!r}{near} Modules of a layer: {', '.join(IN_LAYERS)}."
            )
