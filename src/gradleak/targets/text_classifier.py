"""An opened Hugging Face sequence classifier, reached through the library's own interfaces only."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gradleak.core.batch import Batch, Example, PrivateBatch
from gradleak.core.errors import GradleakError
from gradleak.core.parts import Part
from gradleak.core.target import Target, Vocabulary
from gradleak.targets.freezing import frozen_parameters
from gradleak.targets.parts import groups_of, parts_of

UNUSED = re.compile(r"^[\[<]unused_?\d+[\]>]$")  # BERT's spare ids: never in a text


class TextClassifier(Target):
    """Eval mode, gradients off: clients and attackers differentiate copies of the parameters, so no `.grad` is left behind."""

    def __init__(self, name: str, model: Any, tokenizer: Any, frozen: Sequence[str] = (), attend_padding: bool = False) -> None:
        self.name = name
        self.module: nn.Module = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.attend_padding = attend_padding
        self.classes = _classes(name, model.config)
        self.vocabulary = _vocabulary(name, model, tokenizer)
        self.hidden_size = int(self.vocabulary.embeddings.shape[1])
        self._groups = groups_of(model, self.classes)
        parts = parts_of(model, self._groups)
        left_out = frozen_parameters(name, parts, self._groups, frozen)
        self._parts = tuple(part for part in parts if part.parameter not in left_out)
        self._frozen_parts = tuple(part for part in parts if part.parameter in left_out)
        self._parameters = {parameter: value for parameter, value in model.named_parameters() if parameter not in left_out}
        self._aliases = _aliases(model)
        self.longest = _longest(model.config, tokenizer)
        self.padding_is_free = self._probe()

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return self._groups

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._parts

    @property
    def frozen_parts(self) -> tuple[Part, ...]:
        return self._frozen_parts

    def losses(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Float[Tensor, "*lead"]:
        logits = self._logits(batch, parameters)
        labels = batch.labels.flatten() if batch.labels.dtype == torch.int64 else batch.labels.flatten(0, -2)
        return F.cross_entropy(logits, labels, reduction="none").view(batch.lead)

    def probabilities(self, batch: Batch) -> Float[Tensor, "*lead classes"]:
        return self._logits(batch, None).softmax(-1).view(*batch.lead, self.classes)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            list(ids)
            for ids in self.tokenizer(list(texts), add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
        ]

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        # The same clean-up of spaces before punctuation whatever the library's default: scores compare strings.
        text = self.tokenizer.decode(list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=True)
        return str(text)

    def private_batch(self, examples: Sequence[Example]) -> PrivateBatch:
        rows = self.encode([example.text for example in examples])
        specials = len(self.vocabulary.prefix) + len(self.vocabulary.suffix)
        for place, (example, row) in enumerate(zip(examples, rows, strict=True), start=1):
            self._refuse_unfit(place, example, len(row), specials)
        lengths = tuple(len(row) for row in rows)
        if not self.padding_is_free and len(set(lengths)) > 1:
            raise GradleakError(
                f"{self.name} reads padding, so a batch needs sentences of one length; these have {sorted(set(lengths))} tokens. "
                "Use --batch-size 1 or sentences of equal length."
            )
        ids = torch.full((len(rows), max(lengths)), self.vocabulary.pad)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        labels = torch.tensor([example.label for example in examples])
        batch = Batch(ids=ids.to(self.device), mask=self.attention_mask(lengths), labels=labels.to(self.device))
        return PrivateBatch(batch, tuple(examples), lengths)

    def _refuse_unfit(self, place: int, example: Example, tokens: int, specials: int) -> None:
        # Errors end up in logs: they never quote a text.
        if tokens <= specials:
            raise GradleakError(f"Text {place} of the batch is empty after tokenising: remove it from the data.")
        if tokens > self.longest:
            raise GradleakError(
                f"Text {place} of the batch has {tokens} tokens; {self.name} reads at most {self.longest}: shorten or remove it."
            )
        if example.label is None:
            raise GradleakError(
                f"Text {place} of the batch has no label, which {self.name} is trained on: name the data's label column."
            )
        if not 0 <= example.label < self.classes:
            raise GradleakError(
                f"Label {example.label} is outside the {self.classes} classes of {self.name}: "
                f"use labels 0 to {self.classes - 1}, or a target with more classes (classes=…)."
            )

    def _logits(self, batch: Batch, parameters: Mapping[str, Tensor] | None) -> Float[Tensor, "examples classes"]:
        tokens = batch.mask.shape[-1]
        inputs: dict[str, Tensor] = {"attention_mask": batch.mask.reshape(-1, tokens).long()}
        if batch.ids is not None:
            inputs["input_ids"] = batch.ids.reshape(-1, tokens)
        elif batch.embeddings is not None:
            inputs["inputs_embeds"] = batch.embeddings.reshape(-1, tokens, self.hidden_size)
        # functional_call's own tie_weights leaves the copies behind in a module that is registered under two names.
        swapped = {alias: value for name, value in (parameters or {}).items() for alias in self._aliases[name]}
        logits: Tensor = torch.func.functional_call(self.module, swapped, (), inputs, tie_weights=False).logits
        return logits

    @torch.no_grad()
    def _probe(self) -> bool:
        """Refuses a model that does not accept embeddings as it accepts ids; tells whether padding changes anything."""
        ids = torch.tensor(
            [[*self.vocabulary.prefix, *_ordinary(self.vocabulary, 5), *self.vocabulary.suffix]], device=self.device
        )
        padded = F.pad(ids, (0, 3), value=self.vocabulary.pad)
        label = torch.zeros(1, dtype=torch.int64, device=self.device)
        by_ids = self._logits(Batch(ids=ids, mask=torch.ones_like(ids).bool(), labels=label), None)
        try:
            by_embeddings = self._logits(Batch(embeddings=self.embed(ids), mask=torch.ones_like(ids).bool(), labels=label), None)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise GradleakError(
                f"{self.name} does not take input embeddings, which gradient attacks optimise: {error}"
            ) from error
        if not torch.allclose(by_ids, by_embeddings, atol=1e-4, rtol=1e-3):
            raise GradleakError(
                f"The embeddings of {self.name} cannot be reached: "
                "a sentence fed as ids and the same sentence fed as word embeddings give different results."
            )
        everything = torch.ones_like(padded).bool()
        if self.attend_padding and not torch.allclose(
            self._logits(Batch(ids=padded, mask=everything, labels=label), None),
            self._logits(Batch(embeddings=self.embed(padded), mask=everything, labels=label), None),
            atol=1e-4,
            rtol=1e-3,
        ):  # RoBERTa: the attacker's embeddings could never match, and every search would look failed
            raise GradleakError(f"{self.name} numbers positions by its padding tokens: attend_padding cannot be audited on it.")
        mask = torch.arange(padded.shape[1], device=self.device)[None] < ids.shape[1]
        with_padding = self._logits(Batch(embeddings=self.embed(padded), mask=mask, labels=label), None)
        return torch.allclose(by_ids, with_padding, atol=1e-4, rtol=1e-3)


def _ordinary(vocabulary: Vocabulary, count: int) -> list[int]:
    return [int(word) for word in vocabulary.allowed.nonzero()[-count:, 0]]


def _classes(name: str, config: Any) -> int:
    if config.problem_type == "regression" or config.num_labels < 2:
        raise GradleakError(
            f"{name} is a regression model ({config.num_labels} output): gradleak audits classifiers. "
            "Use one with two or more labels."
        )
    if config.problem_type == "multi_label_classification":
        raise GradleakError(f"{name} predicts several labels at once: gradleak audits single-label classifiers.")
    return int(config.num_labels)


def _vocabulary(name: str, model: Any, tokenizer: Any) -> Vocabulary:
    try:
        table = model.get_input_embeddings().weight.detach()
    except (NotImplementedError, AttributeError) as error:
        raise GradleakError(f"The word embeddings of {name} cannot be reached through get_input_embeddings().") from error
    allowed = torch.zeros(table.shape[0], dtype=torch.bool)
    special = set(tokenizer.all_special_ids)
    for token, number in tokenizer.get_vocab().items():
        allowed[number] = number not in special and not UNUSED.match(token)
    # One word with and without its frame shows what the tokenizer puts around a sentence.
    framed, bare = (tokenizer("a", add_special_tokens=framing)["input_ids"] for framing in (True, False))
    start = next(place for place in range(len(framed)) if framed[place : place + len(bare)] == bare)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    return Vocabulary(
        embeddings=table,
        allowed=allowed.to(table.device),
        prefix=tuple(framed[:start]),
        suffix=tuple(framed[start + len(bare) :]),
        pad=int(pad),
        specials=tuple(sorted(special)),
    )


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """For every parameter name, the names under which modules hold it: more than one where weights are tied."""
    holders: dict[int, list[str]] = {}
    for module_name, part in model.named_modules():  # each module once, whatever the number of its names
        for attribute, parameter in part.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(f"{module_name}.{attribute}".lstrip("."))
    return {name: holders[id(parameter)] for name, parameter in model.named_parameters()}


def _longest(config: Any, tokenizer: Any) -> int:
    positions = int(getattr(config, "max_position_embeddings", 0) or 10**9)
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= 2  # their positions start after the padding id
    return min(positions, int(min(tokenizer.model_max_length, 10**9)))
