"""How long and how widely the search goes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """How long and how widely to search."""

    proposals: int = 32  # words tried at a place because the objective falls towards them
    words: int = 48  # and because the matrices seen speak of them: this many and
    words_a_place: int = 3  # this many more for every place
    many: int = 1024  # likely words tried where the guess is weakest
    weak: int = 3  # places where they are
    at_once: bool = False  # whether a sweep tries all places in one pass: as good where passes are dear, and fewer of them
    sweeps: int = 4  # over all places, at most, before a restart
    restarts: int = 8  # from the best guess with a part of it changed, four at a time
    wiped: float = 0.34  # that part
    prior_weight: float = 0.5  # nats of the objective for one of the prior a token, in every second restart and between ties
    prior_under_noise: float = 1.0  # the same where the objective is itself in nats, as likelihoods are
    solved: float = -18.0  # log of the unexplained share (1.5e-8) at which all is explained
