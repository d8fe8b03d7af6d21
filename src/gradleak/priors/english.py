"""Priors that need no download: the most frequent words, and a small English language model that we
trained and ship, over BERT's uncased vocabulary.

The model's weights are packed in a few bits a number: whole numbers with one scale for every 32
neighbours, without gaps.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradleak.core.errors import GradleakError
from gradleak.core.prior import Prior, PriorSpec, pick
from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.language_model import PROBE, SameVocabulary

# Common English words, most frequent first.
ENGLISH = (
    "the of and to a in is that it was for on with he as i his at be by had not are but from or"
    " have an they which one you were all her she there would their we him been has when who will"
    " no more if out so up said what its about than into them can only other time new some could"
    " these two may first then do any like my now over such our man me even most made after also"
    " did many off before must well back through years much where your way down should because long"
    " each just state people those too mr how little good world make very year still see own work"
    " men day get here old life both between being under three never know same last another while"
    " us might great go come since against right came take used himself few house use place during"
    " high without again home around small however found part school thought went say general once"
    " upon war every left got united number hand course water until away always public put head"
    " night fact though end called set better tell why look asked feel going yet nothing done young"
).split()


@register("prior", "frequent_words")
@dataclass(frozen=True)
class FrequentWords(PriorSpec):
    """Says the most frequent words in order of frequency, of English or of a text file of your
    own."""

    corpus: str | None = None  # a plain text file to count words in, instead of the built-in list
    length: Count = 10  # words of a typical sentence, when the length is not known

    def open(self, target: Target) -> Prior:
        words = ENGLISH if self.corpus is None else _count_words(Path(self.corpus))
        # together: GPT-2 has one token for a word after a space, another without
        (ids,) = target.encode([" ".join(words)])
        allowed = target.vocabulary.allowed
        return _Frequent(
            target, [number for number in dict.fromkeys(ids) if bool(allowed[number])], self.length
        )


class _Frequent(Prior):
    def __init__(self, target: Target, ids: list[int], length: int) -> None:
        if not ids:
            raise GradleakError(
                "No frequent word is in the target's vocabulary: give frequent_words:corpus=FILE in"
                " its language."
            )
        self.vocabulary, self.ids, self.length = target.vocabulary, ids, length
        ranks = torch.full((len(target.vocabulary.allowed),), float(len(ids)))
        ranks[torch.tensor(ids)] = torch.arange(len(ids), dtype=torch.float32)
        weights = 1 / (ranks + 2.7)
        self.costs = -(weights / weights.sum()).log()

    def nll(
        self, ids: Int[Tensor, "sentences tokens"], lengths: Int[Tensor, "sentences"]
    ) -> Float[Tensor, "sentences"]:
        """Zipf's law over the list; every other word shares the last rank's place. Order does
        not matter."""
        counted = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        return (self.costs.to(ids.device)[ids] * counted).sum(1) / lengths

    def likely(self, length: int, streams: Streams) -> list[int]:
        return self.vocabulary.fill(length, self.ids)

    def draw(self, lengths: Sequence[int], streams: Sequence[Streams]) -> list[list[int]]:
        """Words of the list, the frequent ones more often; the others only share what is left."""
        return [self._draw_one(*one) for one in zip(lengths, streams, strict=True)]

    def _draw_one(self, length: int, streams: Streams) -> list[int]:
        frame, fixed = self.vocabulary.frame(length)
        shares = torch.rand(length, generator=streams.generator())
        ranks = pick((-self.costs[self.ids]).exp().expand(length, -1), shares).tolist()
        return [
            frame[place] if fixed[place] else self.ids[rank] for place, rank in enumerate(ranks)
        ]

    def likely_length(self) -> int:
        return self.length + self.vocabulary.frame_length


def _count_words(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GradleakError(f"The corpus {path} cannot be read as UTF-8 text: {error}") from error
    return [word for word, _ in Counter(re.findall(r"\w+", text.lower())).most_common(1000)]


WEIGHTS = "english.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"
RARE_WORD = "rare_word"
GROUP = 32
RARE = 10  # a word the corpus has fewer times than this gets no embedding of its own
CONFIG = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads"
    " intermediate_size max_position_embeddings rms_norm_eps tie_word_embeddings pad_token_id"
    " bos_token_id eos_token_id"
).split()


@register("prior", "english")
@dataclass(frozen=True)
class English(PriorSpec):
    """Our small English language model; for targets with BERT's uncased vocabulary (card:
    docs/prior.md)."""

    def open(self, target: Target) -> Prior:
        weights, facts = _read()
        if not fits(target, facts["vocabulary"]):
            raise GradleakError(
                "The english prior speaks BERT's uncased vocabulary, which this target does not"
                " have: use --prior frequent_words, or causal_lm:path=… with any causal language"
                " model."
            )
        return SameVocabulary(_model(weights, facts), target)


def english_model() -> Any:
    """The shipped language model itself, over BERT's uncased vocabulary."""
    return _model(*_read())


