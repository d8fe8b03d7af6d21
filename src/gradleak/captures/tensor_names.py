"""Names that were sent, matched with a model's: through wrappers, tied weights, and lists without
names."""

from collections.abc import Mapping, Sequence

from gradleak.captures.header import CaptureError, quote
from gradleak.core.errors import did_you_mean

# What wrappers put into names: DataParallel and DistributedDataParallel, Opacus, torch.compile,
# fully sharded and checkpointed layers, and peft's adapters, whose own is called "default"
WRAPPERS = frozenset(
    "module _module _orig_mod _fsdp_wrapped_module _checkpoint_wrapped_module default"
    " modules_to_save base_layer".split()
)
PEFT = ("base_model", "model")  # peft's two, at the beginning alone: models have a "model" too
# A language model's head and its word embedding are one parameter in many models. Which of both
# names it has depends on who walks through the model.
HEADS = (
    "lm_head.weight embed_out.weight generator_lm_head.weight decoder.weight"
    " cls.predictions.decoder.weight lm_head.decoder.weight vocab_projector.weight"
).split()
WORDS = (
    "wte.weight word_embeddings.weight embed_tokens.weight tokens_embed.weight embed_in.weight"
    " shared.weight word_embedding.weight"
).split()
# What else masked language models tie: the head's bias is its decoder's too
BIASES = {"predictions.decoder.bias": "predictions.bias", "lm_head.decoder.bias": "lm_head.bias"}


def match_names(
    names_and_shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the model's name for each name that was sent, after checking every shape.

    Tensors of the model that were not sent are a view. `aliases` are further names that the model
    itself has for its tensors, as it has for tied ones; those of usual architectures are known.
    """
    if not expected:
        raise CaptureError("The model has no parameters to match: give an opened model.")
    if _has_no_names(names_and_shapes) and not names_and_shapes.keys() <= expected.keys():
        matched = _match_in_order(names_and_shapes, list(expected), expected)
    else:
        matched = _match_by_name(names_and_shapes, expected, aliases or {})
    for sent, name in matched.items():
        if tuple(names_and_shapes[sent]) != tuple(expected[name]):
            raise CaptureError(
                f"the update's {quote(sent)} has the shape {_write(names_and_shapes[sent])} and the"
                f" model's {quote(name)} {_write(expected[name])}: name the model that the update"
                " was computed on."
            )
    return matched


def strip_wrappers(name: str) -> str:
    """A name without what wrappers put into it, in whatever order they were put around the
    model."""
    parts = name.split(".")
    kept: list[str] = []
    while parts:
        if not kept and tuple(parts[:2]) == PEFT and len(parts) > 2:
            parts = parts[2:]
        elif parts[0] in WRAPPERS and len(parts) > 1:
            parts = parts[1:]
        else:
            kept.append(parts.pop(0))
    return ".".join(kept)


def _has_no_names(sent: Mapping[str, Sequence[int]]) -> bool:
    return bool(sent) and all(name.isascii() and name.isdecimal() for name in sent)


def _match_in_order(
    sent: Mapping[str, Sequence[int]], names: list[str], expected: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """Arrays that are numbered only, in the model's order; a state_dict ends with a tied head."""
    ordered = sorted(sent, key=int)
    if [int(number) for number in ordered] != list(range(len(ordered))):
        raise CaptureError(
            f"the update's {len(ordered)} tensors are numbered with gaps or twice, so that their"
            " order does not say which is which: send all of them, or their names."
        )
    if len(ordered) == len(names) + 1:
        last, words = tuple(sent[ordered[-1]]), _word_embeddings(names)
        if len(words) == 1 and tuple(expected[words[0]]) == last:
            names = [*names, words[0]]
    if len(ordered) != len(names):
        raise CaptureError(
            f"the update has {len(ordered)} tensors without names and the model {len(names)}, so"
            " that their order does not say which is which: send names, or name the model that the"
            " update was computed on, with the same parameters frozen."
        )
    return dict(zip(ordered, names, strict=True))


def _match_by_name(
    sent: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    aliases: Mapping[str, str],
) -> dict[str, str]:
    bare: dict[str, list[str]] = {}  # the model may be wrapped too
    for name in expected:
        bare.setdefault(strip_wrappers(name), []).append(name)
    for alias, name in aliases.items():
        if name in expected:
            bare.setdefault(strip_wrappers(alias), [name])
    tied = _find_tied(expected)
    matched: dict[str, str] = {}
    sender: dict[str, str] = {}  # whose name each of the model's was matched with
    for name in sent:
        own = _find_own(name, expected, bare, tied)
        other = sender.setdefault(own, name)
        if other != name and strip_wrappers(other) == strip_wrappers(name):
            raise CaptureError(
                f"the update's {quote(other)} and {quote(name)} are both the model's {quote(own)}:"
                " keep one of them."
            )
        matched[name] = own
    return matched


def _find_own(
    name: str,
    expected: Mapping[str, Sequence[int]],
    bare: Mapping[str, list[str]],
    tied: Mapping[str, str],
) -> str:
    """The model's name for one that was sent."""
    if name in expected:
        return name
    stripped = strip_wrappers(name)
    found = bare.get(stripped, [])
    if len(found) > 1:
        raise CaptureError(
            f"the update's {quote(name)} may be the model's {quote(found[0])} or"
            f" {quote(found[1])}: send the model's own names."
        )
    if found:
        return found[0]
    for end, other in tied.items():
        if _ends_with(stripped, end):
            return other
    for copy, own in BIASES.items():
        if _ends_with(stripped, copy) and (other := stripped.removesuffix(copy) + own) in bare:
            return bare[other][0]
    near = did_you_mean(stripped, list(bare)).removesuffix(".")
    raise CaptureError(
        f"the update's {quote(name)} is no tensor of the model{near}, whose first is"
        f" {quote(next(iter(expected)))}: name the model that the update was computed on."
    )


def _find_tied(expected: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """What the other names of a tied tensor end with, and the name that the model has: its only
    word embedding where it has no head of its own, or its head where it has no embedding."""
    found = [*_word_embeddings(expected), *_find(expected, HEADS)]
    return dict.fromkeys((*HEADS, *WORDS), found[0]) if len(found) == 1 else {}


def _word_embeddings(names: Mapping[str, Sequence[int]] | list[str]) -> list[str]:
    return _find(names, WORDS)


def _find(names: Mapping[str, Sequence[int]] | list[str], ends: Sequence[str]) -> list[str]:
    return [name for name in names if any(_ends_with(strip_wrappers(name), end) for end in ends)]


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _write(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "of one number"
