"""A trained prior as one small file."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from gradleak.core.errors import GradleakError
from gradleak.priors.english import EMBEDDINGS, PROBE, RARE_WORD, fingerprint
from gradleak.priors.packed import GROUP, save_packed

RARE = 10  # a word the corpus has fewer times than this gets no embedding of its own
CONFIG = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads"
    " intermediate_size max_position_embeddings rms_norm_eps tie_word_embeddings pad_token_id"
    " bos_token_id eos_token_id"
).split()


def pack_prior(folder: Path, out: Path, embedding_bits: int, body_bits: int) -> int:
    """Packs the model of a folder; returns the size in bytes. Rare words share one embedding:
    their mean."""
    from transformers import AutoTokenizer

    if not (folder / "model.safetensors").is_file():
        raise GradleakError(
            f"{folder} holds no trained prior (model.safetensors): run gradleak prior train first."
        )
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)  # tied to the embeddings
    bits = {
        name: embedding_bits if "embed_tokens" in name else body_bits
        for name, tensor in weights.items()
        if tensor.ndim == 2 and tensor.numel() % GROUP == 0
    }
    counts = torch.load(folder / "token_counts.pt", weights_only=True)
    common = counts >= RARE
    table = weights[EMBEDDINGS]
    weights[EMBEDDINGS], weights[RARE_WORD] = table[common], table[~common].mean(0)
    stated = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    facts = {
        "config": {key: stated[key] for key in CONFIG if key in stated},
        "training": json.loads((folder / "training.json").read_text()),
        "common": np.packbits(common.numpy()).tobytes().hex(),
        "vocabulary": fingerprint(list(tokenizer(PROBE)["input_ids"]), len(tokenizer)),
    }
    save_packed(out, weights, bits, facts)
    return out.stat().st_size
