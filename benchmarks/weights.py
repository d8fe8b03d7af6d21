"""What is rebuilt where weights are sent: python benchmarks/weights.py [--attacks span energy].

Four made-up messages are one batch, a client takes one step of plain SGD on it in float32, and the
server subtracts its weights from those it sent out. A line says for each learning rate how many
words came back, how many sentences word for word, how many were proven, and whether any of the
proven ones was wrong.
"""

import argparse
import copy
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import gradleak
from gradleak.core.batch import Example
from gradleak.core.target import Target
from gradleak.datasets import Canaries
from gradleak.targets.minilm import MiniLM

RATES = (1.0, 0.5, 0.1, 0.05, 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--attacks", nargs="+", default=["span", "energy:restarts=0"])
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--size", type=int, default=4, help="messages in a batch")
    parser.add_argument("--seconds", type=float, default=120, help="for each attack")
    chosen = parser.parse_args()
    target = MiniLM().open(torch.device("cpu"))
    messages = Canaries().load(chosen.batches * chosen.size)
    batches = [
        messages[start : start + chosen.size] for start in range(0, len(messages), chosen.size)
    ]
    print(f"{'rate':>6} {'attack':<20}{'words':>7}{'exact':>8}{'proven':>8}{'wrong':>7}{'s':>7}")
    for rate in chosen.rates:
        for line in chosen.attacks:
            began = time.monotonic()
            rows = [attack(target, batch, rate, line, chosen.seconds) for batch in batches]
            seconds, found = time.monotonic() - began, torch.tensor(rows).double().mean(0)
            exact, proven, wrong = torch.tensor(rows).sum(0)[1:].int().tolist()
            print(
                f"{rate:>6} {line:<20}{100 * float(found[0]):>6.1f}%{exact:>5}/{len(messages)}"
                f"{proven:>5}/{len(messages)}{wrong:>7}{seconds:>7.0f}",
                flush=True,
            )


def attack(
    target: Target, messages: Sequence[Example], rate: float, line: str, seconds: float
) -> tuple[float, int, int, int]:
    """Returns the share of words found, and how many texts came back, are proven, are wrongly."""
    seen = gradleak.observe(
        target.module,
        target.tokenizer,  # type: ignore[attr-defined]
        take_step(target, messages, rate),
        lengths=[len(row) for row in target.encode([one.text for one in messages])],
        labels=[int(one.label or 0) for one in messages],
        protocol=f"fedavg:steps=1,learning_rate={rate}",
    )
    found = gradleak.reconstruct(seen, attacks=[line], time_limit=seconds)
    guesses = found.list_guesses(0, next(iter(found.attacked)))
    truth = [target.decode(row) for row in target.encode([one.text for one in messages])]
    texts = [guess.text for guess in guesses]
    words = sum(max((share_words(one, text) for text in texts), default=0.0) for one in truth)
    wrong = sum(guess.certified and guess.text not in truth for guess in guesses)
    exact, proven = sum(one in texts for one in truth), sum(guess.certified for guess in guesses)
    return words / len(truth), exact, proven, wrong


def take_step(target: Target, messages: Sequence[Example], rate: float) -> dict[str, Tensor]:
    """Returns weights before less weights after one step of PyTorch's own SGD."""
    model = copy.deepcopy(target.module).requires_grad_(True)
    trained = dict(model.named_parameters())
    batch = target.private_batch(list(messages)).batch
    before = {name: value.detach().clone() for name, value in trained.items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    model(
        input_ids=batch.ids, attention_mask=batch.mask.long(), labels=batch.labels
    ).loss.backward()
    optimiser.step()
    return {name: value - trained[name].detach() for name, value in before.items()}


def share_words(truth: str, guess: str) -> float:
    """Returns the share of the words of a text that a guess has at the same place."""
    words, guessed = truth.split(), guess.split()
    return sum(one == two for one, two in zip(words, guessed, strict=False)) / len(words)


if __name__ == "__main__":
    main()
