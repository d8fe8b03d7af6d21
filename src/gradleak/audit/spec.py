"""What one audit is: every choice that can change its numbers, and nothing else."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from gradleak.core.attack import Attack, TrainableAttack, refuse_open_labels
from gradleak.core.dataset import Dataset
from gradleak.core.defense import Defense, refuse_wrong_order
from gradleak.core.errors import GradleakError, did_you_mean
from gradleak.core.metric import Metric
from gradleak.core.observation import Fact, View
from gradleak.core.plugins import load_plugins
from gradleak.core.prior import PicturePriorSpec, PriorSpec
from gradleak.core.protocol import Protocol
from gradleak.core.registry import Component, list_registered
from gradleak.core.specs import resolve, to_dict, to_string
from gradleak.core.target import TargetSpec
from gradleak.datasets import resolve_dataset
from gradleak.metrics import DEFAULT_METRICS, PICTURE_METRICS
from gradleak.records.schema import spec_id
from gradleak.targets import resolve_target

for _package in ("attacks", "defenses", "priors", "protocols", "views"):
    importlib.import_module(f"gradleak.{_package}")  # registers their components
load_plugins()  # and those of others

EVERY_FACT = tuple(Fact)
# The strongest there is: a weaker one would call a setting safer than it is
DEFAULT_ATTACKS = ("portfolio",)
DEFAULTS: dict[str, dict[str, Any]] = {  # of what depends on whether texts or pictures are attacked
    "text": {"data": "canaries", "attacks": DEFAULT_ATTACKS, "metrics": DEFAULT_METRICS},
    "image": {"data": "shapes", "attacks": ("ig",), "metrics": PICTURE_METRICS},
}
DTYPES = ("float32", "float64")
Kind = TypeVar("Kind", bound=Component)


@dataclass(frozen=True)
class AuditSpec:
    """One cell: who is attacked, with what, knowing what, and how it is scored."""

    target: TargetSpec
    data: Dataset
    attacks: tuple[Attack, ...]
    protocol: Protocol
    view: View
    prior: PriorSpec | PicturePriorSpec
    limit: int = 4  # client batches
    batch_size: int = 1
    defenses: tuple[Defense, ...] = ()
    know: tuple[Fact, ...] = EVERY_FACT
    metrics: tuple[Metric, ...] = field(
        default_factory=lambda: tuple(read("metric", name, Metric) for name in DEFAULT_METRICS)
    )
    draws: int = 1  # updates of each batch that are attacked, each with randomness of its own
    seed: int = 0
    dtype: str = "float32"
    # Seconds for each attack on each group of batches; the best guess so far then counts
    time_limit: float | None = None
    # What attacks that learn may learn from; none: what the data itself offers
    public: Dataset | None = None
    # Cut texts that are longer than the model reads, as its tokenizer does; else they are refused
    truncate: bool = True

    def __post_init__(self) -> None:
        lines = {to_string(attack) for attack in self.attacks}
        for holds, otherwise in (
            (
                min(self.limit, self.batch_size) >= 1,
                f"limit and batch_size count from 1; they are {self.limit} and {self.batch_size}.",
            ),
            (self.draws >= 1, f"draws count from 1; they are {self.draws}."),
            (self.attacks, "An audit needs at least one attack: add --attack portfolio."),
            (
                self.dtype in DTYPES,
                f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.",
            ),
            (len(lines) == len(self.attacks), "The same attack is listed twice."),
        ):
            if not holds:
                raise GradleakError(otherwise)
        self._refuse_other_media()
        refuse_wrong_order(self.defenses)
        self._refuse_per_example()
        self._refuse_missing_knowledge()

    def _refuse_other_media(self) -> None:
        medium = self.target.medium
        for part in (self.data, *self.attacks, self.prior, *self.metrics):
            if part.medium not in (medium, "any"):
                fitting = [
                    name
                    for name, other in list_registered(part.kind).items()
                    if other.medium in (medium, "any")
                ]
                raise GradleakError(
                    f"{self.target.name} reads {medium}s and the {part.kind} {part.name} is for"
                    f" {part.medium}s: use one of {', '.join(fitting)}."
                )

    def _refuse_per_example(self) -> None:
        if self.defenses and self.defenses[0].wants_per_example and not self.protocol.one_gradient:
            raise GradleakError(
                f"{self.defenses[0].name} needs the gradient of each example and"
                f" {self.protocol.name} sends none: use --protocol fedsgd, or --defense client_dp."
            )

    def _refuse_missing_knowledge(self) -> None:
        granted = set(self.granted)
        for attack in self.attacks:
            if self.target.labels_are_open:
                refuse_open_labels(attack)
            if missing := sorted(self.facts_for(attack) - granted):
                grants = ", ".join(sorted(granted)) or "nothing"
                way_out = (
                    f", or use {attack.name}:{missing[0]}=enumerate"
                    if missing[0] in ("labels", "lengths")
                    else ""
                )
                raise GradleakError(
                    f"{attack.name} requires {missing[0]}; this audit grants {grants}. Add --know"
                    f" {missing[0]}{way_out}."
                )

    @property
    def granted(self) -> tuple[Fact, ...]:
        """What the attacker may be told. The labels of a language model are the secret itself,
        whatever `know` says, and several labels, numbers or classes of tokens are never told."""
        return tuple(
            fact for fact in self.know if not (self._labels_are_untold and fact is Fact.LABELS)
        )

    @property
    def _labels_are_untold(self) -> bool:
        return self.target.labels_are_tokens or self.target.labels_are_open

    def facts_for(self, attack: Attack) -> frozenset[Fact]:
        """The facts an attack requires or uses of this target: without labels where its guess is
        its labels."""
        wanted = attack.requires | (attack.uses & frozenset(self.know))
        return wanted - ({Fact.LABELS} if self._labels_are_untold else set())

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the record's spec, and what its id is the hash of."""
        learns = any(isinstance(attack, TrainableAttack) for attack in self.attacks)
        public = None if self.public is None else to_dict(self.public)
        return {
            "target": to_dict(self.target),
            "data": to_dict(self.data),
            "limit": self.limit,
            "batch_size": self.batch_size,
            "protocol": to_dict(self.protocol),
            "defenses": [to_dict(defense) for defense in self.defenses],
            "view": to_dict(self.view),
            "attacks": [to_dict(attack) for attack in self.attacks],
            "know": sorted(str(fact) for fact in self.granted),
            "prior": to_dict(self.prior),
            "metrics": [to_dict(metric) for metric in self.metrics],
            "draws": self.draws,
            "seed": self.seed,
            "dtype": self.dtype,
            "time_limit": self.time_limit,
            # Other audits keep the id they always had
            **({"public": public} if learns else {}),
            **({} if self.truncate else {"truncate": False}),
        }

    @cached_property
    def id(self) -> str:
        return spec_id(self.to_dict())

    def attack_keys(self) -> dict[str, Attack]:
        """Attacks by the key they have in the record: the name alone where that is enough."""
        names = [attack.name for attack in self.attacks]
        return {
            attack.name if names.count(attack.name) == 1 else to_string(attack): attack
            for attack in self.attacks
        }

    @staticmethod
    def from_plain(plain: dict[str, Any], allow_pickle: bool = False) -> "AuditSpec":
        """From names, one-line strings or mappings, as the command line and YAML write them;
        what is left out has its default."""
        if unknown := [key for key in plain if key not in FIELDS]:
            raise GradleakError(
                f"An audit has no field {unknown[0]!r}{did_you_mean(unknown[0], list(FIELDS))}"
                f" Fields: {', '.join(FIELDS)}."
            )
        target = _target(plain.get("target", "minilm"), allow_pickle)
        defaults = DEFAULTS[target.medium]
        data = _dataset(plain.get("data", defaults["data"]))
        return AuditSpec(
            target=target,
            data=data,
            attacks=tuple(
                read("attack", one, Attack)
                for one in as_list(plain.get("attacks", defaults["attacks"]))
            ),
            protocol=read("protocol", plain.get("protocol", "fedsgd"), Protocol),
            view=read("view", plain.get("view", "everything"), View),
            prior=_prior(plain.get("prior", "auto"), target, data),
            limit=_whole("limit", plain.get("limit", 4)),
            batch_size=_whole("batch_size", plain.get("batch_size", 1)),
            defenses=tuple(
                read("defense", one, Defense) for one in as_list(plain.get("defenses", []))
            ),
            know=_facts(plain.get("know", list(EVERY_FACT))),
            metrics=tuple(
                read("metric", one, Metric)
                for one in as_list(plain.get("metrics", defaults["metrics"]))
            ),
            draws=_whole("draws", plain.get("draws", 1)),
            seed=_whole("seed", plain.get("seed", 0)),
            dtype=str(plain.get("dtype", "float32")),
            time_limit=_seconds("time_limit", plain.get("time_limit")),
            public=None if plain.get("public") is None else _dataset(plain["public"]),
            truncate=_switch("truncate", plain.get("truncate", True)),
        )


