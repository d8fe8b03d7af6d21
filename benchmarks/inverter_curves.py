"""Learning to Invert, Figures 3, 5 and 6: how inverters of pictures depend on the size and the kind
of the public set.

    GRADLEAK_DATA=FOLDER python benchmarks/inverter_curves.py --figure size \\
        --device cuda --out curves/size
    GRADLEAK_DATA=FOLDER python benchmarks/inverter_curves.py --figure shift \\
        --device cuda --out curves/shift
    GRADLEAK_DATA=FOLDER python benchmarks/inverter_curves.py --lpips curves/size

All inverters of a figure are trained together in one process. `size`: public sets of several sizes,
each a part of the next. `shift`: the classes are cut in two halves, the target is trained on the
first, and a share β of the public set is of it; the secrets are test pictures of the first half.
Leaves points.jsonl, results.md, mse.svg and psnr.svg in the folder. `--lpips` adds LPIPS to the
points of a folder from the guesses kept there, on a machine that has its weights.
"""

import argparse
import json
import math
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curve_picture import Curve, CurvePoint, draw_curves
from side_by_side import SideBySide
from torch import Tensor

from gradleak.attacks.learning_to_invert.picture_attacks import PictureInversion, read_pictures
from gradleak.audit.spec import AuditSpec
from gradleak.core.attack import Bench, ClientSetting
from gradleak.core.batch import Example
from gradleak.core.streams import Streams
from gradleak.core.target import Target, TargetSpec
from gradleak.metrics.picture_distances import load_weights, perceptual_distance
from gradleak.priors.picture_priors import OnePicture
from gradleak.records.statistics import interval
from gradleak.targets.image_classifier import ImageClassifier
from gradleak.training.picture_models import ImageTraining, train_image_classifier

BLACK = OnePicture(torch.zeros(3, 8, 8))  # a prior that these attacks do not ask
KEPT = 200  # guesses of every inverter that are kept, for LPIPS
ACROSS = {
    "size": "public pictures",
    "shift": "share β of the public set that is of the target's own classes",
}
TARGET_TRAINING = ImageTraining(epochs=20, batch_size=256, learning_rate=0.003)


