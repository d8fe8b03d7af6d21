"""Pictures from files, in every layout; all made here."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from pack_pictures import write_npz

from gradleak.core.errors import GradleakError
from gradleak.datasets import resolve_dataset
from gradleak.datasets.made_up import Shapes
from gradleak.datasets.picture_sets import Cifar10, PictureFiles, Pictures
from gradleak.records import png

COUNT = 40
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(COUNT) % 10


def as_npz(folder: Path) -> None:
    half = COUNT // 2  # in two parts
    write_npz(folder / "cifar10_test.1.npz", Pictures(PIXELS[:half], LABELS[:half]))
    write_npz(folder / "cifar10_test.2.npz", Pictures(PIXELS[half:], LABELS[half:]))


def as_python_batches(folder: Path) -> None:
    rows = np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2).reshape(COUNT, -1))
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": rows, b"labels": LABELS.tolist()}))


def as_strips(folder: Path) -> None:
    strip = png.Pixels((COUNT, 1024, 3), PIXELS.tobytes())
    (folder / "test_batch.png").write_bytes(png.write(strip))
    (folder / "test_lables.json").write_text(json.dumps(LABELS.tolist()))


@pytest.mark.parametrize("layout", [as_npz, as_python_batches, as_strips])
def test_every_layout_gives_the_same_pictures(layout: object, tmp_path: Path) -> None:
    layout(tmp_path)  # type: ignore[operator]
    found = Cifar10(folder=str(tmp_path), seed=None).load(7)
    assert [example.label for example in found] == LABELS[:7].tolist()
    assert all(
        example.content.pixels == pixels.tobytes()
        for example, pixels in zip(found, PIXELS, strict=False)
    )


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(GradleakError, match=r"os\.system, which is no array"):
        Cifar10(folder=str(tmp_path)).load(1)


def test_selections_draw_what_they_say(tmp_path: Path) -> None:
    as_npz(tmp_path)
    at = {"folder": str(tmp_path)}
    assert {example.label for example in Cifar10(classes=(2, 5), **at).load()} == {2, 5}
    mixed = Cifar10(first_half_share=0.25, size=12, **at).load()
    assert sum(example.label < 5 for example in mixed) == 3 and len(mixed) == 12
    assert (
        Cifar10(seed=1, **at).load(5)
        == Cifar10(seed=1, **at).load(9)[:5]
        != Cifar10(seed=2, **at).load(5)
    )
    with pytest.raises(GradleakError, match="asks for 30 pictures of one half"):
        Cifar10(first_half_share=1, size=30, **at).load()
    with pytest.raises(GradleakError, match="first_half_share needs size"):
        resolve_dataset("cifar10:first_half_share=0.5")


def test_where_there_is_no_cifar_the_fix_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADLEAK_DATA", raising=False)
    with pytest.raises(GradleakError, match="set GRADLEAK_DATA"):
        Cifar10().load(1)
    with pytest.raises(GradleakError, match="no test split of CIFAR-10"):
        Cifar10(folder=str(tmp_path)).load(1)


def test_folders_are_classes(tmp_path: Path) -> None:
    for place, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(
            png.write(png.Pixels((32, 32, 3), PIXELS[place].tobytes()))
        )
    found = PictureFiles(str(tmp_path)).load()
    assert [(example.label, example.content.pixels) for example in found] == [
        (0, PIXELS[0].tobytes()),
        (1, PIXELS[1].tobytes()),
    ]
    (tmp_path / "dog" / "b.png").write_bytes(png.write(png.Pixels((8, 8, 3), bytes(192))))
    with pytest.raises(GradleakError, match=r"b\.png has another shape"):
        PictureFiles(str(tmp_path)).load()


def test_shapes_are_the_same_every_time_and_their_parts_have_nothing_in_common() -> None:
    private, public = Shapes(side=8).load(50), Shapes("public", 8).load(50)
    assert private == Shapes(side=8).load(60)[:50]
    assert not {example.content for example in private} & {example.content for example in public}
    assert {example.label for example in private} == {0, 1, 2, 3}
    assert Shapes(side=8).public() == Shapes("public", 8)
