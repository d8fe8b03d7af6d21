"""Models under audit. Importing this package registers them; opening one loads the heavy
libraries."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace

from gradleak.core.errors import GradleakError, near_paths
from gradleak.core.registry import list_registered
from gradleak.core.specs import resolve, to_string
from gradleak.core.target import TargetSpec

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from gradleak.targets import (
    adapters,
    huggingface,
    image_networks,
    in_memory,
    loading,
    lti_lm,
    minilm,
    smollm2,
    tiny,
)

# Fields of a line that ask for a classifier, whatever the checkpoint is of
OF_CLASSIFIERS = re.compile(r"(^|,)\s*(classes|head_std|head_seed|attend_padding|problem_type)\s*=")


def resolve_target(described: str, allow_pickle: bool = False) -> TargetSpec:
    """A registered target, or a hub id, folder or GGUF file: `huggingface:path=…`, or
    `causal_lm:path=…` where config.json says so."""
    name, colon, rest = (described, "", "") if _is_folder(described) else described.partition(":")
    if os.path.isfile(os.path.join(os.path.expanduser(name), "adapter_config.json")):
        return _read_adapters(name, rest, allow_pickle)
    if name not in list_registered("target") and (
        "/" in name
        or "-" in name
        or name.startswith((".", "~"))
        or _is_folder(name)
        or _is_gguf_file(name)
    ):
        if not (in_gguf := _is_gguf_file(name)):
            loading.refuse_missing_folder(name)
        causal = in_gguf or (
            loading.is_language_model(loading.architectures_of(name))
            and not OF_CLASSIFIERS.search(rest)
        )
        path = json.dumps(name, ensure_ascii=False)
        described = f"{'causal_lm' if causal else 'huggingface'}:path={path}" + (
            "," + rest if colon else ""
        )
    elif name not in list_registered("target") and (near := near_paths(name, "", folders=True)):
        raise GradleakError(
            f"There is neither a target nor a folder {name!r}; {near} `gradleak list targets` names"
            " the targets."
        )
    spec = resolve("target", described)
    if isinstance(spec, (huggingface.HuggingFace, huggingface.CausalLM)) and allow_pickle:
        spec = replace(spec, allow_pickle=True)
    if not isinstance(spec, TargetSpec):
        raise GradleakError(f"{described!r} is not a target.")
    return spec


def _read_adapters(folder: str, rest: str, allow_pickle: bool) -> TargetSpec:
    """The folder that peft saved adapters to; it says which model they belong to."""
    with open(os.path.join(os.path.expanduser(folder), "adapter_config.json")) as file:
        base = json.load(file).get("base_model_name_or_path") or ""
    under = resolve_target(base, allow_pickle)
    name = "causal_lora" if under.labels_are_tokens else "lora"
    fields = f"path={json.dumps(folder)},base={json.dumps(to_string(under))}"
    spec = resolve("target", f"{name}:{fields}{',' if rest else ''}{rest}")
    assert isinstance(spec, TargetSpec)
    return spec


def hub_ids(specs: Iterable[TargetSpec]) -> list[str]:
    """Targets that are not on this machine's disk by their path, so that only opening them shows
    whether they are there."""
    named = [
        spec.path
        for spec in specs
        if isinstance(spec, (huggingface.HuggingFace, huggingface.CausalLM))
    ]
    return sorted({path for path in named if not (_is_folder(path) or _is_gguf_file(path))})


def _is_gguf_file(name: str) -> bool:
    return loading.is_gguf(name) and os.path.isfile(os.path.expanduser(name))


def _is_folder(name: str) -> bool:
    return os.path.isdir(os.path.expanduser(name))
