"""How many sentences span and energy get back and certify: python benchmarks/certified_share.py
--out certified.jsonl.

MiniLM-L6, the first tuning sentences of CoLA (never the published test rows), batch size 1: span on
everything, energy on one matrix of one layer at a time. A line a cell: word for word, certified,
certified and wrong (must be zero), seconds, and the share of them that certifying took.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gradleak.attacks.certificate import certify_all
from gradleak.audit import AuditSpec
from gradleak.audit.client import observe, private_batches
from gradleak.audit.runner import Finished, run_audits

MODULES = ("query", "key", "value", "ffn_in")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="minilm")
    parser.add_argument("--data", default="cola:selection=lamp_tune")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help="for each cell, which is then attacked by itself",
    )
    parser.add_argument("--attack", default="", help="span or energy; both if not given")
    parser.add_argument("--layers", nargs="+", type=int, default=list(range(1, 7)))
    parser.add_argument("--modules", nargs="+", default=list(MODULES))
    parser.add_argument(
        "--truth",
        action="store_true",
        help="certify the secrets themselves, as for an attack that finds all",
    )
    parser.add_argument("--out", type=Path, default=Path("certified.jsonl"))
    chosen = parser.parse_args()
    cells = [settings(chosen, "span", "everything")]
    views = [
        {"name": "parts", "layers": str(layer), "modules": [module]}
        for layer in chosen.layers
        for module in chosen.modules
    ]
    cells += [settings(chosen, "energy", view) for view in views]
    wanted = [cell for cell in cells if chosen.attack in ("", cell.attacks[0].name)]
    by_attack = [
        [cell for cell in wanted if cell.attacks[0].name == name] for name in ("span", "energy")
    ]
    groups = by_attack if chosen.seconds is None else [[cell] for cell in wanted]
    for group in filter(None, groups):
        if chosen.truth:
            lines = certified_truths(group, chosen.device)
        else:
            found = run_audits(group, device=chosen.device)
            lines = (describe(spec, finished) for spec, finished in zip(group, found, strict=True))
        for line in lines:
            print(json.dumps(line), flush=True)
            with chosen.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def settings(chosen: argparse.Namespace, attack: str, view: object) -> AuditSpec:
    plain = {
        "target": chosen.target,
        "data": chosen.data,
        "limit": chosen.limit,
        "attacks": [attack],
        "view": view,
    }
    return replace(AuditSpec.from_plain(plain), time_limit=chosen.seconds)


def certified_truths(group: Sequence[AuditSpec], device: str) -> Iterator[dict[str, object]]:
    """One cell's counts for a guess that is always right."""
    target = group[0].target.open(torch.device(device))
    secrets = private_batches(group[0], target)
    for spec in group:
        seen = [observe(spec, target, private, index) for index, private in enumerate(secrets)]
        rows = [private.batch.ids for private in secrets]
        guesses = [[tuple(row[0].tolist())] for row in rows if row is not None]
        began = time.process_time()
        proven = [told.proven for told in certify_all(seen, guesses)]
        cell = {"attack": "the truth", "view": repr(spec.view), "torch": torch.__version__}
        yield cell | {
            "n": len(proven),
            "certified": sum(proven),
            "cpu_seconds": round(time.process_time() - began, 1),
        }


def describe(spec: AuditSpec, finished: object) -> dict[str, object]:
    """One cell's counts; the error's sentence where it could not be attacked."""
    cell = {"attack": spec.attacks[0].name, "view": repr(spec.view), "torch": torch.__version__}
    if not isinstance(finished, Finished):
        return cell | {"refused": str(finished)}
    (record,) = finished.record.attacks.values()
    right = [example.values["exact_match"] == 1.0 for example in record.examples]
    proven = [example.certified for example in record.examples]
    return cell | {
        "n": len(right),
        "exact": sum(right),
        "certified": sum(proven),
        "wrongly": sum(one and not two for one, two in zip(proven, right, strict=True)),
        "each": "".join(
            "c" if two else "r" if one else "." for one, two in zip(right, proven, strict=True)
        ),
        "seconds": round(record.cost.seconds, 1),
    }


if __name__ == "__main__":
    main()
