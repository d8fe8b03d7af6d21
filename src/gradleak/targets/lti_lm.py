"""The language model of Learning to Invert: three layers with random weights, words neither
trained nor sent."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.not_ours import byte_pair_tokenizer
from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.causal_language_model import CausalLanguageModel

FROZEN = ("word_embedding", "head")


@register("target", "lti_lm")
@dataclass(frozen=True)
class LtiLanguageModel(TargetSpec):
    """A random transformer over GPT-2's vocabulary, 1.1 million shared parameters; needs gpt2_bpe/
    in the data folder.

    Layers as PyTorch's encoder layers: the norm after the sum, ReLU, no dropout. The released code
    forgets the causal mask and so lets each token see the one it is to predict; `causal=false` does
    that. It also copies the word embeddings into the decoder; `decoder_copied=true` does that.
    """

    labels_are_tokens: ClassVar[bool] = True
    cites: ClassVar[str] = "Wu, Chen, Guo & Weinberger 2023, section 4.2"

    layers: Count = 3
    hidden: Count = 96
    heads: Count = 8
    feed_forward: Count = 1536
    # Of which blocks of 16 use 16: with them the shared parameters are the paper's 1.1 million
    positions: Count = 1024
    causal: bool = True
    # The decoder's weights are the words', as released; otherwise drawn by themselves
    decoder_copied: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden must be a multiple of heads; they are {self.hidden} and {self.heads}."
            )

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        tokenizer = byte_pair_tokenizer()
        tokenizer.model_max_length = self.positions
        model = LanguageModel(self, len(tokenizer))
        draw_weights(model, Streams.root("lti_lm", self.seed))
        if self.decoder_copied:
            model.decoder.weight.data.copy_(model.base_model.words.weight)
        return CausalLanguageModel(
            self.name, model.to(device, dtype), tokenizer, FROZEN, reads_ahead=not self.causal
        )

    def fingerprint(self) -> str:
        return f"made:seed={self.seed}"


class LanguageModel(nn.Module):
    """Takes and gives what a Hugging Face causal language model does, as far as gradleak asks."""

    def __init__(self, shape: LtiLanguageModel, words: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="lti_lm", max_position_embeddings=shape.positions, use_cache=False
        )
        self.base_model = Body(shape, words)
        self.decoder = nn.Linear(shape.hidden, words, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.words

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def forward(
        self,
        attention_mask: Int[Tensor, "texts tokens"],
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> SimpleNamespace:
        embedded = self.base_model.words(input_ids) if inputs_embeds is None else inputs_embeds
        return SimpleNamespace(logits=self.decoder(self.base_model(embedded, attention_mask)))


class Body(nn.Module):
    """Everything but the decoder."""

    def __init__(self, shape: LtiLanguageModel, words: int) -> None:
        super().__init__()
        self.causal = shape.causal
        self.words = nn.Embedding(words, shape.hidden)
        self.position = nn.Embedding(shape.positions, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(
        self, embedded: Float[Tensor, "texts tokens hidden"], mask: Int[Tensor, "texts tokens"]
    ) -> Float[Tensor, "texts tokens hidden"]:
        tokens = embedded.shape[1]
        hidden = (mask == 0)[:, None, None, :]
        if self.causal:
            hidden = hidden | torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).triu(
                1
            )
        state = embedded + self.position(torch.arange(tokens, device=embedded.device))
        for layer in self.layers:
            state = layer(state, hidden)
        return state  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Written out, as fused kernels cannot be differentiated twice."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )

    def forward(self, state: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = (
            project(state).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        mixed: Tensor = self.out_proj((weights @ value).transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):
    """Attention and feed-forward, each followed by the norm of its sum with what came in."""

    def __init__(self, shape: LtiLanguageModel) -> None:
        super().__init__()
        self.self_attn = Attention(shape.hidden, shape.heads)
        self.fc1, self.fc2 = (
            nn.Linear(shape.hidden, shape.feed_forward),
            nn.Linear(shape.feed_forward, shape.hidden),
        )
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)

    def forward(self, state: Tensor, hidden: Tensor) -> Tensor:
        state = self.norm1(state + self.self_attn(state, hidden))
        return self.norm2(state + self.fc2(self.fc1(state).relu()))  # type: ignore[no-any-return]


@torch.no_grad()
def draw_weights(model: LanguageModel, streams: Streams) -> None:
    """PyTorch's own spreads, as the paper's code leaves them; words and decoder uniform ±0.1;
    each from a stream of its name."""
    for name, parameter in model.named_parameters():
        generator = streams.child(name).generator()
        if name.endswith("position.weight"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        elif "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(uniform * _spread(model, name, parameter))


def _spread(model: LanguageModel, name: str, parameter: Tensor) -> float:
    if name in ("base_model.words.weight", "decoder.weight"):
        return 0.1
    holder = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(holder, nn.Linear)
    # One fused matrix there, drawn by Xavier's rule
    if name.rpartition(".")[0].endswith(("q_proj", "k_proj", "v_proj")):
        return math.sqrt(6 / (4 * holder.in_features)) if parameter.ndim > 1 else 0.0
    return 1 / math.sqrt(holder.in_features) if parameter.ndim > 1 or ".fc" in name else 0.0
