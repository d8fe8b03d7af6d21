"""Named random streams: every draw has an owner, and nobody's stream leads to another's."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch

TWISTER_WORDS = 624


@dataclass(frozen=True)
class Streams:
    """A tree of independent random streams.

    A child's key is a one-way hash of its parent's key and its name, so whoever holds a child can
    neither walk up to the seed nor sideways to another child. (numpy's spawned generators carry the
    root's entropy.)
    """

    key: bytes = field(repr=False)

    @staticmethod
    def root(owner: str, seed: int) -> "Streams":
        """The root of one side. Client and attacker have different owners, hence unrelated
        streams."""
        return Streams(hashlib.blake2b(f"{owner}|{seed}".encode(), digest_size=32).digest())

    def child(self, *path: str | int) -> "Streams":
        """The stream of that name; the same path always gives the same stream."""
        # So that ("a/str:b",) is not ("a", "b")
        parts = (f"{type(part).__name__}:{part}".replace("/", "//") for part in path)
        name = "/".join(parts).encode()
        return Streams(hashlib.blake2b(name, key=self.key, digest_size=32).digest())

    def generator(self) -> torch.Generator:
        """A fresh generator at the start of this stream. Always on the CPU, so that every device
        draws the same numbers."""
        generator = torch.Generator().manual_seed(0)
        # Seeding alone would keep 32 bits of the key (torch ignores the rest): noise could be found
        # by trying them all. So the whole state of the Mersenne twister is filled: 624 words, each
        # in 8 bytes, after a header of 24.
        state = generator.get_state()
        words = np.frombuffer(
            hashlib.shake_256(self.key).digest(4 * TWISTER_WORDS), dtype="<u4"
        ).astype("<u8")
        state[24 : 24 + 8 * TWISTER_WORDS] = torch.from_numpy(words.view(np.uint8))
        generator.set_state(state)
        return generator
