"""Partial gradients: LAMP on some tensors of the update, down to a single weight matrix.

Li, Xu and Dras, EMNLP 2024.
"""

from dataclasses import dataclass

from gradleak.attacks.gradient_matching.loop import MatchingLoop
from gradleak.attacks.recipes.lamp import Discrete, LampAttack, make_adam
from gradleak.core.registry import Count, Rate, register
from gradleak.matching import Cosine


@register("attack", "partial_gradients")
@dataclass(frozen=True)
class PartialGradients(LampAttack):
    """LAMP's cosine search over whatever tensors the view shows, each with the same weight.

    Choose them by view=parts.
    """

    # Where this is not the paper, or not its released code:
    # - The paper sums the distances (equation 1), we take their mean (its equation 4, and LAMP).
    #   For a single matrix these are the same; for n of them a sum would make the weights of prior
    #   and length penalty n times smaller.
    # - Which tensors are matched is the view's choice and not the attack's: the server has no
    #   others. Views name modules exactly; the released selector for "FFN output" takes the
    #   attention's output too.
    # - The mends of LAMP's released code (discrete.Slips) are in; faithful=true takes them out.
    # - The paper attacks BERT-large too, with what it calls LAMP's settings: those are
    #   lamp_bert_large, under any view.
    # - Its defended gradients were read before they were clipped and noised; ours are those that
    #   leave the client.

    cites = "Li, Xu and Dras, EMNLP 2024; settings of LAMP, supplement D"

    steps: Count = 2000
    starts: Count = 500
    learning_rate: Rate = 0.01
    decay: float = 0.89  # every 50 steps
    prior_weight: float = 0.2
    norm_weight: float = 1.0
    discrete: Discrete = "alternate"
    across: bool = False  # also try exchanges between the sentences of a batch
    faithful: bool = False

    @property
    def parts(self) -> MatchingLoop:
        return self.assemble(Cosine(), make_adam(self.learning_rate, self.decay), every=75)
