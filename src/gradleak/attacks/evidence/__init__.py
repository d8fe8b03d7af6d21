"""What the update says outright, each with how exact it is."""

from gradleak.attacks.evidence.findings import Finding, labels, longest_length, words

__all__ = ["Finding", "labels", "longest_length", "words"]
