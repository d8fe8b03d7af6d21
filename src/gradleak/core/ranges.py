"""Which numbers a field of a component may hold: `steps: Count = 2500`, `clip: Annotated[float,
Range(infinite=True)] = 1.0`."""

import math
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`. A field that names none takes whatever is finite and not
    negative."""

    least: float = 0.0
    most: float = math.inf
    above: bool = False  # above `least`, not at it
    infinite: bool = False  # infinity may stand for "as much as there is"

    def __contains__(self, number: Any) -> bool:
        if math.isinf(number):
            return self.infinite and self.most == number
        # False for nan
        return self.least <= number <= self.most and not (self.above and number == self.least)

    def __str__(self) -> str:
        if self.most < math.inf:
            return (
                f"above {self.least:g} and at most {self.most:g}"
                if self.above
                else f"from {self.least:g} to {self.most:g}"
            )
        return f"above {self.least:g}" if self.above else f"{self.least:g} or more"


Count = Annotated[int, Range(1)]
Rate = Annotated[float, Range(above=True)]  # what nothing moves at zero of
Share = Annotated[float, Range(most=1)]
AnyNumber = Annotated[float, Range(-math.inf)]
