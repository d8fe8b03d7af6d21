"""What is rebuilt from updates of adapters (LoRA): python benchmarks/lora.py [--rank 8] [--step 0].

Made-up messages are trained on with adapters of peft on query and value. A message's gradient is
taken after so many steps of AdamW on other messages, and attacked by an attacker who knows the
lengths. A line says how many tokens came back, how many messages word for word, how many were
proven, and whether a proven one was wrong.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import gradleak.attacks  # noqa: F401  registers them
from gradleak.core.attack import Attack, Bench, Reconstruction
from gradleak.core.batch import Example
from gradleak.core.observation import Knowledge, Observation, Round
from gradleak.core.specs import resolve
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.core.update import Update
from gradleak.datasets import Canaries
from gradleak.priors.english import FrequentWords
from gradleak.protocols.fedsgd import FedSGD
from gradleak.targets import resolve_target

RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="lora", help="lora, causal_lora, or a full model")
    parser.add_argument("--step", type=int, default=0, help="steps of AdamW before")
    parser.add_argument("--size", type=int, default=1, help="messages in a batch")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--most", type=int, default=32, help="tokens of a message, at most")
    parser.add_argument("--attack", default="span")
    parser.add_argument("--at-once", type=int, default=5, help="batches attacked together")
    parser.add_argument("--seconds", type=float, default=120, help="for one batch")
    chosen = parser.parse_args()
    target = resolve_target(chosen.target).open(torch.device("cpu"))
    every = [one for one in Canaries().load() if len(target.encode([one.text])[0]) <= chosen.most]
    train(target, every[-8 * chosen.step :], chosen.step)
    batches = [
        every[number * chosen.size : (number + 1) * chosen.size] for number in range(chosen.batches)
    ]
    attack, prior = resolve("attack", chosen.attack), FrequentWords().open(target)
    assert isinstance(attack, Attack)
    tally = torch.zeros(5).int()
    began, seen = time.monotonic(), [observe(target, one, n) for n, one in enumerate(batches)]
    for start in range(0, len(seen), chosen.at_once):
        some = seen[start : start + chosen.at_once]
        deadline = time.monotonic() + chosen.seconds * len(some)
        bench = Bench(Streams.root("attacker", 0), prior, deadline=deadline)
        for one, guess in zip(some, attack.reconstruct(some, bench), strict=True):
            tally += compare(target, batches[one.index], guess)
        tokens, right, exact, proven, wrong = tally.tolist()
        count = start + len(some)
        print(
            f"{chosen.target} step {chosen.step} B {chosen.size} {chosen.attack}: n {count},"
            f" tokens {100 * right / tokens:.1f} %, exact {exact}, proven {proven}, wrong {wrong},"
            f" {(time.monotonic() - began) / count:.0f} s each",
            flush=True,
        )


def observe(target: Target, messages: Sequence[Example], number: int) -> Observation:
    """Returns what a server sees of one batch whose lengths and labels it knows."""
    found = {name: one[None] for name, one in take_gradients(target, messages).items()}
    labels = torch.tensor([int(one.label or 0) for one in messages])
    knows = Knowledge(
        labels=None if target.labels_are_tokens else labels,
        lengths=tuple(len(row) for row in target.encode([one.text for one in messages])),
        batch_size=len(messages),
    )
    update = Update(found).cut(target.parts)
    return Observation(number, (Round(target, update),), knows, FedSGD())


def compare(target: Target, messages: Sequence[Example], guess: Reconstruction) -> Tensor:
    """Returns tokens, those that came back, and texts exact, proven and proven wrongly."""
    truth = [tuple(row) for row in target.encode([one.text for one in messages])]
    exact = sum(row in guess.sentences for row in truth)
    right = sum(
        max((share(target, row, one) for one in guess.sentences), default=0) for row in truth
    )
    tokens = sum(len(row) - target.vocabulary.frame_length for row in truth)
    proven = len(truth) * guess.certified
    wrong = proven and len(truth) - exact
    return torch.tensor([tokens, right, exact, proven, wrong]).int()


def take_gradients(target: Target, messages: Sequence[Example]) -> dict[str, Tensor]:
    """Returns the gradient of the mean loss over some messages."""
    batch = target.private_batch(list(messages)).batch
    copies = {
        name: one.detach().clone().requires_grad_() for name, one in target.parameters.items()
    }
    loss = target.losses(batch, copies).mean()
    found = torch.autograd.grad(loss, list(copies.values()), materialize_grads=True)
    return dict(zip(copies, found, strict=True))


def train(target: Target, messages: Sequence[Example], steps: int) -> None:
    """Takes steps of AdamW on batches of eight messages."""
    optimiser = torch.optim.AdamW(list(target.parameters.values()), lr=RATE)
    generator = Streams.root("benchmark", 0).generator()
    for _ in range(steps):
        some = torch.randint(len(messages), (8,), generator=generator).tolist()
        found = take_gradients(target, [messages[place] for place in some])
        for name, parameter in target.parameters.items():
            parameter.grad = found[name]
        optimiser.step()
    for parameter in target.parameters.values():
        parameter.grad = None


def share(target: Target, truth: Sequence[int], guess: Sequence[int]) -> int:
    """Returns how many tokens of a text stand at their places, special ones left out."""
    _, special = target.vocabulary.frame(len(truth))
    pairs = zip(truth, guess, special, strict=False)
    return sum(one == two and not fixed for one, two, fixed in pairs)


if __name__ == "__main__":
    main()
