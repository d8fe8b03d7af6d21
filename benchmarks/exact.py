"""How much span or energy gets back, and how long it takes: python benchmarks/exact.py --data cola
--batch-size 1 4 8 --limit 20.

Prints a line a batch and, for each batch size, the share of sentences that came back word for word,
of batches that were certified, of certified batches that were wrong (must be zero), and seconds a
batch, processor time and wall clock, and the peak of the process's memory so far. `--target llama`
is a random model of that kind with MiniLM's words, as wide as `--width` says.
"""

import argparse
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import torch

from gradleak.audit import AuditSpec
from gradleak.audit.client import observe, private_batches, private_examples
from gradleak.core.attack import Bench
from gradleak.core.batch import Example, PrivateBatch
from gradleak.core.memory import parse_memory
from gradleak.core.prior import Prior
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.targets.minilm import installed_folder

LLAMA = "llama"
SHORTEST = 4  # words of a sentence, on the safe side of the mean


@dataclass(frozen=True)
class Line:
    """One batch."""

    tokens: int
    right: int
    sentences: int
    certified: bool
    cpu_seconds: float
    seconds: float
    note: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--width", type=int, default=1024, help="of --target llama")
    parser.add_argument(
        "--attack", default="span", help="span, or energy, which is told the lengths"
    )
    parser.add_argument("--data", nargs="+", default=["canaries"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1])
    parser.add_argument("--limit", type=int, default=10, help="batches")
    parser.add_argument("--skip", type=int, default=0, help="batches left out at the beginning")
    parser.add_argument("--seconds", type=float, default=None, help="for each batch")
    parser.add_argument("--memory", default="", help="that the process may hold, 4GB say")
    parser.add_argument("--layers", default="", help="all that is seen; everything, if not given")
    parser.add_argument("--modules", nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=[0],
        help="join the data's sentences to texts of so many tokens",
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.target == LLAMA:
            chosen.target = make_llama(Path(folder) / f"llama-{chosen.width}", chosen.width)
        for data in chosen.data:
            for size in chosen.batch_size:
                for tokens in chosen.tokens:
                    measure(chosen, data, size, tokens)


def make_llama(folder: Path, width: int) -> str:
    """Saves a random Llama of four layers, tied embeddings and four queries a key."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(installed_folder())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        intermediate_size=8 * width // 3 // 64 * 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def measure(chosen: argparse.Namespace, data: str, size: int, tokens: int) -> None:
    settings = {
        "target": chosen.target,
        "data": data,
        "attacks": [chosen.attack],
        "limit": chosen.limit,
        "batch_size": size,
    }
    view = (
        {"name": "parts", "layers": chosen.layers, "modules": chosen.modules}
        if chosen.layers
        else "everything"
    )
    spec = AuditSpec.from_plain(settings | {"view": view})
    target = spec.target.open(torch.device(chosen.device))
    prior = spec.prior.open(target)
    lines = []
    for index, private in enumerate(
        private_batches(spec, target, joined(spec, target, tokens) if tokens else None)
    ):
        if index < chosen.skip:
            continue
        memory = parse_memory(chosen.memory) if chosen.memory else None
        lines.append(one_batch(spec, target, prior, private, index, chosen.seconds, memory))
        print(f"  {data} B={size} batch {index}: {lines[-1]}", flush=True)
    right, sentences = sum(line.right for line in lines), sum(line.sentences for line in lines)
    wrong = sum(line.certified and line.right < line.sentences for line in lines)
    print(
        f"{chosen.attack} {chosen.target} {data}"
        f" B={size}{f' of {tokens} tokens' if tokens else ''}: {len(lines)} batches, exact"
        f" {right}/{sentences} = {100 * right / sentences:.1f} %, certified"
        f" {sum(line.certified for line in lines)}, of these wrong {wrong}, tokens"
        f" {min(line.tokens for line in lines)}-{max(line.tokens for line in lines)}, cpu"
        f" {mean(line.cpu_seconds for line in lines):.1f} s (median"
        f" {median(line.cpu_seconds for line in lines):.1f}), wall"
        f" {mean(line.seconds for line in lines):.2f} s (median"
        f" {median(line.seconds for line in lines):.2f}), {chosen.device}, peak"
        f" {1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9:.1f} GB",
        flush=True,
    )


def joined(spec: AuditSpec, target: Target, tokens: int) -> list[Example]:
    """Texts of so many tokens, or a few less: the data's sentences one after the other, cut
    between words."""
    sentences = private_examples(replace(spec, limit=spec.limit * (tokens // SHORTEST + 1)))
    words = iter([word for sentence in sentences for word in sentence.text.split()])
    texts = [next(words) for _ in range(spec.limit * spec.batch_size)]
    for place, text in enumerate(texts):
        while len(target.encode([longer := f"{text} {next(words)}"])[0]) <= tokens:
            text = longer
        texts[place] = text
    return [Example(text, sentence.label) for text, sentence in zip(texts, sentences, strict=False)]


def one_batch(
    spec: AuditSpec,
    target: Target,
    prior: Prior,
    private: PrivateBatch,
    index: int,
    limit: float | None,
    memory: int | None,
) -> Line:
    (attack,) = spec.attacks
    observation = observe(spec, target, private, index).limit_to(spec.facts_for(attack))
    deadline = None if limit is None else time.monotonic() + limit
    bench = Bench(Streams.root("attacker", spec.seed), prior, deadline=deadline, memory=memory)
    processor, wall = time.process_time(), time.monotonic()
    (guess,) = attack.reconstruct([observation], bench)
    processor, wall = time.process_time() - processor, time.monotonic() - wall
    assert private.batch.ids is not None
    rows = zip(private.batch.ids.tolist(), private.lengths, strict=True)
    secrets = [tuple(row[:length]) for row, length in rows]
    left = list(guess.sentences)
    right = 0
    for secret in secrets:
        if secret in left:
            left.remove(secret)
            right += 1
    return Line(
        sum(private.lengths),
        right,
        len(secrets),
        guess.certified,
        round(processor, 2),
        round(wall, 2),
        guess.note,
    )


if __name__ == "__main__":
    main()
