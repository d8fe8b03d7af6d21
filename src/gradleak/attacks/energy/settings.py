"""How long and how widely the search goes."""

from dataclasses import dataclass

CHANGES = ("slip", "second slip", "weakest wiped", "some wiped")  # of the best guess, to begin again from


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

    @property
    def rounds(self) -> int:
        """Attempts: from nothing, and as many times from the best guess changed in each way."""
        return 1 + -(-self.restarts // len(CHANGES))

    def most_passes(self, examples: int, tokens: int) -> int:
        """How often candidates are scored at most in a search over so many sentences of so many tokens: on any machine, and
        whatever the objective does. It begins, makes its attempts, settles ties, and looks at its guess without each word."""
        searched = self.of_attempt(examples, tokens) + (self.rounds - 1) * self.of_retry(examples, tokens)
        return 1 + searched + 2 + self.of_moves(examples, tokens) + 1

    def of_retry(self, examples: int, tokens: int) -> int:
        """The same of one round from changed guesses: three changes are scored, and what came of all."""
        return 4 + self.of_attempt(examples, tokens)

    def of_attempt(self, examples: int, tokens: int) -> int:
        """The same of one attempt: down, more words at the weakest places, and down again."""
        return 2 * (1 + self.sweeps * (self._of_sweep(examples, tokens) + self.of_moves(examples, tokens))) + 1 + self.weak

    def of_moves(self, examples: int, tokens: int) -> int:
        """The same of moves of words until none helps: all are tried, then the best few after each that was taken."""
        return 2 * tokens * (1 + self._of_following(examples, tokens))

    def _of_sweep(self, examples: int, tokens: int) -> int:
        places = examples * tokens
        return 3 + (2 + self._of_following(examples, tokens) if self.at_once else places)

    @staticmethod
    def _of_following(examples: int, tokens: int) -> int:
        return 2 * examples * tokens
