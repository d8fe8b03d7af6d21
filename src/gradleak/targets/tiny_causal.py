"""A causal language model small enough for tests and first tries, built in memory: no download,
no file."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.causal_lm import CausalLanguageModel
from gradleak.targets.tiny import redraw, tiny_tokenizer

# As their tokenizers do: nothing, or a token that begins every text
FRAMES = {"gpt2": "$A", "llama": "[CLS] $A"}


@register("target", "tiny_causal")
@dataclass(frozen=True)
class TinyCausal(TargetSpec):
    """A random GPT-2 (tied embeddings, positions) or Llama (untied, rotary, RMSNorm, gated) over
    the words of `tiny`."""

    labels_are_tokens: ClassVar[bool] = True

    layers: Count = 2
    hidden: Count = 32
    heads: Count = 2
    shape: Literal["gpt2", "llama"] = "gpt2"
    seed: int = 0
    frozen: tuple[str, ...] = ()

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        tokenizer = tiny_tokenizer(FRAMES[self.shape])
        # The library draws from the global generator what is redrawn below
        with torch.random.fork_rng(devices=[]):
            model = {"gpt2": self._gpt2, "llama": self._llama}[self.shape](len(tokenizer)).to(dtype)
        redraw(model, Streams.root("tiny_causal", self.seed))
        return CausalLanguageModel("tiny_causal", model.to(device), tokenizer, self.frozen)

    def fingerprint(self) -> str:
        return f"made:seed={self.seed}"

    def _gpt2(self, words: int) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=words,
            n_embd=self.hidden,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=128,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
        return GPT2LMHeadModel(config)

    def _llama(self, words: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=words,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=2 * self.hidden,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
        return LlamaForCausalLM(config)
