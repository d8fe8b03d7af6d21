"""What leaves clients of Flower, captured by a mod and by a grid. Skipped where Flower is not
installed: make frameworks."""

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
pytest.importorskip("flwr")

import numpy
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

import gradleak
from gradleak.audit.rounds import (
    attack_round,
    group_rounds,
    list_budgets,
    list_refusals,
    observe_round,
)
from gradleak.captures import read_capture, survey_federation
from gradleak.cli import main
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.datasets import read_client_texts
from gradleak.integrations.flower import CaptureGrid, CaptureMod, attach
from gradleak.integrations.flower_in_process import InProcessGrid
from gradleak.records.run_folder import read_run
from gradleak.report.page.clients import list_client_leaks, tell_clients
from gradleak.targets.tiny import Tiny

TEXTS = [
    ["the code of the door is four two .", "call me on monday !", "the cat is red .", "my house ."],
    ["the dog was bad .", "she gave her friend a red book", "the bank never paid him", "no ."],
]
LABELS = [0, 1, 0, 1]
SPEC = Tiny(hidden=64, heads=4)
Make = Callable[..., ClientApp]


@pytest.fixture(scope="module")
def target() -> Target:
    return SPEC.open(torch.device("cpu"))


@pytest.fixture
def make_app(target: Target) -> Make:
    """Makes the app of a user: one step of plain SGD on four texts, and an evaluation."""

    def make(mods: list[Any] | None = None, fails: bool = False) -> ClientApp:
        app = ClientApp(mods=mods)

        @app.train()
        def train(message: Message, context: Any) -> Message:
            if fails:
                raise RuntimeError("the row “call me on monday” is too long")
            model: Any = copy.deepcopy(target.module).requires_grad_(True)
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
            texts = TEXTS[context.node_config["partition-id"]]
            read = target.tokenizer(texts, padding=True, return_tensors="pt")
            loss = model(**read, labels=torch.tensor(LABELS)).loss
            loss.backward()
            optimizer.step()
            torch.rand(3), numpy.random.rand(3), random.random()  # an app that draws numbers
            metrics = MetricRecord({"num-examples": len(texts), "loss": float(loss.detach())})
            content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
            return Message(RecordDict(content), reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Any) -> Message:
            metrics = MetricRecord({"num-examples": 4, "accuracy": 0.5})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return app

    return make


class Listener(InProcessGrid):
    """Keeps what the server received."""

    received: list[Message]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self.received = [*getattr(self, "received", []), *replies]
        return replies


def start(grid: Any, target: Target, rounds: int = 1, strategy: Any = None) -> Any:
    strategy = strategy or FedAvg()
    arrays = ArrayRecord(target.module.state_dict())
    return strategy.start(grid, arrays, rounds, train_config=ConfigRecord({"lr": 0.5}))


def list_trained(folder: Path) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    """The tensors of captures by client and round."""
    return {
        (one.header.client, one.header.round or 0): dict(read_capture(one.path).tensors)
        for one in survey_federation(folder).messages
        if one.has_arrays
    }


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether tensors are the same to the last bit, and so are their names and order."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_captured_is_what_the_server_received_bit_for_bit(
    target: Target, make_app: Make, tmp_path: Path
) -> None:
    """After the client's noise, by the mod and by the grid alike; what came down lies there once a
    round."""
    noise = LocalDpMod(clipping_norm=1.0, sensitivity=0.01, epsilon=10.0, delta=1e-5)
    grid = Listener(make_app([CaptureMod(tmp_path / "mod"), noise]))
    start(CaptureGrid(grid, tmp_path / "grid"), target, rounds=2)
    by_mod, by_grid = list_trained(tmp_path / "mod"), list_trained(tmp_path / "grid")
    received = [one for one in grid.received if one.has_content() and "arrays" in one.content]
    assert len(by_mod) == len(by_grid) == len(received) == 4
    for place, reply in enumerate(received):  # two clients a round
        key = (str(reply.metadata.src_node_id), 1 + place // 2)
        sent = {
            name: torch.from_numpy(one.numpy()) for name, one in reply.content["arrays"].items()
        }
        ordered = {name: by_mod[key][name] for name in sent}
        assert is_equal(ordered, sent) and by_mod[key].keys() == sent.keys()
        assert is_equal(by_mod[key], by_grid[key])
        assert ArrayRecord(ordered).object_id == reply.content["arrays"].object_id
    for folder in (tmp_path / "mod", tmp_path / "grid"):
        assert len(list((folder / "sent").iterdir())) == 2
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*.safetensors"))


def test_one_step_is_rebuilt_word_for_word_and_certified(
    target: Target, make_app: Make, tmp_path: Path
) -> None:
    start(InProcessGrid(make_app([CaptureMod(tmp_path / "captures")])), target)
    truth = tmp_path / "truth"
    truth.mkdir()
    for place, texts in enumerate(TEXTS):
        rows = "\n".join(f"{text}\t{label}" for text, label in zip(texts, LABELS, strict=True))
        (truth / f"client-partition-{place}.tsv").write_text(f"text\tlabel\n{rows}\n")
    federation = survey_federation(tmp_path / "captures")
    (one,) = group_rounds(federation)
    done = attack_round(
        federation, one, target, SPEC, read_client_texts(truth), attacks=["span"], out=tmp_path
    )
    assert done.record is not None and done.record.worst_case["exact_match"].mean == 1
    assert all(guess.certified for guess in done.found) and len(done.found) == 8
    leaks = list_client_leaks(read_run(tmp_path).summaries)
    assert [(leak.client, leak.round, leak.whole, leak.proven) for leak in leaks] == [
        ("1", 1, 4, 4),
        ("2", 1, 4, 4),
    ]
    assert tell_clients(leaks) == ["All 2 clients leak alike: ROUGE-1 100.0."]
    (remark,) = done.record.data.remarks
    assert "loss" in remark and "leak too" in remark


def draw() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), numpy.random.rand(2).tolist(), random.random()


