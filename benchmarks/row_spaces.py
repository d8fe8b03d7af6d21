"""What rounding leaves outside of a gradient's span, beside what span takes it for: python
benchmarks/row_spaces.py --out row_spaces.jsonl.

The client's own inputs say where the span is, so that the rest of a gradient is known to be
rounding. For each linear module of each layer the largest singular value of this rest is held
against that of errors drawn as attacks/span/row_space.py draws them, scaled to the rest's size:
OWN_SPREAD and SPREAD there are read off these ratios. The rank that span finds is held against the
number of directions that are stronger than the rest.

Small random models of seven kinds, or a named target with made-up messages; one gradient, and one
step of plain SGD whose weights are sent, at two rates. Set MKL_CBWR and ATEN_CPU_CAPABILITY
(benchmarks/arithmetics.py --list) for other arithmetics. --table prints what --out holds.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from certificates import Sentences, draw_batch, observe, open_target, random_model
from torch import Tensor

from gradleak.attacks.span.row_space import DrawnErrors, read_row_space
from gradleak.core.observation import Observation
from gradleak.core.parts import ATTENTION_INPUTS, Part
from gradleak.core.registry import find
from gradleak.core.target import Target
from gradleak.matching.inputs import ModuleInputs, matrix_of, visible_linear_parts
from gradleak.matching.linear_algebra import decompose, find_singular_values

PROTOCOLS = ("fedsgd", "fedavg:learning_rate=1.0", "fedavg:learning_rate=0.05")
SINGLE = ("query", "key", "value", "attention_output", "ffn_in", "ffn_out")
GROUPS = (ATTENTION_INPUTS, *((module,) for module in SINGLE))
QUANTILES = (0.0, 0.01, 0.5, 0.99, 0.999, 1.0)
EXISTS = 1e-11  # of the strongest direction of inputs in double precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", type=int, default=14, help="random models, or draws of a target"
    )
    parser.add_argument("--batches", type=int, default=3, help="of each model")
    parser.add_argument("--target", default="", help="small random models if not given")
    parser.add_argument("--protocols", nargs="+", default=list(PROTOCOLS))
    parser.add_argument("--out", type=Path, default=Path("row_spaces.jsonl"))
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if not chosen.table:
        torch.set_num_threads(1)
        with chosen.out.open("a") as file:
            for line in measure(chosen.models, chosen.batches, chosen.target, chosen.protocols):
                file.write(json.dumps(line) + "\n")
                file.flush()
    summarise([json.loads(line) for line in chosen.out.read_text().splitlines()])


def measure(
    models: int, batches: int, name: str, protocols: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Measures every module of every update."""
    for number in range(models):
        rng = Random(f"row spaces {name} {number}")
        target = open_target(name, "cpu") if name else random_model(rng, number)
        for index in range(batches):
            batch = _draw_messages(rng, target) if name else draw_batch(rng, target, "plain", False)
            labels = None if target.labels_are_tokens else [rng.randrange(2) for _ in batch]
            for protocol in protocols:
                view = find("view", "everything")()
                seen = observe(target, batch, labels, view, (), protocol, index)
                for layer in sorted({part.layer for part in target.parts if part.layer}):
                    for modules in GROUPS:
                        parts = visible_linear_parts(seen, layer, modules)
                        found = compare(seen, batch, parts) if parts else None
                        if found:
                            place = {"layer": layer, "modules": "+".join(modules)}
                            yield {"model": target.name, "sent": protocol, **place, **found}


def _draw_messages(rng: Random, target: Target) -> Sentences:
    texts = [example.text for example in find("dataset", "canaries")().load()]
    return tuple(map(tuple, target.encode(rng.sample(texts, rng.choice((1, 2, 4, 8))))))


def compare(
    observation: Observation, batch: Sentences, parts: Sequence[Part]
) -> dict[str, Any] | None:
    """Holds what span reads off some gradients against what the client's inputs say; none where
    nothing is outside of the span."""
    target = observation.target
    tensors = observation.update.tensors
    seen = torch.cat([matrix_of(target, part, tensors[part.name])[0] for part in parts])
    matrix = seen.double()
    fed = _feed(target, batch, parts)
    inputs = decompose(fed)
    basis = inputs.right[inputs.values > EXISTS * inputs.values[0]]
    most = min(matrix.shape)
    if len(basis) >= most - 1 or not matrix.any():
        return None
    inside = (matrix @ basis.mT) @ basis
    signal, rest = decompose(inside), matrix - inside
    strong = int((signal.values > find_singular_values(rest)[0]).sum())
    left = signal.left[:, :strong]
    rest = rest - left @ (left.mT @ rest)
    largest = float(find_singular_values(rest)[0])
    rank = int((signal.values > largest).sum())
    if not largest:
        return None
    space = read_row_space(observation, parts)
    errors = _read_errors(observation, seen, parts)
    drawn = errors.find_largest(rank, errors.fit_scale(rank))
    return {
        "shape": list(matrix.shape),
        "tokens": len(fed),
        "rank": rank,
        "found": space.rank,
        "exact": space.exact,
        "ratio": largest / drawn,
        "margin": float(signal.values[rank - 1]) / largest if rank else None,
    }


def _feed(target: Target, batch: Sentences, parts: Sequence[Part]) -> Tensor:
    labels = None if target.labels_are_tokens else [0] * len(batch)
    made = target.batch_of(batch, labels)[None]
    with torch.no_grad():
        fed = next(iter(ModuleInputs(target, parts[:1])(made).values()))[0]
    mask = made.mask[0].bool()
    rows: Tensor = fed[mask] if fed.shape[:2] == mask.shape else fed.flatten(0, -2)
    return rows.double()


def _read_errors(observation: Observation, matrix: Tensor, parts: Sequence[Part]) -> DrawnErrors:
    if observation.channel.exact:
        return DrawnErrors(matrix, torch.zeros_like(matrix))
    target = observation.target
    each = [matrix_of(target, part, observation.errors(part.name)[None])[0] for part in parts]
    return DrawnErrors(matrix, torch.cat(each))


def summarise(lines: Sequence[dict[str, Any]]) -> None:
    """Prints the quantiles of the ratios, and how many directions were found too many or few."""
    for sent in sorted({line["sent"] for line in lines}):
        of_it = [line for line in lines if line["sent"] == sent]
        print(f"{sent}: {len(of_it)} gradients, {sum(line['exact'] for line in of_it)} exact")
        for name in ("ratio", "margin"):
            values = sorted(line[name] for line in of_it if line[name] is not None)
            places = [values[min(len(values) - 1, int(q * len(values)))] for q in QUANTILES]
            shown = ", ".join(f"{value:.3g}" for value in places)
            print(f"  {name} at {', '.join(f'{100 * q:g} %' for q in QUANTILES)}: {shown}")
        for exact in (True, False):
            off = Counter(line["found"] - line["rank"] for line in of_it if line["exact"] == exact)
            print(f"  directions too many, {'exact' if exact else 'others'}: {sorted(off.items())}")


if __name__ == "__main__":
    main()
