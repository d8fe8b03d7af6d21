"""Exact reconstruction from the span of layer inputs.

Works on undefended gradients only, and needs no labels, lengths or prior.
"""

from gradleak.attacks.span.span_attack import Span

__all__ = ["Span"]
