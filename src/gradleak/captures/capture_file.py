"""Captures written and read: safetensors, private, whole or not at all, never pickle."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gradleak.captures.header import (
    FORMAT,
    CaptureError,
    CaptureHeader,
    check_names,
    complete,
    name_in_errors,
    quote,
    write_header,
)
from gradleak.captures.layout import (
    BYTES,
    HIGHEST_RANK,
    LONGEST_HEADER,
    SUFFIX,
    TensorFacts,
    open_capture,
    parse_layout,
)
from gradleak.captures.tensor_names import match_names
from gradleak.records.files import FULL, full_disk_explained, written_aside

if TYPE_CHECKING:  # the header alone can be read without waiting for torch
    import torch
    from torch import Tensor

LOOKED_AT = 2**22  # entries that are looked at in one go, for values that are no numbers


@dataclass(frozen=True, eq=False)
class Capture:
    """An update that left a client: named tensors on the CPU, in the dtypes they were sent in."""

    header: CaptureHeader
    tensors: "Mapping[str, Tensor]"


def write_capture(path: Path | str, capture: Capture) -> None:
    """Writes a private file that `read_capture` takes, or nothing.

    Tensors that share memory are stored once, under the name that the model uses. What the header
    leaves open of versions and time is filled in.
    """
    import json

    from safetensors.torch import save_file

    path = Path(path)
    if path.suffix != SUFFIX:
        raise CaptureError(f"{path} must end in {SUFFIX}, by which captures are found again.")
    with name_in_errors("This update cannot be captured"):
        check_names(capture.tensors)
        stored, tied = _store_once(capture.tensors, capture.header.model.names)
        _check_values(stored)
        header = write_header(complete(capture.header))
        if len(header.encode()) > LONGEST_HEADER // 2:  # the list of tensors needs room too
            raise CaptureError(
                f"its header takes {len(header):,} letters, and {LONGEST_HEADER // 2:,} are the"
                " most: leave config or other_records out."
            )
    metadata = {"format": FORMAT, "header": header}
    if tied:
        metadata["tied"] = json.dumps(tied)
    try:
        with full_disk_explained(f"write {path}"), written_aside(path) as aside:
            save_file({name: _pack(tensor) for name, tensor in stored.items()}, aside, metadata)
            with open_capture(aside) as file:
                parse_layout(file, path)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise CaptureError(
            f"{path} cannot be written ({error.strerror}). Name a file in a folder of your own."
        ) from error


def read_capture(path: Path | str, expected: "Mapping[str, torch.Size] | None" = None) -> Capture:
    """Reads a capture, its tensors under the names that were sent. Everything that can be checked
    before reading a tensor is: where `expected` holds a model's shapes by name, against these too.
    """
    path = Path(path)
    with open_capture(path) as file:
        layout = parse_layout(file, path)
        with name_in_errors(path):
            if expected is not None:
                match_names({facts.name: facts.shape for facts in layout.tensors}, expected)
            _check_memory(layout.bytes)
            file.seek(layout.begin)
            tensors = {facts.name: _read_tensor(file, facts) for facts in layout.tensors}
            _check_values(tensors)
    return Capture(layout.header, tensors)


def subtract_states(
    before: "Mapping[str, Tensor]", after: "Mapping[str, Tensor]"
) -> "dict[str, Tensor]":
    """Returns weights after minus before, which is what a capture of the kind "difference" holds.

    Half precisions are subtracted in float32, where their difference is exact. What has no
    fractions, such as counts of batches, is no weight and is left out.
    """
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())[0]
        side = "before" if odd in before else "after"
        raise CaptureError(
            f"{quote(odd)} is in the state {side} training alone: take both states from the same"
            " model, wrapped in the same way."
        )
    import torch

    differences = {}
    made: dict[tuple[object, ...], Tensor] = {}
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape:
            raise CaptureError(
                f"{quote(name)} has the shape {write_shape(old.shape)} before training and"
                f" {write_shape(new.shape)} after it: take both states from the same model."
            )
        if not (old.is_floating_point() and new.is_floating_point()):
            continue
        # Tied weights are tied in both states; their difference is then one tensor too
        key = (old.data_ptr(), new.data_ptr(), old.shape, old.stride())
        if key not in made or not old.numel():
            wide = old.dtype if old.dtype.itemsize > 4 else torch.float32
            made[key] = new.detach().to("cpu", wide) - old.detach().to("cpu", wide)
        differences[name] = made[key]
    return differences


def write_shape(shape: Sequence[int]) -> str:
    """Writes a shape as `384 × 1536`; a single number has none."""
    return " × ".join(map(str, shape)) or "one number"


def _store_once(
    tensors: "Mapping[str, Tensor]", names: Sequence[str]
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Dense tensors on the CPU, each once, and the other names of those that had several."""
    import torch

    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    kept: list[Tensor] = []  # so that no memory is freed and taken again by another one
    own = set(names)
    for name in sorted(tensors, key=lambda name: name not in own):  # the model's own names first
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"{quote(name)} is of type {type(tensor).__name__}: turn it into a torch tensor."
            )
        if str(tensor.dtype).removeprefix("torch.") not in BYTES:
            raise CaptureError(
                f"{quote(name)} holds {str(tensor.dtype).removeprefix('torch.')}, and a capture"
                f" holds {', '.join(BYTES)}: leave it out or convert it."
            )
        if tensor.device.type == "meta" or not tensor.numel():
            raise CaptureError(
                f"{quote(name)} has no entries here: gather sharded or offloaded parameters first."
            )
        if tensor.ndim > HIGHEST_RANK:
            raise CaptureError(
                f"{quote(name)} has {tensor.ndim} axes, and a capture's tensors at most"
                f" {HIGHEST_RANK}: flatten it."
            )
        held = tensor.detach()
        dense = held.to_dense() if held.layout != torch.strided else held
        memory = (dense.device, dense.data_ptr(), dense.dtype, tuple(dense.shape), dense.stride())
        if memory in first:
            tied[name] = first[memory]
        else:
            first[memory] = name
            stored[name] = dense.cpu()
            kept.append(dense)
    return {name: stored[name] for name in tensors if name in stored}, tied


