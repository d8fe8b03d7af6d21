"""An opened target with the prior made for it, as bytes: opened once, and sent to whoever computes with it."""

import io

import torch

from gradleak.audit.beliefs import Beliefs, open_beliefs
from gradleak.audit.spec import AuditSpec
from gradleak.core.target import Target


def packed(spec: AuditSpec) -> bytes:
    """The target and the prior of an audit, opened on the CPU."""
    target = spec.target.open(torch.device("cpu"), getattr(torch, spec.dtype))
    buffer = io.BytesIO()
    torch.save((target, open_beliefs(spec, target)), buffer)
    return buffer.getvalue()


def unpacked(data: bytes, device: str) -> tuple[Target, Beliefs]:
    """Both on a device; what they shared they still share. Only ever of bytes that this program packed itself: they are code."""
    target, beliefs = torch.load(io.BytesIO(data), map_location=device, weights_only=False)
    assert isinstance(target, Target)
    assert isinstance(beliefs, Beliefs)
    return target, beliefs
