"""A hunt for false certificates: python benchmarks/certificates.py --cases 20000 --workers 2 --out
certificates.jsonl.

Small random models (BERT-, RoBERTa-, MPNet-, GPT-2- and Llama-shaped, classifiers and language
models, some with words whose embeddings are equal or nearly so), small random batches (plain, with
repeated sentences, with sentences one word or one exchange apart), views, defenses and protocols. A
case is one update. It is attacked by span, or by energy where the first layer is not seen, and the
truth and guesses next to it are held against it too. Whatever is certified must be the batch
itself.

A line a group of cases (one model) is appended as it ends; run again, it goes on after the last.
With --target minilm the cases are made-up messages on MiniLM instead, with --target open models
whose labels are classes of tokens, several at once or numbers, or whose loss is a mean over tokens.
The summary counts and exits with 1 if anything was certified wrongly.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

import gradleak.audit  # noqa: F401 (registers every component)
from gradleak.attacks.certificate import certify
from gradleak.attacks.energy.energy_attack import EnergyAttack
from gradleak.attacks.span import Span
from gradleak.core.attack import Attack, Bench
from gradleak.core.batch import pad_rows
from gradleak.core.defense import Defense, protect_in_turn
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Knowledge, Observation, Round, View
from gradleak.core.protocol import Protocol
from gradleak.core.registry import find
from gradleak.core.specs import from_string
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.priors.english import FrequentWords
from gradleak.targets.causal_language_model import CausalLanguageModel
from gradleak.targets.problems import SeveralLabels
from gradleak.targets.text_classifier import TextClassifier
from gradleak.targets.tiny import Tiny, TinyCausal, redraw, tiny_tokenizer
from gradleak.targets.token_classifier import NO_CLASS, TokenClassifier
from gradleak.views import PartsView

CPU = torch.device("cpu")
Sentences = tuple[tuple[int, ...], ...]
GROUP = 25  # cases on one model
ATTACKED = 2  # every so many cases are attacked too: it takes most of the time
SHAPES = (
    "Bert",
    "Roberta",
    "MPNet",
    "GPT2",
    "Llama",
    "GPT2 language model",
    "Llama language model",
)
DEFENSES = (
    *[()] * 12,
    *[
        ("clipping:clip=0.1",),
        ("clipping:clip=1000.0",),
        ("rounding:dtype=bf16",),
        ("rounding:dtype=fp16",),
    ]
    * 2,
    ("clipping:clip=0.01", "rounding:dtype=bf16"),
    ("gaussian_noise:std=0.000001",),
    ("sign",),
    ("pruning:fraction_kept=0.5",),
)
PROTOCOLS = (
    *["fedsgd"] * 12,
    "fedsgd:dropout=true",
    "fedavg:learning_rate=1.0",
    "fedavg:learning_rate=0.01",
    "fedavg:learning_rate=0.00005",
    "fedavg:learning_rate=0.1,steps=2",
    "fedavg:learning_rate=0.01,optimiser=adamw",
)
MODULES = ("query", "key", "value", "attention_output", "ffn_in", "ffn_out")


@dataclass
class Tally:
    """What became of some cases."""

    group: str
    cases: int = 0
    special: int = 0  # with repeated sentences, or some one word or exchange apart
    judged: int = 0  # guesses held against an update
    certified: int = 0
    cases_certified: int = 0  # of which any guess was
    by_attack: int = 0  # of these, guesses of attacks
    wrongly: int = 0
    plain_true: int = 0  # true guesses where nothing is defended and all is seen
    plain_certified: int = 0
    seconds: float = 0.0
    certifying: float = 0.0
    # Why true guesses of plain cases were not certified
    notes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Case:
    """One update and the batch it was made of."""

    name: str
    observation: Observation
    batch: Sentences
    plain: bool
    special: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--target",
        default="",
        help="a target to attack with made-up messages; small random models if not given",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--attack-every",
        type=int,
        default=ATTACKED,
        help="attack one of so many updates of a group (of 25) too, which takes most of the time",
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no group is begun after that"
    )
    parser.add_argument("--out", type=Path, default=Path("certificates.jsonl"))
    chosen = parser.parse_args()
    began = time.monotonic()
    names = [f"{chosen.target or 'random'}-{number}" for number in range(-(-chosen.cases // GROUP))]
    done = {line["group"] for line in _lines(chosen.out)}
    left = [name for name in names if name not in done]
    with ProcessPoolExecutor(chosen.workers) as pool:
        deadline, every = began + chosen.seconds, chosen.attack_every
        waiting = {
            pool.submit(hunt, name, chosen.device, deadline, attacked=every) for name in left
        }
        for number, ended in enumerate(as_completed(waiting), start=1):
            tally = ended.result()
            if tally is None:
                continue
            with chosen.out.open("a") as file:
                file.write(json.dumps(asdict(tally)) + "\n")
            if tally.wrongly or number % 50 == 0:
                print(
                    f"{number} of {len(left)} groups, {time.monotonic() - began:.0f} s;"
                    f" {tally.wrong}",
                    flush=True,
                )
    sys.exit(summarise([line for line in _lines(chosen.out) if line["group"] in set(names)]))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def summarise(lines: Sequence[dict[str, Any]]) -> int:
    """Prints what came of all groups; 1 if anything was certified wrongly."""
    names = (
        "cases special judged certified cases_certified by_attack wrongly plain_true"
        " plain_certified".split()
    )
    total = {name: sum(line[name] for line in lines) for name in names}
    share = 100 * total["plain_certified"] / max(1, total["plain_true"])
    spent, certifying = (sum(line[name] for line in lines) for name in ("seconds", "certifying"))
    print(json.dumps(total))
    print(f"true guesses certified where nothing is defended and all is seen: {share:.1f} %")
    print(f"{spent:.0f} s of attacking, {certifying:.0f} s of certifying planted guesses")
    for note, count in sum((Counter(line["notes"]) for line in lines), Counter()).most_common(8):
        print(f"  {count:5} {note}")
    for line in lines:
        for wrong in line["wrong"]:
            print("WRONG", line["group"], wrong)
    return int(total["wrongly"] > 0)


def hunt(
    group: str,
    device: str = "cpu",
    deadline: float = math.inf,
    planted: int = 6,
    attacked: int = ATTACKED,
) -> Tally | None:
    """All cases of one group; none where there is no time left for it."""
    if time.monotonic() > deadline:
        return None
    torch.set_num_threads(1)
    kind, _, number = group.rpartition("-")
    rng = Random(group)
    drawn = {"random": random_model, "open": random_open_model}
    target = drawn[kind](rng, int(number)) if kind in drawn else open_target(kind, device)
    made = [draw_case(rng, target, index, kind not in drawn) for index in range(GROUP)]
    tally = Tally(group, cases=len(made), special=sum(case.special for case in made))
    proven: set[str] = set()
    for case, guess, source in _guesses(target, made, rng, tally, planted, attacked):
        began = time.monotonic()
        told = certify(case.observation, guess)
        tally.certifying += time.monotonic() - began if source != "attack" else 0.0
        right = sorted(map(tuple, guess)) == sorted(case.batch)
        wrongly = told.proven and sorted(told.sentences) != sorted(case.batch)
        tally.judged += 1
        tally.certified += told.proven
        if told.proven and case.name not in proven:
            proven.add(case.name)
            tally.cases_certified += 1
        tally.by_attack += told.proven and source == "attack"
        tally.wrongly += wrongly
        if wrongly:
            tally.wrong.append(f"{case.name}: {source}")
        if case.plain and right and source == "truth":
            tally.plain_true += 1
            tally.plain_certified += told.proven
            if not told.proven:
                tally.notes[told.note] = tally.notes.get(told.note, 0) + 1
    return tally


def _guesses(
    target: Target, cases: Sequence[Case], rng: Random, tally: Tally, planted: int, attacked: int
) -> Iterator[tuple[Case, Sentences, str]]:
    """What attacks make of the updates, the truth, and guesses next to it."""
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(target))
    for case in cases:
        yield case, case.batch, "truth"
        near = near_misses(rng, target, case.batch)
        for name, guess in rng.sample(near, min(planted, len(near))):
            yield case, guess, name
        if not attacked or case.observation.index % attacked:
            continue
        began = time.monotonic()
        for attack, facts in (
            (Span(steps=20), (Fact.BATCH_SIZE,)),
            (EnergyAttack(restarts=0, sweeps=2), tuple(Fact)),
        ):
            found = _attacked(attack, case.observation.limit_to([*facts, Fact.DEFENSE]), bench)
            if found:
                yield case, found, "attack"
                break
        tally.seconds += time.monotonic() - began


def _attacked(attack: Attack, observation: Observation, bench: Bench) -> Sentences:
    try:
        return attack.reconstruct([observation], bench)[0].sentences
    except GradleakError:
        return ()


def near_misses(rng: Random, target: Target, batch: Sentences) -> list[tuple[str, Sentences]]:
    """Guesses that are nearly right."""
    words = target.vocabulary.allowed.nonzero()[:, 0].tolist()
    place = rng.randrange(len(batch))
    sentence = list(batch[place])
    first, last = len(target.vocabulary.prefix), len(sentence) - len(target.vocabulary.suffix)
    one, two = rng.randrange(first, last), rng.randrange(first, last)
    exchanged, swapped = list(sentence), list(sentence)
    exchanged[one] = rng.choice(words)
    swapped[one], swapped[two] = swapped[two], swapped[one]
    others = [*batch[:place], *batch[place + 1 :]]
    found = {
        "exchanged": (*others, tuple(exchanged)),
        "swapped": (*others, tuple(swapped)),
        "one left out": tuple(others),
        "one twice": (*batch, batch[place]),
        "beside its twin": (*batch, tuple(exchanged)),
        "each once": tuple(dict.fromkeys(batch)),
    }
    right = sorted(batch)
    return [(name, guess) for name, guess in found.items() if guess and sorted(guess) != right]


def draw_case(rng: Random, target: Target, index: int, everyday: bool) -> Case:
    """One update, of a batch that is drawn as everything else about it is."""
    layers = max((part.layer or 0) for part in target.parts)
    plain = rng.random() < 0.4
    defenses = () if plain else rng.choice(DEFENSES)
    protocol = "fedsgd" if plain else rng.choice(PROTOCOLS)
    view: View = find("view", "everything")()
    if not plain and rng.random() < 0.7:
        named = [find("view", name)() for name in ("lamp", "lamp_strict")]
        layer = str(rng.randint(1, layers))
        view = rng.choice(
            [
                *named,
                *(PartsView(layer, (module,)) for module in MODULES),
                PartsView(layer),
                PartsView("1", MODULES[:3]),
            ]
        )
    kind = rng.choice(("plain", "plain", "repeated", "apart")) if index % 2 else "plain"
    batch = draw_batch(rng, target, kind, everyday)
    labels = draw_labels(rng, target, batch)
    name = f"case {index} {target.name} {view} {defenses} {protocol} {kind} {len(batch)}"
    try:
        observation = observe(target, batch, labels, view, defenses, protocol, index)
    except GradleakError:  # nothing of the drawn view is there, or all of it is zero
        return draw_case(rng, target, index, everyday)
    special = len(set(batch)) < len(batch) or kind == "apart"
    return Case(name, observation, batch, plain, special)


def observe(
    target: Target,
    batch: Sentences,
    labels: Sequence[int] | torch.Tensor | None,
    view: View,
    defenses: Sequence[str],
    protocol: str,
    index: int,
) -> Observation:
    """What the server sees of a client that holds the batch."""
    made = target.batch_of(batch, labels)[None]
    chosen: Protocol = from_string("protocol", protocol)
    against: tuple[Defense, ...] = tuple(from_string("defense", one) for one in defenses)
    rngs = [Streams.root("client", index)]
    update = protect_in_turn(against, chosen.update(target, made, rngs=rngs), rngs)
    seen = view.show(target, update).detached_clone()
    if not any(bool(tensor.any()) for tensor in seen.tensors.values()):
        raise GradleakError("Nothing is seen.")
    knows = Knowledge(None, tuple(map(len, batch)), len(batch), against)
    return Observation(index, (Round(target, seen),), knows, chosen)


def draw_labels(
    rng: Random, target: Target, batch: Sentences
) -> Sequence[int] | torch.Tensor | None:
    """Labels of the kind that the model learns."""
    if target.labels_are_tokens:
        return None
    if isinstance(target, TokenClassifier):
        rows = [
            [rng.choice((NO_CLASS, *range(target.classes))) for _ in sentence] for sentence in batch
        ]
        return pad_rows(rows, NO_CLASS)
    if not target.labels_are_open:
        return [rng.randrange(target.classes) for _ in batch]
    assert isinstance(target, TextClassifier)
    several = isinstance(target.problem, SeveralLabels)
    numbers = [
        [float(rng.randrange(2)) if several else rng.gauss(0, 1) for _ in range(target.classes)]
        for _ in batch
    ]
    return torch.tensor(numbers)


def draw_batch(rng: Random, target: Target, kind: str, everyday: bool) -> Sentences:
    """One to four sentences, of which some are alike if `kind` says so."""
    count = rng.choice((1, 1, 2, 3))
    if target.attend_padding or not target.padding_is_free:
        length = rng.randint(3, 7)
        sentences = [_drawn(rng, target, length) for _ in range(count)]
    elif everyday:
        texts = [example.text for example in find("dataset", "canaries")().load()]
        sentences = [tuple(row) for row in target.encode(rng.sample(texts, count))]
    else:
        sentences = [_drawn(rng, target, rng.randint(2, 7)) for _ in range(count)]
    if kind == "repeated":
        sentences += [sentences[0]] * rng.randint(1, 2)
    if kind == "apart":
        (_, apart), (_, swapped), *_ = [
            *near_misses(rng, target, (sentences[0],)),
            *[("", (sentences[0],))] * 2,
        ]
        sentences += [rng.choice((apart[-1], swapped[-1]))]
    return tuple(sentences)


def _drawn(rng: Random, target: Target, words: int) -> tuple[int, ...]:
    allowed = target.vocabulary.allowed.nonzero()[:, 0].tolist()
    return (
        *target.vocabulary.prefix,
        *(rng.choice(allowed) for _ in range(words)),
        *target.vocabulary.suffix,
    )


def random_model(rng: Random, number: int) -> Target:
    """A model of a random shape and size with random weights, in some of which two words are
    alike."""
    import transformers

    shape = SHAPES[number % len(SHAPES)]
    architecture, _, language_model = shape.partition(" ")
    width, layers, tokenizer = rng.choice((16, 32, 48, 64)), rng.randint(1, 3), tiny_tokenizer()
    words = {"vocab_size": len(tokenizer), "pad_token_id": 0, "attn_implementation": "eager"}
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }
    sizes |= {"intermediate_size": 2 * width, "max_position_embeddings": 66}
    if architecture == "GPT2":
        sizes = {
            "n_embd": width,
            "n_layer": layers,
            "n_head": 2,
            "n_positions": 64,
            "n_inner": 2 * width,
        }
    if architecture == "Llama":
        sizes["num_key_value_heads"] = rng.choice((1, 2))
    if architecture == "Roberta":
        sizes["type_vocab_size"] = 1
    if language_model:
        words["tie_word_embeddings"] = rng.random() < 0.5
    else:
        words["num_labels"] = rng.choice((2, 2, 3))
    config = getattr(transformers, f"{architecture}Config")(**words, **sizes)
    head = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    model = getattr(
        transformers, f"{architecture}{head if language_model else 'ForSequenceClassification'}"
    )(config)
    redraw(model, Streams.root("certificates", number))
    if rng.random() < 0.2:
        with torch.no_grad():
            table = model.get_input_embeddings().weight
            one, two = rng.sample(range(10, len(table)), 2)
            table[one] = table[two] * (1 + rng.choice((0.0, 1e-7, 1e-6, 1e-5, 1e-3)))
    opened = CausalLanguageModel if language_model else TextClassifier
    return opened(f"{shape} {layers}x{width}", model, tokenizer)


def random_open_model(rng: Random, number: int) -> Target:
    """A model whose labels nobody tries, or whose loss is a mean over tokens."""
    sizes = {"layers": rng.randint(1, 3), "hidden": rng.choice((16, 32, 48, 64)), "seed": number}
    if number % 4 == 3:
        shape: Any = rng.choice(("gpt2", "llama"))
        target: Target = TinyCausal(shape=shape, loss_over="tokens", **sizes).open(CPU)
    else:
        problem: Any = ("token_classification", "multi_label_classification", "regression")
        classes = rng.randint(2, 4) if number % 4 < 2 else rng.randint(1, 2)
        spec = Tiny(problem_type=problem[number % 4], classes=classes, **sizes)
        target = spec.open(CPU)
    if rng.random() < 0.2:
        with torch.no_grad():
            table = target.vocabulary.embeddings
            one, two = rng.sample(range(10, len(table)), 2)
            table[one] = table[two] * (1 + rng.choice((0.0, 1e-7, 1e-6, 1e-5, 1e-3)))
    return target


_OPENED: dict[tuple[str, str], Target] = {}


def open_target(target: str, device: str) -> Target:
    if (target, device) not in _OPENED:
        _OPENED[target, device] = from_string("target", target).open(torch.device(device))
    return _OPENED[target, device]


if __name__ == "__main__":
    main()
