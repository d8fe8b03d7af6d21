"""Which guess belongs to which secret: an update says nothing of the order of a batch."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from gradleak.core.metric import Text
from gradleak.metrics.texts import bag_overlap, f_measure

NO_GUESS = -1
TIE_WEIGHT = 1e-6  # far below the smallest difference of two ROUGE-1 values


def align(secrets: Sequence[Text], guesses: Sequence[Text]) -> list[int]:
    """For each secret the index of its guess, or -1 where guesses ran out.

    The assignment with the highest total ROUGE-1 of the honest texts; ties go to the larger overlap
    of tokens.
    """
    from scipy.optimize import linear_sum_assignment

    missing = max(0, len(secrets) - len(guesses))
    costs = [
        [
            1
            - f_measure("rouge1", secret.text, guess.text)
            - TIE_WEIGHT * bag_overlap(secret.ids, guess.ids)
            for guess in guesses
        ]
        + [1.0] * missing
        for secret in secrets
    ]
    if not costs:
        return []
    _, columns = linear_sum_assignment(costs)
    return [int(column) if column < len(guesses) else NO_GUESS for column in columns]


def nearest_pictures(
    secrets: Float[Tensor, "secrets channels height width"],
    guesses: Float[Tensor, "guesses channels height width"],
) -> list[int]:
    """For each secret the index of its guess, by the least sum of squared errors; as many
    guesses as secrets."""
    from scipy.optimize import linear_sum_assignment

    errors = (secrets[:, None] - guesses[None]).square().flatten(2).mean(2)
    return [int(column) for column in linear_sum_assignment(errors.cpu().numpy())[1]]
