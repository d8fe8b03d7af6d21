"""The prior of an audit, opened: of texts or of pictures, as the target is."""

from dataclasses import dataclass

from gradleak.audit.spec import AuditSpec
from gradleak.core.prior import NoWords, PicturePrior, PicturePriorSpec, Prior, PriorSpec
from gradleak.core.target import Target


@dataclass(frozen=True, eq=False)
class OpenedPriors:
    """An opened prior of texts and one of pictures, of which one is there."""

    words: Prior
    pictures: PicturePrior | None


def open_priors(spec: AuditSpec, target: Target) -> OpenedPriors:
    """Opens the prior of an audit for its target."""
    words: Prior = spec.prior.open(target) if isinstance(spec.prior, PriorSpec) else NoWords()
    return OpenedPriors(
        words, spec.prior.open(target) if isinstance(spec.prior, PicturePriorSpec) else None
    )