def test_strategy_results_and_random_state_are_the_same_without_it(
    target: Target, make_app: Make, tmp_path: Path
) -> None:
    """The app differs by its mods alone, the server by its grid."""

    def run(wrap: Callable[[Any], Any], mods: list[Any]) -> tuple[Any, ...]:
        torch.manual_seed(0), numpy.random.seed(0), random.seed(0)
        noise = LocalDpMod(clipping_norm=1.0, sensitivity=0.01, epsilon=10.0, delta=1e-5)
        result = start(wrap(InProcessGrid(make_app([*mods, noise]))), target, rounds=2)
        metrics = [dict(one) for one in result.train_metrics_clientapp.values()]
        return result.arrays.object_id, metrics, draw()

    plain = run(lambda grid: grid, [])
    captured = run(lambda grid: CaptureGrid(grid, tmp_path / "b"), [CaptureMod(tmp_path / "a")])
    assert plain == captured


def test_an_app_that_is_built_is_captured_too(
    target: Target, make_app: Make, tmp_path: Path
) -> None:
    noise = LocalDpMod(clipping_norm=1.0, sensitivity=0.0, epsilon=1.0, delta=1e-5)
    app = make_app([noise])
    assert attach(app, tmp_path) is app

    @app.query()
    def query(message: Message, context: Any) -> Message:  # registered later
        raise AssertionError("nobody asks")

    start(InProcessGrid(app), target)
    assert len(list_trained(tmp_path)) == 2
    header = survey_federation(tmp_path).messages[0].header
    assert [mod["name"] for mod in header.platform["mods"]] == ["LocalDpMod"]
    assert len(app._mods) == 2 and isinstance(app._mods[0], CaptureMod)


def test_the_defenses_of_the_platform_are_stated_as_ours_are_called(
    target: Target, make_app: Make, tmp_path: Path
) -> None:
    noise = LocalDpMod(clipping_norm=2.0, sensitivity=0.5, epsilon=4.0, delta=1e-5)
    start(InProcessGrid(make_app([CaptureMod(tmp_path / "noise"), noise])), target)
    federation = survey_federation(tmp_path / "noise")
    (one,) = group_rounds(federation)
    (stated,) = one.defenses
    assert stated.startswith("client_dp:clip=2.0,noise_multiplier=0.3") and "delta=1e-05" in stated
    assert list_budgets(one.messages[0].header) == ["LocalDpMod has epsilon 4, delta 1e-05"]
    seen = observe_round(federation, one, target)[0]
    # The noise is what its own formula says, on every entry
    std = 0.5 * (2 * numpy.log(1.25 / 1e-5)) ** 0.5 / 4
    assert seen.channel.noise_std == pytest.approx(std, rel=1e-6)
    found = torch.cat([one.flatten() for one in seen.update.tensors.values()]).std()
    assert float(found) == pytest.approx(std, rel=0.02)

    strategy = DifferentialPrivacyClientSideFixedClipping(
        FedAvg(), noise_multiplier=0.0, clipping_norm=0.25, num_sampled_clients=2
    )
    app = make_app([CaptureMod(tmp_path / "clip"), fixedclipping_mod])
    start(InProcessGrid(app), target, strategy=strategy)
    federation = survey_federation(tmp_path / "clip")
    (one,) = group_rounds(federation)
    assert one.defenses == ("clipping:clip=0.25",)
    for seen in observe_round(federation, one, target):
        norm = torch.stack([tensor.norm() for tensor in seen.update.tensors.values()]).norm()
        assert float(norm) == pytest.approx(0.25, rel=1e-4)


