"""Models under audit. Importing this package registers them; opening one loads the heavy libraries."""

import json
import os

from gradleak.core.errors import GradleakError
from gradleak.core.registry import registered
from gradleak.core.specs import resolve
from gradleak.core.target import TargetSpec

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from gradleak.targets import huggingface, lenet, lti_lm, minilm, module, resnet, tiny, tiny_causal  # noqa: F401


def resolve_target(described: str, allow_pickle: bool = False) -> TargetSpec:
    """A registered target, or a hub id or folder as shorthand for `huggingface:path=…`."""
    name, colon, rest = (described, "", "") if os.path.isdir(described) else described.partition(":")
    if name not in registered("target") and ("/" in name or "-" in name or os.path.isdir(name)):
        described = f"huggingface:path={json.dumps(name, ensure_ascii=False)}" + ("," + rest if colon else "")
    spec = resolve("target", described)
    if isinstance(spec, (huggingface.HuggingFace, huggingface.CausalLM)) and allow_pickle:
        spec = spec.with_pickle()
    if not isinstance(spec, TargetSpec):
        raise GradleakError(f"{described!r} is not a target.")
    return spec