def _pack(tensor: "Tensor") -> "Tensor":
    """The same numbers in a memory of their own, as safetensors' writer wants them."""
    packed = tensor.contiguous()
    shared = packed.untyped_storage().nbytes() > packed.numel() * packed.element_size()
    return packed.clone() if shared else packed


def _check_values(tensors: "Mapping[str, Tensor]") -> None:
    if not tensors:
        raise CaptureError("there is no tensor in it: no parameter had a gradient.")
    empty = True
    for name, tensor in tensors.items():
        for piece in _pieces(tensor):
            if not bool(piece.isfinite().all()):
                what = "NaN (not a number)" if bool(piece.isnan().any()) else "infinity"
                raise CaptureError(
                    f"{quote(name)} holds {what}, by which nothing can be matched: capture a step"
                    " that did not overflow, after gradients are unscaled."
                )
            empty = empty and not bool(piece.any())
    if empty:
        raise CaptureError(
            "every entry of it is zero, so that nothing can leak from it: capture between"
            " backward() and zero_grad(), or after training changed the weights."
        )


def _pieces(tensor: "Tensor") -> "Iterator[Tensor]":
    """A tensor in pieces, so that looking at it takes little memory."""
    if tensor.numel() <= LOOKED_AT or not tensor.ndim:
        yield tensor
        return
    rows = max(1, LOOKED_AT * tensor.shape[0] // tensor.numel())
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows]


def _check_memory(wanted: int) -> None:
    """Refuses tensors that do not fit this machine: a file with holes is as long as it likes."""
    import torch

    from gradleak.core.memory import free_memory, in_words

    free = free_memory(torch.device("cpu"))
    if free is not None and wanted > free:
        raise CaptureError(
            f"its tensors take {in_words(wanted)}, and {in_words(free)} of memory are free: read it"
            " on a larger machine, or capture fewer tensors."
        )


def _read_tensor(file: BinaryIO, facts: TensorFacts) -> "Tensor":
    import torch

    tensor = torch.empty(facts.shape, dtype=getattr(torch, facts.dtype))
    room = tensor.view(-1).view(torch.uint8).numpy().data
    assert len(room) == facts.size * BYTES[facts.dtype]  # torch and safetensors count alike
    done = 0
    while done < len(room):
        got = file.readinto(room[done:])  # type: ignore[attr-defined]
        if not got:
            raise CaptureError("it became shorter while it was read: read it when it is whole.")
        done += got
    return tensor
