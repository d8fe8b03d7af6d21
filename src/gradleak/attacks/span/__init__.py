"""Exact reconstruction from the span of layer inputs: undefended gradients only, no labels, lengths or prior needed."""

from gradleak.attacks.span.attack import Span

__all__ = ["Span"]
