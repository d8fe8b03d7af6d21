"""A picture as data: what a client holds, and what an attack guesses. Metrics know of it without
torch; batch.py makes tensors of it and back."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """Eight bits a channel, rows from the top, channels of a pixel side by side."""

    shape: tuple[int, int, int]  # height, width, channels
    pixels: bytes

    @property
    def as_text(self) -> str:
        """All of it, as text to be hashed."""
        return f"{self.shape}{self.pixels.hex()}"

    def __post_init__(self) -> None:
        height, width, channels = self.shape
        if len(self.pixels) != height * width * channels:
            raise ValueError(
                f"a picture of shape {self.shape} has {height * width * channels} bytes, not"
                f" {len(self.pixels)}"
            )
