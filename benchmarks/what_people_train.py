"""What is rebuilt of what people train: python benchmarks/what_people_train.py [--only NAME …].

Made-up messages are trained on in ordinary PyTorch loops: heads for the class of each word, several
labels at once and numbers; language models on padded and packed texts; accumulated, in bf16, with
frozen parts. Each update is captured as a user would, and attacked by an attacker who knows how
many messages there were (energy is told their lengths too) and no label. A line says how many
tokens stand at their places in the guesses, how many messages came back word for word, how many
were proven, whether a proven one was wrong, and the seconds.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

import gradleak
from gradleak.core.batch import Batch, Example
from gradleak.core.streams import Streams
from gradleak.datasets import Canaries
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.minilm import MiniLM
from gradleak.targets.opened import OpenedTransformer
from gradleak.targets.tiny import redraw
from gradleak.targets.token_classifier import NO_CLASS

TOKENS, SEVERAL, NUMBERS = "token_classification", "multi_label_classification", "regression"
WIDTH, LAYERS = 256, 4  # of the random language models, over MiniLM's words


@dataclass(frozen=True)
class Setting:
    """A way to train, as people do."""

    model: Callable[[], OpenedTransformer]
    size: int = 4  # messages in an update
    accumulated: bool = False  # one by one
    divided: bool = False  # each loss by their number
    packed: str = ""  # into one row, whose positions begin "anew" with each text, or go "on"
    autocast: bool = False
    half: bool = False  # weights in bf16
    frozen: tuple[str, ...] = ()  # modules that do not train
    attack: str = "span"
    told: tuple[str, ...] = ()  # of defenses


@cache
def encoder(problem: Any = "single_label_classification", classes: int = 2) -> OpenedTransformer:
    """MiniLM with a random head."""
    opened = MiniLM(problem_type=problem, classes=classes).open(torch.device("cpu"))
    assert isinstance(opened, OpenedTransformer)
    return opened


@cache
def decoder(shape: str) -> OpenedTransformer:
    """A random language model over MiniLM's words, shaped like GPT-2 or Llama; texts begin with
    [CLS] and end with [SEP]."""
    import transformers

    tokenizer = copy.deepcopy(encoder().tokenizer)
    tokenizer.eos_token = tokenizer.sep_token
    common = {"vocab_size": len(tokenizer), "attn_implementation": "eager"}
    if shape == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 8, "n_positions": 256}
        config: Any = transformers.GPT2Config(**common, **sizes)
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
        config = transformers.LlamaConfig(
            **common,
            **sizes,
            num_key_value_heads=8,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=256,
        )
        model = transformers.LlamaForCausalLM(config)
    redraw(model, Streams.root("decoder", 0))
    return CausalLanguageModel(shape, model, tokenizer, loss_over="tokens")


def tagger() -> OpenedTransformer:
    return encoder(TOKENS, 9)


def llama() -> OpenedTransformer:
    return decoder("llama")


EMBEDDINGS = ("bert.embeddings",)
FIRST_LAYERS = (*EMBEDDINGS, "bert.encoder.layer.0", "bert.encoder.layer.1")
BF16 = ("rounding:dtype=bf16",)
SETTINGS = {
    "class of each word, 1": Setting(tagger, 1),
    "class of each word, 4": Setting(tagger),
    "several labels, 4": Setting(lambda: encoder(SEVERAL, 6)),
    "numbers, 4": Setting(lambda: encoder(NUMBERS, 1)),
    "causal, padded, 4": Setting(llama),
    "causal, packed, positions anew, 4": Setting(llama, packed="anew"),
    "causal, packed, positions go on, 4": Setting(llama, packed="on"),
    "GPT-2, padded, 4": Setting(lambda: decoder("gpt2")),
    "GPT-2, packed, positions anew, 4": Setting(lambda: decoder("gpt2"), packed="anew"),
    "accumulation 4 x 1, summed": Setting(encoder, accumulated=True),
    "accumulation 4 x 1, divided": Setting(encoder, accumulated=True, divided=True),
    "class of each word, accumulation 4 x 1": Setting(tagger, accumulated=True),
    "causal, accumulation 4 x 1": Setting(llama, accumulated=True, divided=True),
    "embeddings frozen, 4": Setting(encoder, frozen=EMBEDDINGS),
    "embeddings and layers 1-2 frozen, 1": Setting(
        encoder, 1, frozen=FIRST_LAYERS, attack="energy:restarts=0"
    ),
    "class of each word, the same frozen, 1": Setting(
        tagger, 1, frozen=FIRST_LAYERS, attack="energy:restarts=0"
    ),
    "bf16 autocast, 1": Setting(encoder, 1, autocast=True),
    "bf16 autocast, told, 1": Setting(encoder, 1, autocast=True, told=BF16),
    "bf16 autocast, 4": Setting(encoder, autocast=True),
    "bf16 weights, 1": Setting(encoder, 1, half=True),
    "bf16 weights, energy, 1": Setting(encoder, 1, half=True, attack="energy:restarts=0"),
    "bf16 weights, 4": Setting(encoder, half=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), help="settings by name")
    parser.add_argument("--messages", type=int, default=12)
    parser.add_argument("--first", type=int, default=0, help="the first message, counted from 0")
    parser.add_argument("--most", type=int, default=24, help="tokens of a message, at most")
    parser.add_argument("--seconds", type=float, default=120, help="for one update")
    chosen = parser.parse_args()
    every = list_messages(chosen.most)[chosen.first : chosen.first + chosen.messages]
    columns = f"{'n':>4}{'tokens':>9}{'exact':>7}{'proven':>8}{'wrong':>7}{'s':>7}{'cpu s':>7}"
    print(f"{'setting':<40}{'attack':<20}{columns}")
    for name in chosen.only:
        setting = SETTINGS[name]
        began, worked, tally = time.monotonic(), time.process_time(), torch.zeros(5).int()
        for start in range(0, len(every) // setting.size * setting.size, setting.size):
            tally += run(setting, every[start : start + setting.size], chosen.seconds)
        tokens, right, exact, proven, wrong = tally.tolist()
        print(
            f"{name:<40}{setting.attack:<20}{len(every) // setting.size * setting.size:>4}"
            f"{100 * right / tokens:>8.1f}%{exact:>7}{proven:>8}{wrong:>7}"
            f"{time.monotonic() - began:>7.0f}{time.process_time() - worked:>7.0f}",
            flush=True,
        )


def list_messages(most: int) -> list[Example]:
    """Returns made-up messages of so many tokens at most."""
    target = encoder()
    return [one for one in Canaries().load() if len(target.encode([one.text])[0]) <= most]


def run(setting: Setting, messages: Sequence[Example], seconds: float) -> torch.Tensor:
    """Trains on messages and attacks the update; returns tokens, those found at their places, and
    messages word for word, proven and wrongly proven."""
    target = setting.model()
    batch = target.private_batch(label(target, messages)).batch
    model = copy.deepcopy(target.module).requires_grad_(True)
    for name in setting.frozen:
        model.get_submodule(name).requires_grad_(False)
    if setting.half:
        model = model.to(torch.bfloat16)
    know = ["batch_size", "lengths"] if setting.attack.startswith("energy") else ["batch_size"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update.safetensors"
        with gradleak.capture(
            model, path, tokenizer=target.tokenizer, know=know, defense=setting.told
        ):
            for inputs in list_calls(setting, batch):
                with torch.autocast("cpu", torch.bfloat16) if setting.autocast else nullcontext():
                    loss = model(**inputs).loss
                (loss / setting.size if setting.divided else loss).backward()
        found = gradleak.reconstruct(
            path,
            model=model,
            tokenizer=target.tokenizer,
            attacks=setting.attack,
            time_limit=seconds,
        )
    assert batch.ids is not None
    truth = [row[kept].tolist() for row, kept in zip(batch.ids, batch.mask, strict=True)]
    (attacked,) = found.attacked.values()
    (guess,) = attacked.found
    texts = [list(text) for row in guess.sentences for text in target.split_row(row)]
    return compare(target, truth, texts, guess.certified)


def label(target: OpenedTransformer, messages: Sequence[Example]) -> list[Example]:
    """Returns messages with labels of the kind that the model learns, made up from their
    words."""
    made = []
    for number, one in enumerate(messages):
        words = one.text.split()
        labels: dict[str, Any] = {
            TOKENS: tuple(len(word) % 9 for word in words),
            SEVERAL: tuple(int(len(words) % (place + 2) == 0) for place in range(6)),
            NUMBERS: len(one.text) / 50 - number % 2,
        }
        config: Any = target.module.config
        tags = type(target.module).__name__.endswith("ForTokenClassification")
        given = labels.get(TOKENS if tags else config.problem_type, one.label)
        made.append(Example(one.text, given, one.secrets))
    return made


def list_calls(setting: Setting, batch: Batch) -> Iterator[dict[str, torch.Tensor]]:
    """Yields what the model is called with, in turn, for one update."""
    assert batch.ids is not None
    causal = batch.labels.shape == batch.ids.shape and bool((batch.labels >= 0).all())
    labels = batch.ids.masked_fill(~batch.mask, NO_CLASS) if causal else batch.labels
    if setting.packed:
        ids = batch.ids[batch.mask][None]
        if setting.packed == "on":
            yield {"input_ids": ids, "labels": ids}
            return
        places = torch.cat([torch.arange(count) for count in batch.mask.sum(1).tolist()])[None]
        # As TRL's collator: no text predicts the first token of the next
        packed = ids.masked_fill(places == 0, NO_CLASS)
        yield {"input_ids": ids, "position_ids": places, "labels": packed}
        return
    if labels.is_floating_point() and labels.shape[-1] == 1:
        labels = labels[:, 0]
    if setting.half and labels.is_floating_point():
        labels = labels.to(torch.bfloat16)
    whole = {"input_ids": batch.ids, "attention_mask": batch.mask.long(), "labels": labels}
    if not setting.accumulated:
        yield whole
        return
    for place, count in enumerate(batch.mask.sum(1).tolist()):
        part = {name: one[place : place + 1] for name, one in whole.items()}
        yield {name: one[:, :count] if one.ndim > 1 else one for name, one in part.items()}


def compare(
    target: OpenedTransformer,
    truth: Sequence[list[int]],
    guesses: Sequence[list[int]],
    certified: bool,
) -> torch.Tensor:
    """Compares texts with guesses, each with the one that it is paired with best."""
    special = {*target.vocabulary.specials, target.vocabulary.pad}
    padded = [*guesses, *[[] for _ in range(len(truth) - len(guesses))]]

    def count(row: list[int], guess: list[int]) -> int:
        pairs = zip(row, guess, strict=False)
        return sum(one == other for one, other in pairs if one not in special)

    best = max(
        permutations(padded, len(truth)) if len(padded) <= 6 else [tuple(padded[: len(truth)])],
        key=lambda order: sum(map(count, truth, order)),
    )
    exact = sum(row == guess for row, guess in zip(truth, best, strict=True))
    wrong = sum(guess not in truth for guess in guesses) if certified else 0
    tokens = sum(token not in special for row in truth for token in row)
    right = sum(map(count, truth, best))
    return torch.tensor([tokens, right, exact, len(truth) * certified, wrong]).int()


if __name__ == "__main__":
    main()
