"""Models small enough for tests and first tries, built in memory: no download, no file."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from gradleak.core.registry import Count, register
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.opened import LossOver
from gradleak.targets.problems import ProblemName
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.token_classifier import TokenClassifier

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    "the a my our is was has and to of in at on for with not he she they we i you it this that call"
    " me please keep code number phone street doctor patient pain heart asthma salary bank account"
    " card pin password mail meeting monday friday morning night red blue green dog cat house car"
    " river road door key letter paid owes sold moved lives works takes needs saw gave left never"
    " again soon one two three four five six seven eight nine zero good bad very too much . , ? ! '"
).split()
# As their tokenizers do: nothing, or a token that begins every text
FRAMES = {"gpt2": "$A", "llama": "[CLS] $A"}


@register("target", "tiny")
@dataclass(frozen=True)
class Tiny(TargetSpec):
    """A random BERT with a vocabulary of about a hundred words and the letters and digits as
    word pieces."""

    added_later: ClassVar[frozenset[str]] = frozenset({"problem_type"})

    layers: Count = 2
    hidden: Count = 32
    heads: Count = 2
    classes: Count = 2
    seed: int = 0
    frozen: tuple[str, ...] = ()
    attend_padding: bool = False
    problem_type: ProblemName = "single_label_classification"  # what its head learns

    @property
    def labels_are_open(self) -> bool:
        return self.problem_type != "single_label_classification"

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        from transformers import (
            BertConfig,
            BertForSequenceClassification,
            BertForTokenClassification,
        )

        of_tokens = self.problem_type == "token_classification"
        tokenizer = tiny_tokenizer()
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.hidden,
            max_position_embeddings=128,
            num_labels=self.classes,
            pad_token_id=0,
            attn_implementation="eager",
        )
        config.problem_type = None if of_tokens else self.problem_type
        # The library draws from the global generator what is redrawn below
        with torch.random.fork_rng(devices=[]):
            head = BertForTokenClassification if of_tokens else BertForSequenceClassification
            model = head(config).to(dtype)
        redraw(model, Streams.root("tiny", self.seed))
        return (TokenClassifier if of_tokens else TextClassifier)(
            "tiny",
            model.to(device),
            tokenizer,
            self.frozen,
            self.attend_padding,
            "with random weights",
        )

    def fingerprint(self) -> str:
        return f"made:seed={self.seed}"


@torch.no_grad()
def redraw(model: torch.nn.Module, streams: Streams) -> None:
    """Weights from named streams, whatever the library drew: the same model on every version."""
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=streams.child(name).generator())
        if parameter.ndim > 1:
            # Wider than BERT's 0.02: in so narrow a model the signal would otherwise vanish behind
            # the residual stream.
            parameter.copy_(drawn * 0.2)
        else:
            parameter.copy_((1.0 if "weight" in name else 0.0) + 0.05 * drawn)


def tiny_tokenizer(framed: str = "[CLS] $A [SEP]") -> Any:
    """WordPiece over WORDS, with every letter and digit as a piece, so that any lower-case text
    can be written."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = [*SPECIALS, *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    inner = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    inner.post_processor = processors.TemplateProcessing(
        single=framed, special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
    )


@register("target", "tiny_causal")
@dataclass(frozen=True)
class TinyCausal(TargetSpec):
    """A random GPT-2 (tied embeddings, positions) or Llama (untied, rotary, RMSNorm, gated) over
    the words of `tiny`."""

    labels_are_tokens: ClassVar[bool] = True
    added_later: ClassVar[frozenset[str]] = frozenset({"loss_over"})

    layers: Count = 2
    hidden: Count = 32
    heads: Count = 2
    shape: Literal["gpt2", "llama"] = "gpt2"
    seed: int = 0
    frozen: tuple[str, ...] = ()
    loss_over: LossOver = "texts"  # the mean over texts, or over tokens, as transformers has it

    def open(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
        tokenizer = tiny_tokenizer(FRAMES[self.shape])
        # The library draws from the global generator what is redrawn below
        with torch.random.fork_rng(devices=[]):
            model = {"gpt2": self._gpt2, "llama": self._llama}[self.shape](len(tokenizer)).to(dtype)
        redraw(model, Streams.root("tiny_causal", self.seed))
        return CausalLanguageModel(
            "tiny_causal", model.to(device), tokenizer, self.frozen, loss_over=self.loss_over
        )

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
