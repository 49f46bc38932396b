"""A trained network as a file for other programs: torch.export, ONNX, or weights, from raw inputs to probabilities.

    p = softmax(net((scale · x - mean) / std) / T)

x are inputs as they come, such as uint8 images; normalisation and temperature are part of what is written. A file is
put in its place only after what it holds, read back, has given the probabilities of the network on random inputs.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metacal.data import InputKind
from metacal.errors import EXTRAS, InputError, require, require_choice, require_packages
from metacal.files import write_atomically
from metacal.inputs import logits_in

__all__ = ["FORMATS", "Probabilities", "export"]

_BATCHES = (3, 1, 8)  # sizes at which a file is compared with the network; it was traced with another one, 2


class Probabilities(nn.Module):
    """The calibrated network as one module: `forward(x)` gives probabilities (N, K), float32 at least, of raw inputs.

    Args:
        net: from inputs as it was trained on to logits (N, K), or an object that holds these as `logits`.
        kind: of the inputs, with the transform that they go through.
        temperature: T.
    """

    def __init__(self, net: nn.Module, kind: InputKind, temperature: float) -> None:
        super().__init__()
        self.net = net
        self.dtype = next(p.dtype for p in net.parameters() if p.is_floating_point())
        self.temperature = temperature
        self.kind = kind
        self.gain: Tensor | None
        self.shift: Tensor | None
        t = kind.transform
        shape = (-1,) + (1,) * (len(kind.shape) - 1)
        self.register_buffer("gain", None if t is None else (t.scale / t.std).to(self.dtype).view(shape))
        self.register_buffer("shift", None if t is None else (t.mean / t.std).to(self.dtype).view(shape))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is not None and self.shift is not None:
            x = x.to(self.dtype) * self.gain - self.shift
        logits = logits_in(self.net(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.softmax(logits / self.temperature, dim=1)

    def example(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` random inputs of the type, shape and range of those in training."""
        shape, kind = (n, *self.kind.shape), self.kind
        if kind.dtype == torch.uint8:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if kind.dtype == torch.int64:
            return torch.randint(int(kind.low), int(kind.high) + 1, shape, generator=generator)
        x = torch.rand(shape, generator=generator, dtype=torch.float64) * (kind.high - kind.low) + kind.low
        return x.to(self.dtype)


def export(
    net: nn.Module, kind: InputKind, temperature: float, class_names: Sequence[str], path: str | Path, format: str
) -> None:
    """Write the calibrated network to `path`, after the file was compared with it on random inputs, on the CPU.

    - ``torch-export``: `torch.export.load(path).module()(x)`; the names are in its extra file ``class_names.json``.
    - ``onnx``: input ``inputs``, output ``probabilities``; the names are in its metadata, ``class_names``, as JSON.
    - ``state_dict``: a dictionary for `torch.load(path, weights_only=True)`: ``weights`` of the network, ``scale``,
      ``mean``, ``std`` (None where inputs go in as they are), ``temperature``, ``class_names``.

    The first dimension of x and of the probabilities may have any size >= 1; the others are those of training.

    Raises:
        InputError: for an unknown format, a missing package, a network that cannot be exported, and one that the file
            does not reproduce: within 1e-5, 1e-2 for a network in half precision.
        RunError: when the file cannot be written.
    """
    require_choice("format", format, FORMATS)
    if format == "onnx":
        require_packages("format onnx", *EXTRAS["export"])
    require(not Path(path).is_dir(), f"path must be a file, got the folder {path}")
    network = Probabilities(copy.deepcopy(net), kind, temperature).cpu().requires_grad_(False)
    with _quiet():
        try:
            content, read_back = FORMATS[format](network, list(class_names))
        except InputError:
            raise
        except Exception as error:  # the exporters raise whatever their stages raise
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError(f"model {type(net).__name__} cannot be exported as {format}: {reason.strip()}") from error
        _compare(network, read_back, format)
    write_atomically(Path(path), lambda file: file.write(content))


Exported = tuple[bytes, Callable[[Tensor], Tensor]]
"""The content of a file, and the function that was read back from it."""


def _torch_export(network: Probabilities, class_names: list[str]) -> Exported:
    program = torch.export.export(network, (_traced(network),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"class_names.json": json.dumps(class_names)})
    file.seek(0)
    return file.getvalue(), torch.export.load(file).module()


def _onnx(network: Probabilities, class_names: list[str]) -> Exported:
    import onnxruntime

    program: Any = torch.onnx.export(
        network,
        (_traced(network),),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["inputs"],
        output_names=["probabilities"],
    )
    program.model.metadata_props["class_names"] = json.dumps(class_names)
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(session.run(["probabilities"], {"inputs": x.numpy()})[0]))

    return content, run


def _state_dict(network: Probabilities, class_names: list[str]) -> Exported:
    t = network.kind.transform
    state = {
        "weights": dict(network.net.state_dict()),
        "scale": None if t is None else t.scale,
        "mean": None if t is None else t.mean.cpu().to(network.dtype),
        "std": None if t is None else t.std.cpu().to(network.dtype),
        "temperature": network.temperature,
        "class_names": class_names,
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    net = copy.deepcopy(network.net)
    for tensor in net.state_dict().values():  # what is compared comes from the file alone
        tensor.zero_()
    net.load_state_dict(read["weights"])

    def run(x: Tensor) -> Tensor:
        if read["mean"] is not None:
            shape = (-1,) + (1,) * (x.ndim - 2)
            mean, std = read["mean"].view(shape), read["std"].view(shape)
            x = (read["scale"] * x.to(mean.dtype) - mean) / std
        z = logits_in(net(x))
        return torch.softmax(z.to(torch.promote_types(z.dtype, torch.float32)) / read["temperature"], dim=1)

    return file.getvalue(), run


FORMATS: dict[str, Callable[[Probabilities, list[str]], Exported]] = {
    "torch-export": _torch_export,
    "onnx": _onnx,
    "state_dict": _state_dict,
}


def _traced(network: Probabilities) -> Tensor:
    """Inputs to trace the network with: two, since one is taken for a dimension of constant size."""
    return network.example(2, torch.Generator().manual_seed(0))


def _compare(network: Probabilities, read_back: Callable[[Tensor], Tensor], format: str) -> None:
    half = network.dtype in (torch.float16, torch.bfloat16)
    limit, generator = (1e-2 if half else 1e-5), torch.Generator().manual_seed(1)
    for n in _BATCHES:
        x = network.example(n, generator)
        with torch.no_grad():
            expected = network(x)
            try:
                given = read_back(x)
            except Exception as error:  # of a runtime
                raise InputError(f"the {format} of the model does not run on a batch of {n}: {error}") from error
        gap = float((given - expected).abs().max()) if given.shape == expected.shape else float("nan")
        require(
            gap <= limit,
            f"the {format} of the model differs from it by {gap:.2g} in probability on a batch of {n}, more than "
            f"{limit:g}: nothing was written",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of their progress."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
            warnings.simplefilter("ignore")
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
    finally:
        logging.disable(level)
