"""What LAMP's released code does by oversight and we mended; each can be switched back, to compare with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Slips:
    """Every field is one slip; all off is the search as we run it."""

    silent_tensors: bool = False  # the key biases, whose gradient is rounding noise, count in the distance
    specials_inside: bool = False  # [SEP] or [MASK] may be guessed inside a sentence
    moments_stay: bool = False  # the optimiser's moments do not move with the words
    stale_rounds: bool = False  # in a batch, a sentence must beat the best loss of the one before, judged with its old words
    padded_prefix: bool = False  # a prefix is moved to the end of the padding, not of the sentence
    padding_in_penalty: bool = False  # the length penalty averages over padding too
    defense_ignored: bool = False  # updates are matched as if no defense had changed them


NONE = Slips()
RELEASED = Slips(True, True, True, True, True, True, True)
