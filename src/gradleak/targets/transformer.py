"""What opened Hugging Face text models share, whatever they predict; reached through the
library's own interfaces only."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradleak.core.batch import Batch, Example
from gradleak.core.errors import GradleakError
from gradleak.core.parts import Part
from gradleak.core.target import Vocabulary
from gradleak.targets.freezing import frozen_parameters
from gradleak.targets.parts import groups_of, parts_of

UNUSED = re.compile(r"^[\[<]unused_?\d+[\]>]$")  # BERT's spare ids: never in a text


@dataclass(frozen=True, eq=False)
class Weights:
    """A model's parameters: those that train by name, by role and by part, and those that do
    not."""

    parameters: Mapping[str, Tensor]
    groups: Mapping[str, tuple[str, ...]]
    parts: tuple[Part, ...]
    frozen_parts: tuple[Part, ...]


def weights_of(name: str, model: Any, classes: int, frozen: Sequence[str]) -> Weights:
    """Sorts the parameters; `frozen` names groups, modules or layers."""
    groups = groups_of(model, classes)
    parts = parts_of(model, groups)
    left_out = frozen_parameters(name, parts, groups, frozen)
    return Weights(
        {
            parameter: value
            for parameter, value in model.named_parameters()
            if parameter not in left_out
        },
        groups,
        tuple(part for part in parts if part.parameter not in left_out),
        tuple(part for part in parts if part.parameter in left_out),
    )


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


def aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """For every parameter name, the names under which modules hold it: more than one where
    weights are tied."""
    holders: dict[int, list[str]] = {}
    # Each module once, whatever the number of its names
    for module_name, part in model.named_modules():
        for attribute, parameter in part.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(f"{module_name}.{attribute}".lstrip("."))
    return {name: holders[id(parameter)] for name, parameter in model.named_parameters()}


def longest_of(config: Any, tokenizer: Any) -> int:
    """The most tokens the model reads."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 10**9)
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= 2  # their positions start after the padding id
    return min(positions, int(min(tokenizer.model_max_length, 10**9)))


def logits_of(
    module: nn.Module,
    aliases: Mapping[str, Sequence[str]],
    batch: Batch,
    parameters: Mapping[str, Tensor] | None,
) -> Float[Tensor, "examples *outputs"]:
    """One forward pass, all leading axes as one; with other parameters where they are given."""
    tokens = batch.mask.shape[-1]
    inputs: dict[str, Tensor] = {"attention_mask": batch.mask.reshape(-1, tokens).long()}
    if batch.ids is not None:
        inputs["input_ids"] = batch.ids.reshape(-1, tokens)
    elif batch.embeddings is not None:
        inputs["inputs_embeds"] = batch.embeddings.reshape(-1, tokens, batch.embeddings.shape[-1])
    # functional_call's own tie_weights leaves the copies behind in a module that is registered
    # under two names.
    swapped = {
        alias: value for name, value in (parameters or {}).items() for alias in aliases[name]
    }
    logits: Tensor = torch.func.functional_call(
        module, swapped, (), inputs, tie_weights=False
    ).logits
    return logits


def same_logits(one: Tensor, other: Tensor) -> bool:
    """Whether two passes gave the same, up to the rounding of another order of sums."""
    return torch.allclose(one, other, atol=1e-4, rtol=1e-3)


def refuse_unreachable(name: str, by_ids: Tensor, by_embeddings: Callable[[], Tensor]) -> None:
    """Refuses a model that does not accept embeddings as it accepts ids: gradient attacks
    optimise embeddings."""
    try:
        reached = by_embeddings()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise GradleakError(
            f"{name} does not take input embeddings, which gradient attacks optimise: {error}"
        ) from error
    if not same_logits(by_ids, reached):
        raise GradleakError(
            f"The embeddings of {name} cannot be reached: a sentence fed as ids and the same"
            " sentence fed as word embeddings give different results."
        )


def encode(tokenizer: Any, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
    """Token ids of each text, special ones included: however long, or cut by the tokenizer to at
    most so many."""
    cut = {"truncation": False} if longest is None else {"truncation": True, "max_length": longest}
    return [
        list(ids)
        for ids in tokenizer(list(texts), add_special_tokens=True, verbose=False, **cut)[
            "input_ids"
        ]
    ]


def kept_secrets(tokenizer: Any, example: Example, longest: int) -> Example:
    """A text that is to be cut, with those of its marked spans that stay whole."""
    from_left = getattr(tokenizer, "truncation_side", "right") == "left"

    def stays(span: tuple[int, int]) -> bool:
        reach = example.text[span[0] :] if from_left else example.text[: span[1]]
        return len(encode(tokenizer, [reach])[0]) <= longest

    return replace(example, secrets=tuple(span for span in example.secrets if stays(span)))


def decode(tokenizer: Any, ids: Sequence[int], keep_special: bool) -> str:
    """The text of token ids."""
    # The same clean-up of spaces before punctuation whatever the library's default: scores compare
    # strings.
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=True
        )
    )


def called(example: Example, place: int) -> str:
    """How an error names an example: by its line where that is known, never by its text."""
    return example.where or f"Text {place} of the batch"


def refuse_lengths(
    name: str,
    examples: Sequence[Example],
    lengths: Sequence[int],
    specials: int,
    padding_is_free: bool,
) -> None:
    """Refuses empty texts, and texts of different lengths where padding is read. Errors never
    quote a text."""
    for place, (example, tokens) in enumerate(zip(examples, lengths, strict=True), start=1):
        if tokens <= specials:
            raise GradleakError(
                f"{called(example, place)} is empty after tokenising: remove it from the data."
            )
    if not padding_is_free and len(set(lengths)) > 1:
        raise GradleakError(
            f"{name} reads padding, so a batch needs sentences of one length; these have"
            f" {sorted(set(lengths))} tokens. Use --batch-size 1 or sentences of equal length."
        )


def padded(rows: Sequence[Sequence[int]], pad: int) -> Int[Tensor, "examples tokens"]:
    """Rows of ids as one tensor."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])


def ordinary(vocabulary: Vocabulary, count: int) -> list[int]:
    """Some words that may stand in a sentence."""
    return [int(word) for word in vocabulary.allowed.nonzero()[-count:, 0]]