FIELDS = tuple(AuditSpec.__dataclass_fields__)


def read(kind: str, described: Any, wanted: Callable[..., Kind]) -> Kind:
    """A component of a kind, in whatever form it is written."""
    component = resolve(kind, described)
    assert isinstance(wanted, type)
    assert isinstance(component, wanted)
    return cast(Kind, component)


def as_list(value: Any) -> list[Any]:
    """One or many, as many."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _target(described: Any, allow_pickle: bool) -> TargetSpec:
    return (
        resolve_target(described, allow_pickle)
        if isinstance(described, str)
        else read("target", described, TargetSpec)
    )


def _prior(described: Any, target: TargetSpec, data: Dataset) -> PriorSpec | PicturePriorSpec:
    """`auto`, of pictures, is the mean of what the data's owner publishes, and grey where that
    is nothing."""
    if described == "auto" and target.medium == "image":
        public = data.public()
        described = (
            "grey" if public is None else {"name": "mean_picture", "data": to_string(public)}
        )
    component = resolve("prior", described)
    assert isinstance(component, (PriorSpec, PicturePriorSpec))
    return component


def _dataset(described: Any) -> Dataset:
    return (
        resolve_dataset(described)
        if isinstance(described, str)
        else read("dataset", described, Dataset)
    )


def _facts(described: Any) -> tuple[Fact, ...]:
    """Facts in any form they are written in; `none` grants nothing."""
    words = [word.strip() for one in as_list(described) for word in str(one).split(",")]
    return () if words == ["none"] else tuple(dict.fromkeys(_fact(word) for word in words))


def _fact(word: str) -> Fact:
    known = [str(fact) for fact in Fact]
    if word not in known:
        raise GradleakError(
            f"Unknown fact {word!r}{did_you_mean(word, known)} An audit can grant:"
            f" {', '.join(known)}."
        )
    return Fact(word)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise GradleakError(f"{name} must be a whole number, not {value!r}.")
    return value


def _switch(name: str, value: Any) -> bool:
    """`on` or `off`, which YAML reads as true and false."""
    if value not in (True, False, "on", "off"):
        raise GradleakError(f"{name} must be on or off, not {value!r}.")
    return value in (True, "on")


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise GradleakError(f"{name} must be a number of seconds above 0, not {value!r}.")
    return float(value)
