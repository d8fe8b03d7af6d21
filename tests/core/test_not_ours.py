"""Models of the hub where there is no network: refused at once, or taken from the cache, without
the library's retries."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gradleak
from gradleak.cli.command import find_target
from gradleak.core import not_ours
from gradleak.core.errors import GradleakError

NOBODY = "http://127.0.0.1:9"  # no server listens on this port


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that cannot be reached, and an empty cache."""
    for name in (*not_ours.OFFLINE, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "")  # set, so that what is set below it is undone too
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_hub_id_that_cannot_be_had_is_refused_with_the_ways_out(no_network: Path) -> None:
    with pytest.raises(
        GradleakError,
        match=r"org/model is no folder here, .* cannot be reached\. Check the spelling",
    ):
        not_ours.find_model("org/model")


def test_a_model_in_the_cache_is_used_without_network(no_network: Path) -> None:
    snapshot = no_network / "models--org--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    not_ours.find_model("org/model")
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # so that the library does not try again


def test_one_who_is_offline_by_choice_is_told_so(
    no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:10")
    with pytest.raises(GradleakError, match="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"):
        not_ours.find_model("org/model")


def test_a_server_that_answers_is_reached_also_through_a_proxy(
    no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not_ours.is_reachable(address)
        # With and without a scheme
        for number, proxy in enumerate((address, address.removeprefix("http://"))):
            monkeypatch.setenv("http_proxy", proxy)
            assert not_ours.is_reachable(f"http://hub{number}.invalid")
        monkeypatch.setenv("no_proxy", "elsewhere.invalid")
        assert not not_ours.is_reachable("http://elsewhere.invalid")


def test_what_is_no_hub_id_is_left_to_whoever_loads_it(no_network: Path) -> None:
    not_ours.find_model("./clff")
    not_ours.find_model("a/b/c")


def test_a_path_beside_folders_that_are_there_is_not_taken_for_a_hub_id(
    no_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    find_target("models/clff")
    with pytest.raises(GradleakError, match="cannot be reached"):
        find_target("org/model:classes=3")


def test_the_command_line_says_so_before_it_loads_torch(no_network: Path) -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom gradleak.cli import"
        " main\nsys.exit(main(sys.argv[1:]))"
    )
    settings = {**os.environ, "PYTHONPATH": str(Path(gradleak.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", program, "audit", "--target", "org/model"],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "cannot be reached" in result.stderr