def count_peak_bytes(device: torch.device) -> int | None:
    """Returns the most bytes held at once on a GPU so far; nobody counts them on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def main() -> None:
    asked = _arguments()
    if asked.lpips is not None:
        add_lpips(asked.lpips)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    lines = [f"{line}" for line in asked.defense or ["none", "sign"]]
    plain = {"target": asked.target, "data": asked.data, "attacks": [asked.attack]}
    specs = [
        AuditSpec.from_plain({**plain, "defenses": [] if line == "none" else [line]})
        for line in lines
    ]
    (attack,) = specs[0].attacks
    if not isinstance(attack, PictureInversion) or attack.learning_rate is None:
        raise SystemExit(
            "--attack is lti_pictures with a learning_rate: all inverters learn together."
        )
    source = specs[0].data.public()
    if source is None:
        raise SystemExit(f"{asked.data} names no public pictures: use cifar10 or shapes.")
    public, secrets = source.load(), specs[0].data.load()
    opened, device = specs[0].target, torch.device(asked.device)
    if asked.figure == "size":
        places = [str(size) for size in asked.sizes]
        sets = [_first(public, size) for size in asked.sizes]
    else:
        half = _classes(opened) // 2
        places, sets = (
            [f"{share:g}" for share in asked.shares],
            [mixture(public, share, asked.pictures, half) for share in asked.shares],
        )
        secrets = [one for one in secrets if one.label is not None and one.label < half]
        opened = _trained(
            opened, [one for one in public if (one.label or 0) < half], secrets, asked.out, device
        )
    secrets, target = secrets[: asked.secrets], opened.open(device)
    setting = ClientSetting(opened, target, specs[0].protocol, (), specs[0].view, 1)
    bench = Bench(Streams.root("attacker", 0), BLACK, deadline=time.monotonic() + asked.seconds)
    group = SideBySide(
        attack,
        setting,
        [spec.defenses for spec in specs],
        [read_pictures(target, one) for one in sets],
        bench,
    )
    names = [
        (line, place, len(one)) for line in lines for place, one in zip(places, sets, strict=True)
    ]
    print(
        f"{group.count} inverters on {asked.device}: {', '.join(lines)} × {', '.join(places)}",
        flush=True,
    )
    began = time.monotonic()

    def look(step: int, errors: list[float]) -> None:
        seconds = time.monotonic() - began
        print(
            f"step {step}/{attack.steps}  {seconds:.0f} s  held out "
            + " ".join(f"{one:.4f}" for one in errors),
            flush=True,
        )

    steps = group.run(look)
    common = {
        "figure": asked.figure,
        "steps": steps,
        "seconds": time.monotonic() - began,
        "target": opened.fingerprint(),
    }
    common |= {"attack": attack.describe_learning(), "peak_memory": count_peak_bytes(device)}
    common |= {
        "machine": (
            torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        )
    }
    common |= {"created": datetime.now(UTC).date().isoformat(), "command": _command()}
    common["gradients_per_second"] = steps * attack.training_batch * len(sets) / common["seconds"]
    points = write_points(
        asked.out, group, target, secrets, names, common, blind_errors(target, sets, secrets)
    )
    draw(asked.out, points)
    memory = (
        ""
        if common["peak_memory"] is None
        else f", peak memory {common['peak_memory'] / 2**30:.1f} GiB"
    )
    print(
        f"{steps} steps in {common['seconds']:.0f} s, {common['gradients_per_second']:.0f}"
        f" gradients a second{memory}"
    )
    print((asked.out / "results.md").read_text())


def blind_errors(target: Target, sets: list[list[Example]], secrets: list[Example]) -> list[float]:
    """The squared error of each public set's mean picture: what can be guessed without the
    update."""
    truth = read_pictures(target, secrets).pixels.float() / 255
    means = [read_pictures(target, one).pixels.float().mean(0) / 255 for one in sets]
    return [float((truth - mean).square().mean()) for mean in means]


def mixture(public: list[Example], share: float, size: int, half: int) -> list[Example]:
    """So many pictures, a share of them of the classes below `half`, in a mixed order."""
    first = round(share * size)
    own = [one for one in public if one.label is not None and one.label < half]
    other = [one for one in public if one.label is not None and one.label >= half]
    if len(own) < first or len(other) < size - first:
        raise SystemExit(
            f"A share {share:g} of {size} pictures asks for more than the {len(own)} and"
            f" {len(other)} of the two halves."
        )
    mixed = own[:first] + other[: size - first]
    return [mixed[place] for place in np.random.default_rng(0).permutation(size)]


def write_points(
    out: Path,
    group: SideBySide,
    target: Target,
    secrets: list[Example],
    names: list[tuple[str, str, int]],
    common: dict[str, Any],
    blind: list[float],
) -> list[dict[str, Any]]:
    """Scores every inverter on the secrets; one line a point."""
    private = read_pictures(target, secrets).batch(1)
    assert private.pixels is not None
    truth = (private.pixels[:, 0].float() * 255).round()
    guessed, labels = group.read(private, Streams.root("client", 0))
    rounded = (guessed.clamp(0, 1) * 255).round()
    points: list[dict[str, Any]] = []
    (out / "guesses").mkdir(exist_ok=True)
    with (out / "points.jsonl").open("w") as file:
        for (defense, place, size), pictures, read, held in zip(
            names, rounded, labels, group.best.tolist(), strict=True
        ):
            errors = ((pictures - truth) / 255).square().flatten(1).mean(1).clamp_min(1e-10)
            epochs = common["steps"] * group.attack.training_batch / size
            point = {
                "defense": defense,
                "place": place,
                "pictures": size,
                "epochs": epochs,
                "held_out_error": held,
                **common,
            }
            point |= {
                "n": len(secrets),
                **_scored("mse", errors),
                **_scored("psnr", -10 * errors.log10()),
            }
            point |= {"blind_mse": blind[len(points) % len(blind)]}
            point |= {"labels_right": float((read == private.labels[:, 0]).float().mean())}
            points.append(point)
            file.write(json.dumps(point) + "\n")
            file.flush()
            kept = {
                "guesses": pictures[:KEPT].byte().cpu().numpy(),
                "secrets": truth[:KEPT].byte().cpu().numpy(),
            }
            np.savez_compressed(out / "guesses" / f"{len(points) - 1:02d}.npz", **kept)
    return points


def add_lpips(out: Path) -> None:
    """Adds LPIPS to the points of a folder and draws it."""
    points = [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]
    for number, point in enumerate(points):
        with np.load(out / "guesses" / f"{number:02d}.npz") as archive:
            pair = [
                torch.from_numpy(archive[name]).float() / 127.5 - 1
                for name in ("secrets", "guesses")
            ]
        pieces = zip(*(torch.split(one, 50) for one in pair), strict=True)
        point |= _scored(
            "lpips", torch.cat([perceptual_distance(*piece, load_weights()) for piece in pieces])
        )
    (out / "points.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    draw(out, points)
    print((out / "results.md").read_text())


def draw(out: Path, points: list[dict[str, Any]]) -> None:
    """One picture a metric, and a table of all."""
    defenses = list(dict.fromkeys(point["defense"] for point in points))
    metrics = [metric for metric in ("mse", "psnr", "lpips") if metric in points[0]]
    one = points[0]
    batch = one["attack"]["training_batch"]
    note = (
        f"{one['n']} secrets, {one['steps']} steps of {batch}; bars are 95 % intervals over"
        " secrets, of one training."
    )
    for metric in metrics:
        curves = [
            Curve(
                defense,
                tuple(
                    CurvePoint(point["place"], *point[metric])
                    for point in points
                    if point["defense"] == defense
                ),
            )
            for defense in defenses
        ]
        title = (
            f"Learning to Invert: {metric.upper()} by"
            f" {'size' if one['figure'] == 'size' else 'kind'} of the public set"
        )
        (out / f"{metric}.svg").write_text(
            draw_curves(title, ACROSS[one["figure"]], metric.upper(), curves, [note])
        )
    (out / "results.md").write_text("\n".join(page(points, metrics)) + "\n")


def page(points: list[dict[str, Any]], metrics: Sequence[str]) -> Iterator[str]:
    """What was run, and every point with its interval; the papers' curves have no printed
    values."""
    one = points[0]
    yield from (
        (
            f"# Learning to Invert: inverters by {'size' if one['figure'] == 'size' else 'kind'} of"
            " the public set"
        ),
        "",
    )
    yield (
        f"- `{one.get('command', '?')}`, {one.get('created', 'at an unknown date')},"
        f" {one.get('machine', 'unknown machine')}"
    )
    rate = f"{one['gradients_per_second']:,.0f} gradients a second"
    yield (
        f"- {len(points)} inverters together, {one['steps']} steps in {one['seconds']:.0f} s,"
        f" {rate}; target {one['target']}"
    )
    scored = f" (lpips: the first {min(KEPT, one['n'])})" if "lpips" in metrics else ""
    yield (
        f"- n = {one['n']} test pictures{scored}; mean [95 % interval over pictures], of one"
        " training"
    )
    yield from (
        (
            "- blind: the squared error of the public set's mean picture; ours alone, as the paper"
            " prints no values"
        ),
        "",
    )
    yield from (f"![{metric.upper()}]({metric}.svg)" for metric in metrics)
    head = ["defense", ACROSS[one["figure"]], "epochs", *metrics, "blind mse", "labels right"]
    yield from ("", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for point in points:
        scores = ["{:.3g} [{:.3g}, {:.3g}]".format(*point[metric]) for metric in metrics]
        rest = [
            format(point["blind_mse"], ".3g") if "blind_mse" in point else "–",
            f"{100 * point['labels_right']:.1f} %",
        ]
        names = [point["defense"], point["place"], format(point["epochs"], ".1f")]
        yield f"| {' | '.join([*names, *scores, *rest])} |"


def _scored(metric: str, values: Tensor) -> dict[str, list[float]]:
    found = interval([float(value) for value in values.cpu()], list(range(len(values))))
    return {metric: [found.mean, found.low, found.high]}


def _first(public: list[Example], size: int) -> list[Example]:
    if size > len(public):
        raise SystemExit(
            f"There are {len(public)} public pictures, fewer than {size}: choose --sizes."
        )
    return public[:size]


def _classes(spec: TargetSpec) -> int:
    return int(spec.open(torch.device("cpu")).classes)


def _trained(
    spec: TargetSpec,
    training: list[Example],
    evaluation: list[Example],
    out: Path,
    device: torch.device,
) -> TargetSpec:
    """The target trained on its own half of the classes, unless weights are given."""
    fields: Any = spec
    if fields.weights is not None:
        return spec
    target, path = spec.open(device), out / "target.safetensors"
    assert isinstance(target, ImageClassifier)
    news = list(train_image_classifier(TARGET_TRAINING, target, training, evaluation, path))
    print(
        f"{spec.name} trained on {len(training)} pictures of the first half: accuracy"
        f" {news[-1]['accuracy']:.3f}",
        flush=True,
    )
    trained: TargetSpec = replace(fields, weights=str(path))
    return trained


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=["size", "shift"], default="size")
    parser.add_argument("--out", type=Path, default=Path("curves"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", default="lenet", help="lenet:weights=FILE is used as it is")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument(
        "--attack",
        default="lti_pictures:steps=12000,training_batch=256,directions=1500,learning_rate=0.0005",
    )
    parser.add_argument("--defense", action="append", help="repeat for more [none and sign]")
    parser.add_argument("--sizes", type=_numbers(int), default=[500, 5000, 15000, 50000])
    parser.add_argument("--shares", type=_numbers(float), default=[0.0, 0.01, 0.1, 0.5, 1.0])
    parser.add_argument("--pictures", type=int, default=25000, help="in every public set of shift")
    parser.add_argument("--secrets", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop training then")
    parser.add_argument(
        "--lpips", type=Path, help="a folder with guesses to score, instead of a figure"
    )
    return parser.parse_args()


def _command() -> str:
    """As it was called; of whole paths the ends."""
    words = [re.sub(r"(?<![^\s=:,])/\S*/", "", word) for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/inverter_curves.py", *words])


def _numbers(kind: type) -> Any:
    return lambda line: [kind(one) for one in line.split(",")]


if __name__ == "__main__":
    main()
