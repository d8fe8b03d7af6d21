"""Clients of a federated run, audited by what they sent; frameworks have tests of their own."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradleak.audit.own_update import observe_capture
from gradleak.audit.rounds import attack_round, group_rounds, list_refusals, observe_round
from gradleak.captures import subtract_states, survey_federation
from gradleak.cli import main
from gradleak.core.errors import GradleakError
from gradleak.core.target import Target
from gradleak.datasets import read_client_texts
from gradleak.integrations.messages import LocalTraining, MessageRecorder, Reply, make_plain
from gradleak.records.run_folder import read_run
from gradleak.report.page.clients import ClientLeak, list_client_leaks, tell_clients
from gradleak.targets.tiny import Tiny

SPEC = Tiny(hidden=64, heads=4)
TEXTS = {"a": "she gave her friend a red book", "b": "the bank never paid him"}
RATE = 0.5


@pytest.fixture(scope="module")
def target() -> Target:
    return SPEC.open(torch.device("cpu"))


@pytest.fixture
def send(target: Target, tmp_path: Path) -> Callable[..., Path]:
    """Writes what each client sends after one step; returns the folder."""

    def make(kind: str = "weights", prefix: str = "", round: int = 1, **more: Any) -> Path:
        folder = tmp_path / "captures"
        recorder = MessageRecorder(folder, LocalTraining(RATE, 1), "torch")
        model: Any = copy.deepcopy(target.module)
        for part in model.bert.pooler.parameters():
            part.requires_grad_(False)
        before = {prefix + name: value.clone() for name, value in model.state_dict().items()}
        digest = recorder.write_sent(before)
        for client, text in TEXTS.items():
            model = copy.deepcopy(target.module).requires_grad_(True)
            model.bert.pooler.requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            read = target.tokenizer([text], return_tensors="pt")  # type: ignore[attr-defined]
            model(**read, labels=torch.tensor([1])).loss.backward()
            optimizer.step()
            after = {prefix + name: value for name, value in model.state_dict().items()}
            sent = after if kind == "weights" else subtract_states(before, after)
            if kind != "weights":
                sent = {name: tensor for name, tensor in sent.items() if bool(tensor.any())}
            beside = {"metrics": {"num-examples": 1, "accuracy": 0.25}}
            reply = Reply(client, round, sent, "as sent", kind, beside=beside, **more)
            recorder.write(reply, digest, {})
        return folder

    return make


@pytest.mark.parametrize(("kind", "prefix"), [("weights", ""), ("difference", "module.")])
def test_weights_and_differences_are_the_same_update(
    kind: str, prefix: str, send: Callable[..., Path], target: Target
) -> None:
    """Under names of a wrapper too; what is frozen comes as it was and is not seen."""
    federation = survey_federation(send(kind, prefix))
    (one,) = group_rounds(federation)
    assert (one.clients, one.round) == (("a", "b"), 1)
    seen = observe_round(federation, one, target)
    assert [observation.knows.batch_size for observation in seen] == [1, 1]
    for observation, text in zip(seen, TEXTS.values(), strict=True):
        assert not [name for name in observation.update.tensors if "pooler" in name]
        model: Any = copy.deepcopy(target.module).requires_grad_(True)
        read = target.tokenizer([text], return_tensors="pt")  # type: ignore[attr-defined]
        model(**read, labels=torch.tensor([1])).loss.backward()
        mine = dict(model.named_parameters())["classifier.weight"].grad
        torch.testing.assert_close(
            observation.update.tensors["classifier.weight"][0], RATE * mine, rtol=1e-4, atol=1e-6
        )


def test_a_folder_becomes_records_that_say_who_leaks(
    send: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = send(), tmp_path / "leaks"
    model = str(tmp_path / "model")
    opened: Any = SPEC.open(torch.device("cpu"))
    opened.module.save_pretrained(model)
    opened.tokenizer.save_pretrained(model)
    truth = tmp_path / "truth.jsonl"
    rows = [{"client": name, "round": 1, "text": text, "label": 1} for name, text in TEXTS.items()]
    truth.write_text("\n".join(map(json.dumps, rows)))
    words = ["federated", "audit", str(folder), "--model", model, "--attack", "span"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "client a: 1 text rebuilt by span, 1 proven" in shown and TEXTS["a"] not in shown
    assert "num-examples, accuracy" in shown
    assert main([*words, "--truth", str(truth), "--out", str(out), "--client", "b"]) == 0
    assert "Client b, round 1: 1 of 1 word for word" in capsys.readouterr().out
    (leak,) = list_client_leaks(read_run(out).summaries)
    assert (leak.client, leak.whole, leak.proven) == ("b", 1, 1)
    assert main(["gate", str(out), "--max", "exact_match=0.05"]) == 4
    assert main(["report", str(out), "--format", "markdown"]) == 0
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "## Clients and rounds" in page and "| b | 1 |" in page and "These leak too" in page
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["clients"] for one in found["rounds"]] == [["a", "b"]]
    assert "text" not in found["rounds"][0]["guesses"][0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--client", "c"], "There is no client c"),
        (["--round", "9"], "There is no round 9"),
        (["--truth", "nowhere.jsonl"], "There is no nowhere.jsonl"),
        (["--protocol", "fedagv"], "did you mean"),
        (["--protocol", "fedsgd"], "say how they trained"),
        (["--model", "lenet"], "reads no text"),
    ],
)
def test_what_is_not_there_is_said(
    more: list[str], message: str, send: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["federated", "audit", str(send()), "--model", "tiny", "--attack", "span", *more]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_attacked_is_refused_with_its_reason(
    send: Callable[..., Path], tmp_path: Path, target: Target
) -> None:
    federation = survey_federation(send(platform={"secure_aggregation": True}))
    assert not group_rounds(federation) and len(list_refusals(federation)) == 2
    federation = survey_federation(send())
    (one,) = group_rounds(federation)
    truth = tmp_path / "truth.jsonl"
    truth.write_text('{"client": "a", "text": "she gave her friend a red book", "label": 1}')
    with pytest.raises(GradleakError, match="has no text of client b, round 1"):
        attack_round(federation, one, target, SPEC, read_client_texts(truth))
    with pytest.raises(GradleakError, match="holds weights and no update"):
        observe_capture(one.messages[0].path, target=target)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("no json", "line 1 is no JSON"),
        ("{}", "line 1 has no text"),
        ('{"text": "a", "node": 1}', "has 'node', and a row has"),
        ('{"text": "a", "round": "one"}', "round a number"),
        ('{"text": "a", "label": [1]}', "neither a number nor a name"),
    ],
)
def test_a_broken_truth_is_a_sentence(row: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "truth.jsonl").write_text(row)
    with pytest.raises(GradleakError, match=message):
        read_client_texts(tmp_path / "truth.jsonl")


def test_a_folder_of_files_says_whose_they_are(tmp_path: Path) -> None:
    (tmp_path / "client-a.csv").write_text("text,label\nalways,1\n")
    (tmp_path / "client-a-round-2.csv").write_text("text,label\nlater,0\n")
    (tmp_path / "readme.md").write_text("no texts")
    held = read_client_texts(tmp_path)
    assert [one.text for one in held.find(["a"], 1)] == ["always"]
    assert [one.text for one in held.find(["a"], 2)] == ["later", "always"]
    assert not held.find(["b"], 1)


def test_who_leaks_most_and_how_it_changes_is_told() -> None:
    leaks = [
        ClientLeak("1", 1, "no defense", 2, 2, 2, 1.0, 0.1),
        ClientLeak("2", 1, "no defense", 2, 1, 0, 0.5, 0.1),
        ClientLeak("1", 2, "client_dp:clip=1", 2, 0, 0, 0.2, 0.1),
        ClientLeak("2", 2, "client_dp:clip=1", 2, 0, 0, 0.0, 0.1),
    ]
    assert tell_clients(leaks) == [
        "Of 2 clients 1 leaks most (ROUGE-1 60.0) and 2 least (25.0).",
        "Rebuilt word for word, round 1: 3 of 4 texts; round 2: 0 of 4 texts.",
        "ROUGE-1 by what the platform did to updates: no defense 75.0; client_dp:clip=1 10.0.",
    ]
    assert tell_clients([]) == []


def test_what_left_beside_arrays_is_plain_and_bounded() -> None:
    beside = {"m": {"loss": float("nan"), "masked": b"1234", "many": list(range(600))}}
    plain = make_plain({**beside, "text": "x" * 2000, "count": torch.tensor(3).numpy()})
    assert plain["m"]["loss"] == "nan" and plain["m"]["masked"] == "4 bytes"
    assert plain["m"]["many"][-1] == "and 100 more" and len(plain["text"]) == 500
    assert plain["count"] == 3
