"""Named random streams: every draw has an owner, and nobody's stream leads to another's."""

import hashlib
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Streams:
    """A tree of independent random streams.

    A child's key is a one-way hash of its parent's key and its name, so whoever holds a child can
    neither walk up to the seed nor sideways to another child. (numpy's spawned generators carry the root's entropy.)
    """

    key: bytes = field(repr=False)

    @staticmethod
    def root(owner: str, seed: int) -> "Streams":
        """The root of one side. Client and attacker have different owners, hence unrelated streams."""
        return Streams(hashlib.blake2b(f"{owner}|{seed}".encode(), digest_size=32).digest())

    def child(self, *path: str | int) -> "Streams":
        """The stream of that name; the same path always gives the same stream."""
        name = "/".join(f"{type(part).__name__}:{part}" for part in path).encode()
        return Streams(hashlib.blake2b(name, key=self.key, digest_size=32).digest())

    def generator(self) -> torch.Generator:
        """A fresh generator at the start of this stream. Always on the CPU, so that every device draws the same numbers."""
        return torch.Generator().manual_seed(int.from_bytes(self.key[:8], "big") >> 1)