def _read() -> tuple[dict[str, Tensor], dict[str, Any]]:
    with as_file(files("gradleak.priors") / WEIGHTS) as path:
        if not path.is_file():
            raise GradleakError(
                "The weights of the english prior are not installed: use --prior frequent_words or"
                " causal_lm:path=…."
            )
        return load_packed(path)


def _model(weights: dict[str, Tensor], facts: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = _with_rare_words(weights, facts["common"], facts["config"]["vocab_size"])
    with torch.random.fork_rng(devices=[]):  # what the library draws is overwritten
        model = LlamaForCausalLM(LlamaConfig(**facts["config"]))
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
    return model


def _with_rare_words(weights: dict[str, Tensor], common: str, words: int) -> dict[str, Tensor]:
    """The whole table of embeddings: words too rare in training share one row."""
    marks = np.unpackbits(np.frombuffer(bytes.fromhex(common), dtype=np.uint8)).astype(bool)[:words]
    table = weights[RARE_WORD].repeat(len(marks), 1)
    table[torch.from_numpy(marks)] = weights[EMBEDDINGS]
    return {name: one for name, one in weights.items() if name != RARE_WORD} | {EMBEDDINGS: table}


@register("prior", "auto")
@dataclass(frozen=True)
class Auto(PriorSpec):
    """`english` where the target has BERT's uncased vocabulary, `frequent_words` elsewhere."""

    def open(self, target: Target) -> Prior:
        try:
            return English().open(target)
        except GradleakError:
            return FrequentWords().open(target)


def fits(target: Target, vocabulary: str) -> bool:
    """Whether the target tokenises as the prior was trained."""
    return fingerprint(target.encode([PROBE])[0], len(target.vocabulary.allowed)) == vocabulary


def fingerprint(probe_ids: list[int], size: int) -> str:
    """Tells vocabularies apart by their size and a probe text's ids."""
    return hashlib.sha256(f"{size}:{probe_ids}".encode()).hexdigest()[:16]


def pack(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Bits and scales of a tensor whose size is a multiple of 32."""
    groups = tensor.detach().float().reshape(-1, GROUP)
    top = 2 ** (bits - 1) - 1
    scales = (groups.abs().amax(1, keepdim=True) / top).clamp_min(1e-8).half()
    # Moved by `top`, so that none is negative and all fit the bits
    whole = (groups / scales.float()).round().clamp(-top, top).to(torch.int16) + top
    digits = (whole.numpy()[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return torch.from_numpy(np.packbits(digits.astype(np.uint8).reshape(-1))), scales[:, 0]


def unpack(packed: Tensor, scales: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The tensor again, as float32."""
    count = int(np.prod(shape))
    digits = np.unpackbits(packed.numpy(), count=count * bits).reshape(count, bits)
    whole = np.zeros(count, np.int16)
    for place in range(bits):  # a product of whole numbers would take five times as long
        whole = 2 * whole + digits[:, place]
    whole -= 2 ** (bits - 1) - 1
    return (
        torch.from_numpy(whole.astype(np.float32)).view(-1, GROUP) * scales.float()[:, None]
    ).view(shape)


def save_packed(
    path: Path, weights: dict[str, Tensor], bits: dict[str, int], facts: dict[str, Any]
) -> None:
    """Matrices in the given number of bits, vectors in half precision, facts as metadata."""
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in bits:
            stored[f"{name}|bits"], stored[f"{name}|scales"] = pack(tensor.cpu(), bits[name])
        else:
            stored[name] = tensor.detach().cpu().half()
    shapes = {name: list(tensor.shape) for name, tensor in weights.items() if name in bits}
    parts = {"facts": facts, "bits": bits, "shapes": shapes}
    save_file(stored, path, metadata={name: json.dumps(part) for name, part in parts.items()})


def load_packed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights as float32, and the facts."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        bits, shapes = json.loads(metadata["bits"]), json.loads(metadata["shapes"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {
        name: unpack(
            stored[f"{name}|bits"], stored[f"{name}|scales"], bits[name], tuple(shapes[name])
        )
        for name in bits
    } | {name: tensor.float() for name, tensor in stored.items() if "|" not in name}
    return weights, json.loads(metadata["facts"])


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
    common = torch.load(folder / "token_counts.pt", weights_only=True) >= RARE
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
