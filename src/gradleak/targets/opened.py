"""What opened Hugging Face text models have in common, whatever they predict: vocabulary, tokenizer
and passes. They are reached through the library's own interfaces only."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.batch import Batch, Example, pad_rows
from gradleak.core.errors import GradleakError
from gradleak.core.parts import Part
from gradleak.core.target import Target, Vocabulary
from gradleak.matching.kinds import owners_of
from gradleak.targets.weights import Weights

LossOver = Literal["texts", "tokens"]  # what a batch's loss is the mean over
UNUSED = re.compile(r"^[\[<]unused_?\d+[\]>]$")  # BERT's spare ids: never in a text


@dataclass(frozen=True, eq=False)
class Encoded:
    """Examples with their ids, padded; how many tokens of each are read, and how many were cut
    off."""

    examples: tuple[Example, ...]
    ids: Int[Tensor, "examples tokens"]
    lengths: tuple[int, ...]
    dropped: tuple[int, ...]


class OpenedTransformer(Target):
    """Abstract: a subclass says what is learnt, and so what a private batch is and what the
    loss.

    Eval mode, gradients off: clients and attackers differentiate copies of the parameters, so that
    no `.grad` is left behind.
    """

    loss_over: LossOver = "texts"
    _weights: Weights

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.name = name
        self.module: nn.Module = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary_of(name, model, tokenizer)
        self.hidden_size = int(self.vocabulary.embeddings.shape[1])
        # Of every parameter, the names under which modules hold it: several where weights are tied
        self._aliases = {
            name: [f"{module}.{attribute}".lstrip(".") for module, attribute in owners]
            for name, owners in owners_of(model).items()
        }
        self.longest = longest_of(model.config, tokenizer)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._weights.parameters

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return self._weights.groups

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._weights.parts

    @property
    def frozen_parts(self) -> tuple[Part, ...]:
        return self._weights.frozen_parts

    @cached_property
    def in_double(self) -> "OpenedTransformer":
        if self.dtype == torch.float64:
            return self
        twin = copy.copy(self)
        twin.module = copy.deepcopy(self.module).double()
        trained = {name: twin.module.get_parameter(name) for name in self.parameters}
        twin._weights = replace(self._weights, parameters=trained)
        table = twin.module.get_input_embeddings().weight.detach()  # type: ignore[operator]
        twin.vocabulary = replace(self.vocabulary, embeddings=table)
        return twin

    def with_loss_over(self, loss_over: LossOver) -> "OpenedTransformer":
        """The same model with a batch's loss a mean over texts or over tokens, where it has labels
        of tokens."""
        if loss_over == self.loss_over or not self.learns_tokens:
            return self
        twin = copy.copy(self)
        twin.__dict__.pop("in_double", None)  # one with the other loss is made where it is needed
        twin.loss_over = loss_over
        return twin

    @property
    def learns_tokens(self) -> bool:
        """Whether each token has a label of its own, so that long texts may weigh more."""
        return self.labels_are_tokens

    def _share_out(
        self, sums: Float[Tensor, "*lead"], counts: Float[Tensor, "*lead"]
    ) -> Float[Tensor, "*lead"]:
        """Each example's loss from its sum over tokens that count and how many do."""
        own = counts.clamp_min(1)
        if self.loss_over == "texts" or not counts.ndim:
            return sums / own
        # Of a batch [examples] the mean over tokens is the mean over examples of these.
        mean = counts.mean(-1, keepdim=True)
        return sums / torch.where(mean > 0, mean, torch.ones_like(mean))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenize(texts, {"truncation": False})

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        # The same clean-up of spaces before punctuation whatever the library's default: scores
        # compare strings.
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=True
            )
        )

    def split_row(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """Cuts a language model's row behind each token that ends a text."""
        end = self.tokenizer.eos_token_id
        if not self.labels_are_tokens or end is None:
            return [ids]
        ends = [place + 1 for place, token in enumerate(ids) if token == end]
        cuts = [0, *ends, *([len(ids)] if not ends or ends[-1] < len(ids) else [])]
        texts = [ids[start:stop] for start, stop in pairwise(cuts)]
        return [text for text in texts if set(text) != {end}] or [ids]

    def _tokenize(self, texts: Sequence[str], cut: Mapping[str, Any]) -> list[list[int]]:
        encoded = self.tokenizer(list(texts), add_special_tokens=True, verbose=False, **cut)
        return [list(ids) for ids in encoded["input_ids"]]

    def _encode_examples(self, examples: Sequence[Example]) -> Encoded:
        """Encodes examples as the model reads them: long ones truncated as its tokenizer does,
        empty ones refused."""
        whole = self.encode([example.text for example in examples])
        rows, read = list(whole), list(examples)
        for place, (example, row) in enumerate(zip(examples, whole, strict=True)):
            if len(row) > self.longest:
                cut = {"truncation": True, "max_length": self.longest}
                rows[place] = self._tokenize([example.text], cut)[0]
                read[place] = self._keep_secrets(example)
        lengths = tuple(len(row) for row in rows)
        self._refuse_lengths(examples, lengths)
        lost = tuple(len(before) - after for before, after in zip(whole, lengths, strict=True))
        ids = pad_rows(rows, self.vocabulary.pad)
        return Encoded(tuple(read), ids.to(self.device), lengths, lost if any(lost) else ())

    def _keep_secrets(self, example: Example) -> Example:
        """Returns a text that is to be cut, with those of its marked spans that stay whole."""
        from_left = getattr(self.tokenizer, "truncation_side", "right") == "left"

        def stays(span: tuple[int, int]) -> bool:
            reach = example.text[span[0] :] if from_left else example.text[: span[1]]
            return len(self.encode([reach])[0]) <= self.longest

        return replace(example, secrets=tuple(span for span in example.secrets if stays(span)))

    def _refuse_lengths(self, examples: Sequence[Example], lengths: Sequence[int]) -> None:
        """Refuses empty texts, and texts of different lengths where padding is read. Errors never
        quote a text."""
        for place, (example, tokens) in enumerate(zip(examples, lengths, strict=True), start=1):
            if tokens <= self.vocabulary.frame_length:
                raise GradleakError(
                    f"{name_example(example, place)} is empty after tokenising: remove it from the"
                    " data."
                )
        if not self.padding_is_free and len(set(lengths)) > 1:
            raise GradleakError(
                f"{self.name} reads padding, so a batch needs sentences of one length; these have"
                f" {sorted(set(lengths))} tokens. Use --batch-size 1 or sentences of equal length."
            )

    def _logits(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None
    ) -> Float[Tensor, "examples *outputs"]:
        """One forward pass, all leading axes as one; with other parameters where they are given."""
        tokens = batch.mask.shape[-1]
        inputs: dict[str, Tensor] = {"attention_mask": batch.mask.reshape(-1, tokens).long()}
        if batch.ids is not None:
            inputs["input_ids"] = batch.ids.reshape(-1, tokens)
        elif batch.embeddings is not None:
            hidden = batch.embeddings.shape[-1]
            inputs["inputs_embeds"] = batch.embeddings.reshape(-1, tokens, hidden)
        # functional_call's own tie_weights leaves the copies behind in a module that is registered
        # under two names.
        swapped = {
            alias: value
            for name, value in (parameters or {}).items()
            for alias in self._aliases[name]
        }
        logits: Tensor = torch.func.functional_call(
            self.module, swapped, (), inputs, tie_weights=False
        ).logits
        return logits

    def _ordinary_words(self, count: int) -> list[int]:
        """Some words that may stand in a sentence."""
        return [int(word) for word in self.vocabulary.allowed.nonzero()[-count:, 0]]

    def _read_ids(self, ids: Tensor) -> Tensor:
        """The logits of sentences fed as ids, of which all places count."""
        return self._logits(Batch(ids=ids, mask=torch.ones_like(ids).bool(), labels=ids), None)

    def _read_embeddings(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same of their word embeddings, unless a mask says which places count."""
        mask = torch.ones_like(ids).bool() if mask is None else mask
        return self._logits(Batch(embeddings=self.embed(ids), mask=mask, labels=ids), None)

    def _refuse_unreachable(self, ids: Tensor, by_ids: Tensor) -> None:
        """Refuses a model that does not accept embeddings as it accepts ids: gradient attacks
        optimise embeddings."""
        try:
            reached = self._read_embeddings(ids)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise GradleakError(
                f"{self.name} does not take input embeddings, which gradient attacks optimise:"
                f" {error}"
            ) from error
        if not same_logits(by_ids, reached):
            raise GradleakError(
                f"The embeddings of {self.name} cannot be reached: a sentence fed as ids and the"
                " same sentence fed as word embeddings give different results."
            )

    def _pad(self, ids: Tensor) -> Tensor:
        """Sentences with some padding behind them."""
        return F.pad(ids, (0, 3), value=self.vocabulary.pad)

    @torch.no_grad()
    def _probe_framed(self) -> bool:
        """Refuses a model that does not accept embeddings as it accepts ids; tells whether
        padding changes anything."""
        words = self._ordinary_words(5)
        ids = torch.tensor(
            [[*self.vocabulary.prefix, *words, *self.vocabulary.suffix]], device=self.device
        )
        by_ids = self._read_ids(ids)
        self._refuse_unreachable(ids, by_ids)
        padded = self._pad(ids)
        # RoBERTa: the attacker's embeddings could never match, and every search would look failed
        if self.attend_padding and not same_logits(
            self._read_ids(padded), self._read_embeddings(padded)
        ):
            raise GradleakError(
                f"{self.name} numbers positions by its padding tokens: attend_padding cannot be"
                " audited on it."
            )
        return self._ignores_padding(ids, by_ids)

    def _ignores_padding(self, ids: Tensor, by_ids: Tensor) -> bool:
        """Whether padding that is masked changes nothing."""
        padded = self._read_embeddings(self._pad(ids), F.pad(torch.ones_like(ids).bool(), (0, 3)))
        return same_logits(by_ids, padded[:, : by_ids.shape[1]])


def vocabulary_of(name: str, model: Any, tokenizer: Any) -> Vocabulary:
    """Word embeddings, which words may stand inside a sentence, and what the tokenizer puts
    around one."""
    try:
        table = model.get_input_embeddings().weight.detach()
    except (NotImplementedError, AttributeError) as error:
        raise GradleakError(
            f"The word embeddings of {name} cannot be reached through get_input_embeddings()."
        ) from error
    allowed = torch.zeros(table.shape[0], dtype=torch.bool)
    special = set(tokenizer.all_special_ids)
    for token, number in tokenizer.get_vocab().items():
        allowed[number] = number not in special and not UNUSED.match(token)
    # One word with and without its frame shows what the tokenizer puts around a sentence.
    framed, bare = (
        tokenizer("a", add_special_tokens=framing)["input_ids"] for framing in (True, False)
    )
    start = next(place for place in range(len(framed)) if framed[place : place + len(bare)] == bare)
    pad = (
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id or 0
    )
    return Vocabulary(
        embeddings=table,
        allowed=allowed.to(table.device),
        prefix=tuple(framed[:start]),
        suffix=tuple(framed[start + len(bare) :]),
        pad=int(pad),
        specials=tuple(sorted(special)),
    )


def longest_of(config: Any, tokenizer: Any) -> int:
    """The most tokens the model reads."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 10**9)
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= 2  # their positions start after the padding id
    return min(positions, int(min(tokenizer.model_max_length, 10**9)))


def same_logits(one: Tensor, other: Tensor) -> bool:
    """Whether two passes gave the same, up to the rounding of another order of sums."""
    return torch.allclose(one, other, atol=1e-4, rtol=1e-3)


def name_example(example: Example, place: int) -> str:
    """How an error names an example: by its line where that is known, never by its text."""
    return example.where or f"Text {place} of the batch"
