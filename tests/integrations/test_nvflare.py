"""What leaves clients of NVFlare, captured by observers and filters. Skipped where NVFlare is not
installed: make frameworks."""

import copy
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

import numpy
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

import gradleak
from gradleak.audit.rounds import attack_round, group_rounds, list_budgets, list_refusals
from gradleak.captures import read_capture, survey_federation
from gradleak.cli import main
from gradleak.core.errors import GradleakError
from gradleak.datasets import read_client_texts
from gradleak.integrations.nvflare import CaptureFilter, CaptureObserver, attach
from gradleak.targets.tiny import Tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
SPEC = Tiny(hidden=64, heads=4)
CAPTURED = 'attach(recipe, "captures", learning_rate=0.5)  # the one line for gradleak'


class Runner:
    """What NVFlare's own has of a client's filters."""

    def __init__(self, filters: list[Any]) -> None:
        self.task_result_filters = {"train/out": filters}


class ServerRunner(Runner):
    """Called as NVFlare's own, by which an observer sees where it runs."""


def make_context(site: str = "site-1", runner: Any = None) -> FLContext:
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
    context.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
    context.set_prop(FLContextKey.RUNNER, runner or Runner([]), private=True, sticky=False)
    return context


def carry(data: dict[str, Any], kind: str = DataKind.WEIGHTS, **meta: Any) -> Shareable:
    return DXO(kind, data=data, meta=meta).to_shareable()


def tell(observer: CaptureObserver, context: FLContext, down: Shareable, up: Shareable) -> None:
    """The events of one task at a client, as NVFlare fires them."""
    context.set_prop(FLContextKey.TASK_DATA, down, private=True, sticky=False)
    observer.handle_event(EventType.AFTER_TASK_DATA_FILTER, context)
    observer.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, context)  # too early: not sent yet
    context.set_prop(FLContextKey.TASK_RESULT, up, private=True, sticky=False)
    observer.handle_event(EventType.AFTER_TASK_RESULT_FILTER, context)


def make_weights(seed: int) -> dict[str, Any]:
    draw = numpy.random.default_rng(seed).standard_normal
    return {"one.weight": draw((3, 4)).astype("float32"), "one.bias": draw(3).astype("float32")}


def is_equal(captured: Any, sent: dict[str, Any]) -> bool:
    return captured.keys() == sent.keys() and all(
        captured[name].numpy().tobytes() == numpy.asarray(sent[name]).tobytes() for name in sent
    )


def test_what_leaves_is_written_bit_for_bit_and_nothing_is_changed(tmp_path: Path) -> None:
    context, observer = make_context(), CaptureObserver(str(tmp_path), learning_rate=0.5)
    down, up = carry(make_weights(0)), carry(make_weights(1), NUM_STEPS_CURRENT_ROUND=1, loss=0.3)
    down.set_header("current_round", 7)
    before = copy.deepcopy((down, up))
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    tell(observer, context, down, up)
    assert states[1:] == (random.getstate(), str(numpy.random.get_state()))
    assert torch.equal(states[0], torch.get_rng_state())
    for mine, theirs in zip(before, (down, up), strict=True):
        assert is_equal_data(mine, theirs)
    federation = survey_federation(tmp_path)
    (one,) = federation.messages
    assert is_equal(read_capture(one.path).tensors, make_weights(1))
    assert is_equal(federation.read_sent(one), make_weights(0))
    header = one.header
    assert (header.kind, header.round, header.client) == ("weights", 7, "site-1")
    assert (header.protocol.learning_rate, header.protocol.steps) == (0.5, 1)
    assert header.other_records == {"meta": {"NUM_STEPS_CURRENT_ROUND": 1, "loss": 0.3}}


def is_equal_data(one: Shareable, other: Shareable) -> bool:
    first, second = from_shareable(one), from_shareable(other)
    same = first.meta == second.meta and first.data_kind == second.data_kind
    return same and all(
        first.data[name].tobytes() == second.data[name].tobytes() for name in first.data
    )


def test_rounds_that_nobody_numbers_are_counted(tmp_path: Path) -> None:
    observer = CaptureObserver(str(tmp_path))
    for number in range(3):
        tell(observer, make_context(), carry(make_weights(0)), carry(make_weights(1 + number)))
    assert [one.header.round for one in survey_federation(tmp_path).messages] == [0, 1, 2]


def test_filters_and_what_they_say_of_their_privacy_are_kept(tmp_path: Path) -> None:
    """SVT's own ε is the one of its three phases, which is not the one that it was given."""
    filters = [SVTPrivacy(fraction=0.5, epsilon=10, noise_var=1), PercentilePrivacy()]
    context = make_context(runner=Runner(filters))
    up = carry(make_weights(1), DataKind.WEIGHT_DIFF)
    for one in filters:
        up = one.process(up, context)
    tell(CaptureObserver(str(tmp_path)), context, carry(make_weights(0)), up)
    (one,) = survey_federation(tmp_path).messages
    assert one.header.kind == "difference"
    assert [known["name"] for known in one.header.platform["filters"]] == [
        "SVTPrivacy",
        "PercentilePrivacy",
    ]
    given, *spent = list_budgets(one.header)
    assert given == "SVTPrivacy has epsilon 10"
    total = from_shareable(up).meta["svt_privacy_budget"]["epsilon_total"]
    assert total > 10 and any(f"epsilon_total {total:g}" in told for told in spent)