def test_what_leaves_beside_the_arrays_is_kept(
    target: Target, make_app: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(InProcessGrid(make_app([CaptureMod(tmp_path)])), target)
    evaluated, trained = sorted(
        (one for one in survey_federation(tmp_path).messages if one.header.client == "1"),
        key=lambda one: one.has_arrays,
    )
    assert evaluated.header.other_records == {"metrics": {"num-examples": 4, "accuracy": 0.5}}
    assert trained.header.other_records["metrics"].keys() == {"num-examples", "loss"}
    assert trained.header.granted.batch_size == 4  # the client said so itself
    assert trained.header.protocol.learning_rate == 0.5  # so did the server
    assert (trained.header.round, trained.header.platform["partition"]) == (1, "0")
    assert main(["capture", "show", str(trained.path)]) == 0
    shown = capsys.readouterr().out
    assert "metrics.loss" in shown and "told.config.lr" in shown and "flwr" in shown
    assert main(["purge", str(tmp_path), "--yes"]) == 0
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".json")]


def test_an_error_text_leaves_too_and_comes_through(
    target: Target, make_app: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="monday"):
        start(InProcessGrid(make_app([CaptureMod(tmp_path)], fails=True)), target)
    (one,) = survey_federation(tmp_path).messages
    assert "monday" in one.header.other_records["error"] and not one.has_arrays
    assert main(["federated", "audit", str(tmp_path), "--model", "tiny"]) == 2
    assert "with an error, whose text left it too" in capsys.readouterr().err


def test_secure_aggregation_is_recognised_and_refused(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = ClientApp(mods=[CaptureMod(tmp_path)])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        """Answers as a client of SecAgg+ does in the stage that collects masked inputs."""
        masks = ConfigRecord({"masked_params": [b"\0" * 40, b"\1" * 40]})
        return Message(RecordDict({"secaggplus_configs": masks}), reply_to=message)

    grid = InProcessGrid(app, clients=1)
    content = RecordDict({"arrays": ArrayRecord(target.module.state_dict())})
    grid.send_and_receive([grid.create_message(content, "train", 1, "3")])
    federation = survey_federation(tmp_path)
    assert not group_rounds(federation)
    assert list_refusals(federation) == [
        "Client 1 sent masks in round 3 (secure aggregation): the server sees the sum of all"
        " clients only, and no single update can be attacked."
    ]
    assert main(["federated", "audit", str(tmp_path), "--model", "tiny"]) == 2
    assert "secure aggregation" in capsys.readouterr().err


def test_a_grid_is_handed_on_and_replies_may_come_later(
    target: Target, make_app: Make, tmp_path: Path
) -> None:
    grid = InProcessGrid(make_app())
    watched = CaptureGrid(grid, tmp_path)
    assert watched.get_node_ids() == [1, 2] and watched.contexts is grid.contexts
    content = RecordDict(
        {"arrays": ArrayRecord(target.module.state_dict()), "config": ConfigRecord({"lr": 0.1})}
    )
    messages = [watched.create_message(content, "train", node, "") for node in (1, 2)]
    names = watched.push_messages(iter(messages))
    assert len(list(watched.pull_messages(names))) == 2
    # Nobody numbers these rounds: they are counted
    assert sorted(list_trained(tmp_path)) == [("1", 0), ("2", 0)]


def test_nonsense_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="learning_rate must be a number above 0, not -1"):
        CaptureMod(tmp_path, learning_rate=-1.0)
    with pytest.raises(GradleakError, match="steps counts from 1, not 0"):
        CaptureMod(tmp_path, steps=0)


# The example's app under Flower's own simulation, which starts processes with Ray
SIMULATION = """
from pathlib import Path
source = Path({example!r}).read_text()
before, start, _ = source.partition("grid, arrays = ")
assert start
exec(compile(before, "flower_app.py", "exec"))

from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

server = ServerApp()

@server.main()
def main(grid, context):
    from gradleak.integrations.flower import CaptureGrid
    grid, arrays = CaptureGrid(grid, "captures-server"), ArrayRecord(model.state_dict())
    FedAvg(fraction_evaluate=0.0).start(grid, arrays, 2, train_config=ConfigRecord({{"lr": 0.5}}))

run_simulation(server, app, num_supernodes=2)
"""


@pytest.mark.long  # a dozen processes and 1.5 GB
def test_a_simulation_of_flower_is_captured_at_both_ends(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "flower_app.py"
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION.format(example=str(example))],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "FLWR_HOME": str(tmp_path / "flwr"),
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    by_mod, by_grid = (
        list_trained(tmp_path / "captures"),
        list_trained(tmp_path / "captures-server"),
    )
    assert len(by_mod) == 4, done.stdout[-2000:] + done.stderr[-2000:]
    assert by_mod.keys() == by_grid.keys()
    assert all(is_equal(by_mod[key], by_grid[key]) for key in by_mod)
