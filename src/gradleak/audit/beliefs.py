"""What the attacker of an audit believes beforehand, opened: of texts or of pictures, as the target is."""

from dataclasses import dataclass

from gradleak.audit.spec import AuditSpec
from gradleak.core.prior import NoWords, PicturePrior, PicturePriorSpec, Prior, PriorSpec
from gradleak.core.target import Target


@dataclass(frozen=True, eq=False)
class Beliefs:
    """An opened prior of texts and one of pictures, of which one is there."""

    words: Prior
    pictures: PicturePrior | None


def open_beliefs(spec: AuditSpec, target: Target) -> Beliefs:
    """The prior of an audit, for its target."""
    words: Prior = spec.prior.open(target) if isinstance(spec.prior, PriorSpec) else NoWords()
    return Beliefs(words, spec.prior.open(target) if isinstance(spec.prior, PicturePriorSpec) else None)