def test_what_is_encrypted_is_recognised_and_refused(tmp_path: Path) -> None:
    up = carry(make_weights(1))
    dxo = from_shareable(up)
    dxo.set_meta_prop(MetaKey.PROCESSED_ALGORITHM, "_HE_")
    tell(CaptureObserver(str(tmp_path)), make_context(), carry(make_weights(0)), dxo.to_shareable())
    federation = survey_federation(tmp_path)
    assert not group_rounds(federation, "fedavg")
    (sentence,) = list_refusals(federation)
    assert "secure aggregation" in sentence and "no single update can be attacked" in sentence


def test_errors_and_metrics_are_notes(tmp_path: Path) -> None:
    observer = CaptureObserver(str(tmp_path))
    tell(observer, make_context(), carry({}), make_reply(ReturnCode.EXECUTION_EXCEPTION))
    tell(observer, make_context(), carry({}), carry({"accuracy": 0.5}, DataKind.METRICS))
    failed, measured = (one.header for one in survey_federation(tmp_path).messages)
    assert failed.other_records == {"error": "EXECUTION_EXCEPTION"}
    assert measured.other_records == {"metrics": {"accuracy": 0.5}}


def test_filters_write_what_observers_write(tmp_path: Path) -> None:
    down, up = carry(make_weights(0)), carry(make_weights(1))
    context = make_context()
    tell(CaptureObserver(str(tmp_path / "observer")), context, down, up)
    for message, direction in ((down, FilterKey.IN), (up, FilterKey.OUT)):
        context.set_prop(FLContextKey.FILTER_DIRECTION, direction, private=True, sticky=False)
        assert CaptureFilter(str(tmp_path / "filter")).process(message, context) is message
    (one,) = survey_federation(tmp_path / "observer").messages
    (other,) = survey_federation(tmp_path / "filter").messages
    assert one.header.model == other.header.model
    assert is_equal(read_capture(one.path).tensors, make_weights(1))
    assert is_equal(read_capture(other.path).tensors, make_weights(1))


def test_nonsense_is_refused_before_processes_start(tmp_path: Path) -> None:
    with pytest.raises(GradleakError, match="wants a Recipe or a FedJob, not a str"):
        attach("job", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(GradleakError, match="steps counts from 1, not 0"):
        CaptureObserver(str(tmp_path), steps=0)


def simulate(folder: Path, instead: str) -> dict[str, torch.Tensor]:
    """Runs the example's job with another line in place of its own; returns the final model."""
    folder.mkdir()
    job = (EXAMPLES / "nvflare_job.py").read_text(encoding="utf-8")
    assert job.count(CAPTURED) == 1
    (folder / "nvflare_job.py").write_text(job.replace(CAPTURED, instead), encoding="utf-8")
    client = (EXAMPLES / "nvflare_client.py").read_text(encoding="utf-8")
    (folder / "nvflare_client.py").write_text(client, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gradleak.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "nvflare_job.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = (folder / "workspace").rglob("FL_global_model.pt")
    saved = torch.load(path, weights_only=True)
    return dict(saved["model"])


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A simulation that is captured at its clients and at its server."""
    folder = tmp_path_factory.mktemp("nvflare") / "captured"
    server = CAPTURED.replace('"captures"', '"captures-server", side="server"')
    return folder, simulate(folder, f"{CAPTURED}\n    {server}")


def test_captured_is_what_the_server_received_bit_for_bit(
    simulated: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, _ = simulated
    left = survey_federation(folder / "captures").messages
    arrived = survey_federation(folder / "captures-server").messages
    assert len(left) == len(arrived) == 4  # two sites, two rounds
    for one, other in zip(left, arrived, strict=True):
        assert one.path.relative_to(folder / "captures") == other.path.relative_to(
            folder / "captures-server"
        )
        mine, theirs = read_capture(one.path).tensors, read_capture(other.path).tensors
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert one.header.model.weights_hash == other.header.model.weights_hash != ""
    assert len(list((folder / "captures" / "sent").iterdir())) == 2


def test_one_step_is_rebuilt_word_for_word_and_certified(
    simulated: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, _ = simulated
    federation = survey_federation(folder / "captures")
    first, _ = group_rounds(federation)
    done = attack_round(
        federation,
        first,
        SPEC.open(torch.device("cpu")),
        SPEC,
        read_client_texts(folder / "truth.jsonl"),
        attacks=["span"],
        batch_size=2,
        out=tmp_path,
    )
    assert done.record is not None and done.record.worst_case["exact_match"].mean == 1
    assert all(guess.certified for guess in done.found) and len(done.found) == 4
    assert main(["gate", str(tmp_path), "--max", "exact_match=0.05"]) == 4


def test_the_result_is_the_same_without_the_one_line(
    simulated: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    _, captured = simulated
    plain = simulate(tmp_path / "plain", "pass")
    assert plain.keys() == captured.keys() and len(plain) > 30
    assert all(torch.equal(plain[name], captured[name]) for name in plain)
