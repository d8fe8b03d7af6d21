"""What is rebuilt from clients of Flower: python benchmarks/flower_apps.py [--clients 5].

An app of Flower runs in this process for one round: every client takes one step of plain SGD on
four made-up messages and sends its weights. What left it is captured behind its mods and attacked
by an attacker who knows what the server does: the weights that came down, the learning rate, the
number of examples and the parameters of the mods. A line says how many messages came back word for
word and how many of them were proven.
"""

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

from gradleak.audit.rounds import AttackedRound, attack_round, group_rounds
from gradleak.captures import survey_federation
from gradleak.core.batch import Example
from gradleak.datasets import Canaries, read_client_texts
from gradleak.integrations.flower import CaptureMod
from gradleak.integrations.flower_in_process import InProcessGrid
from gradleak.targets.minilm import MiniLM
from gradleak.targets.tiny import Tiny

TARGETS = {"minilm": MiniLM(), "tiny": Tiny(hidden=64, heads=4)}
BATCH = 4


@dataclass(frozen=True)
class App:
    """How clients train, and what Flower does to what they send."""

    learning_rate: float
    epsilon: float | None = None  # LocalDpMod with clip and sensitivity 1, delta 1e-5
    clip: float | None = None  # fixed clipping on the client


APPS = {
    "lr 0.5": App(0.5),
    "lr 0.05": App(0.05),
    "lr 0.005": App(0.005),
    "lr 0.5, fixed clipping 0.1": App(0.5, clip=0.1),
    "lr 0.5, LocalDpMod ε 10^6": App(0.5, epsilon=1e6),
    "lr 0.5, LocalDpMod ε 10^5": App(0.5, epsilon=1e5),
    "lr 0.5, LocalDpMod ε 10^4": App(0.5, epsilon=1e4),
    "lr 0.5, LocalDpMod ε 1": App(0.5, epsilon=1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=list(TARGETS), default="minilm")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120, help="for each attack on a round")
    parser.add_argument("--only", nargs="+", default=list(APPS), help="apps by name")
    parser.add_argument("--attacks", nargs="+", default=["span", "energy:restarts=0"])
    chosen = parser.parse_args()
    spec = TARGETS[chosen.target]
    opened = spec.open(torch.device("cpu"))
    messages = Canaries().load(BATCH * chosen.clients)
    print(f"{'app':<28}{'attack':<20}{'ROUGE-1':>8}{'exact':>10}{'proven':>8}{'seconds':>9}")
    for name in chosen.only:
        with tempfile.TemporaryDirectory() as folder:
            run(APPS[name], opened, messages, chosen.clients, Path(folder) / "captures")
            truth = write_truth(opened, messages, Path(folder) / "truth.jsonl")
            federation = survey_federation(Path(folder) / "captures")
            (one,) = group_rounds(federation)
            for line in chosen.attacks:
                began = time.monotonic()
                done = attack_round(
                    federation,
                    one,
                    opened,
                    spec,
                    read_client_texts(truth),
                    attacks=[line],
                    time_limit=chosen.seconds,
                    out=Path(folder),
                )
                print_line(name, line, done, time.monotonic() - began)


def run(app: App, opened: Any, messages: Sequence[Example], clients: int, folder: Path) -> None:
    """Runs one round of an app, its messages captured."""
    torch.manual_seed(0)
    mods: list[Any] = [CaptureMod(folder)]
    strategy: Any = FedAvg(fraction_evaluate=0.0)
    if app.epsilon is not None:
        mods.append(LocalDpMod(1.0, 1.0, app.epsilon, 1e-5))
    if app.clip is not None:
        mods.append(fixedclipping_mod)
        strategy = DifferentialPrivacyClientSideFixedClipping(strategy, 0.0, app.clip, clients)
    client = ClientApp(mods=mods)

    @client.train()
    def train(message: Message, context: Any) -> Message:
        model = copy.deepcopy(opened.module).requires_grad_(True)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
        start = BATCH * int(context.node_config["partition-id"])
        mine = messages[start : start + BATCH]
        read = opened.tokenizer([one.text for one in mine], padding=True, return_tensors="pt")
        labels = torch.tensor([opened.class_of(one.label) for one in mine])
        model(**read, labels=labels).loss.backward()
        optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(mine)}),
        }
        return Message(RecordDict(content), reply_to=message)

    grid, arrays = InProcessGrid(client, clients), ArrayRecord(opened.module.state_dict())
    strategy.start(grid, arrays, 1, train_config=ConfigRecord({"lr": app.learning_rate}))


def write_truth(opened: Any, messages: Sequence[Example], path: Path) -> Path:
    """Writes who trained on what."""
    rows = [
        {
            "client": f"partition-{place // BATCH}",
            "text": one.text,
            "label": opened.class_of(one.label),
        }
        for place, one in enumerate(messages)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def print_line(name: str, line: str, done: AttackedRound, seconds: float) -> None:
    """Prints what one attack rebuilt of a round."""
    assert done.record is not None
    ((_, outcome),) = done.record.attacks.items()
    examples = outcome.examples
    exact = sum(one.values["exact_match"] == 1 for one in examples)
    proven = sum(one.certified for one in examples)
    score = outcome.scores["rouge1"].mean or 0.0
    print(
        f"{name:<28}{line:<20}{100 * score:>8.1f}{f'{exact} of {len(examples)}':>10}"
        f"{proven:>8}{seconds:>9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
