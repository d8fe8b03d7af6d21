"""Hugging Face models and tokenizers from a hub id or a folder, with what can go wrong said in a
sentence."""

import contextlib
import hashlib
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gradleak.core.errors import GradleakError, near_paths
from gradleak.core.not_ours import HUB_ID, find_model, is_beside_folders, quiet_transformers


def is_gguf(path: str) -> bool:
    """Whether a path names a file of llama.cpp, which holds weights and tokenizer."""
    return path.endswith(".gguf")


def has_gguf() -> bool:
    """Whether the package is there that such files are read with."""
    return importlib.util.find_spec("gguf") is not None


def source_of(path: str) -> str | Path:
    """A folder where there is one of that name, or a GGUF file, else a hub id that network or cache
    holds; refuses what can be none of them."""
    folder = Path(path).expanduser()
    if is_gguf(path) and folder.is_file():
        return folder
    refuse_missing_folder(path)
    if folder.is_dir():
        return folder
    find_model(path)
    return path


def refuse_missing_folder(path: str) -> None:
    """Refuses what is written as a folder, or can be nothing else, where there is none; a name
    that is near is told."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return
    if folder.is_file():
        raise GradleakError(
            f"{path} is a file: name the folder that holds config.json, the weights and the"
            " tokenizer."
        )
    if is_beside_folders(path) or path.startswith((".", "/", "~")) or not HUB_ID.fullmatch(path):
        raise GradleakError(
            f"There is no folder {path}; {near_paths(path, 'check the path.', folders=True)}"
        )


def architectures_of(path: str) -> tuple[str, ...]:
    """The classes that config.json says a folder's weights are of; nothing where it does not
    say, or for a hub id."""
    config = Path(path).expanduser() / "config.json"
    try:
        stated = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()  # whoever opens the model says what is wrong with it
    found = stated.get("architectures") if isinstance(stated, dict) else None
    return tuple(map(str, found)) if isinstance(found, list) else ()


def is_language_model(architectures: Sequence[str]) -> bool:
    """Whether weights are of a causal language model: GPT2LMHeadModel, LlamaForCausalLM."""
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)


def load_tokenizer(name: str, source: str | Path) -> Any:
    """The tokenizer that lies beside a model, or within its file."""
    if isinstance(source, Path) and source.is_file():
        return _load_from_gguf(name, source, quiet_transformers().AutoTokenizer, {})
    if isinstance(source, Path) and not any(
        (source / part).exists()
        for part in ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model")
    ):
        raise GradleakError(
            f"{name} has no tokenizer files (tokenizer.json, vocab.txt …): save the tokenizer into"
            " that folder."
        )
    try:
        return quiet_transformers().AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise GradleakError(
            f"No tokenizer could be loaded for {name}: {_first_line(error)}{_no_folder(source)}"
        ) from error


def load_model(
    auto_class: Any,
    called: str,
    name: str,
    source: str | Path,
    dtype: torch.dtype,
    safetensors_only: bool,
    options: Mapping[str, Any],
) -> tuple[Any, set[str]]:
    """The model with eager attention (fused kernels have no second derivative), and the names
    its checkpoint lacks."""
    if isinstance(source, Path) and source.is_file():
        wanted = {"attn_implementation": "eager", "dtype": dtype, "output_loading_info": True}
        model, info = _load_from_gguf(name, source, auto_class, wanted | dict(options))
        return model, set(info["missing_keys"])
    if isinstance(source, Path):
        _refuse_folder(name, source, safetensors_only)
    try:
        # The library draws missing weights from the global generator
        with torch.random.fork_rng(devices=[]):
            model, info = auto_class.from_pretrained(
                source,
                attn_implementation="eager",
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True if safetensors_only else None,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise GradleakError(
            f"The model {name} could not be loaded as a {called}:"
            f" {_first_line(error)}{_no_folder(source)}"
        ) from error
    return model, set(info["missing_keys"])


def _load_from_gguf(name: str, file: Path, auto_class: Any, options: Mapping[str, Any]) -> Any:
    """What the library reads of a GGUF file: quantised weights become numbers again."""
    if not has_gguf():
        raise GradleakError(
            f"{name} is a GGUF file, which needs gguf: pip install 'gradleak[gguf]'."
        )
    try:
        # It shows a progress bar of its own, which cannot be turned off
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):
            return auto_class.from_pretrained(file.parent, gguf_file=file.name, **options)
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise GradleakError(
            f"The GGUF file {name} could not be read: {_first_line(error)}"
        ) from error


def _no_folder(source: str | Path) -> str:
    """For a hub id that may have been meant as a folder."""
    if isinstance(source, Path):
        return ""
    near = near_paths(source, "", folders=True)
    return f" There is no folder {source} either{f'; {near}' if near else '.'}"


def _refuse_folder(name: str, folder: Path, safetensors_only: bool) -> None:
    if not (folder / "config.json").exists():
        raise GradleakError(f"{name} has no config.json: it is not a Hugging Face model folder.")
    if safetensors_only and not list(folder.glob("*.safetensors")):
        raise GradleakError(
            f"{name} has no .safetensors weights; pickled weights can run code. "
            "Convert them, or pass --allow-pickle if you trust them."
        )


def fingerprint_of(path: str) -> str:
    """A hash of the weights in a folder or GGUF file, or the hub id."""
    folder = Path(path).expanduser()
    if is_gguf(path) and folder.is_file():
        return f"sha256:{sha256_of(folder)[:16]}"
    weights = (
        sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
        if folder.is_dir()
        else []
    )
    if not weights:
        return f"hub:{path}"
    hashes = [sha256_of(file) for file in weights]
    together = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return f"sha256:{(hashes[0] if len(hashes) == 1 else together)[:16]}"


def sha256_of(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
