"""A trained network as a file for other programs: torch.export, ONNX, or weights, from raw inputs to probabilities.

    p = softmax(net((scale · x - mean) / std) / T),  or another fitted map of the logits

x are inputs as they come, such as uint8 images; normalisation and calibration are part of what is written. A file is
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

from metacal.calibration.choice import as_tensors, restored
from metacal.calibration.fitted import Scaling
from metacal.data import InputKind
from metacal.data.kind import AnyKind, InputKinds
from metacal.errors import EXTRAS, InputError, require, require_choice, require_packages
from metacal.files import write_atomically
from metacal.inputs import logits_in

__all__ = ["FORMATS", "Probabilities", "export"]

_BATCHES = (3, 1, 8)  # sizes at which a file is compared with the network; it was traced with another one, 2


class Probabilities(nn.Module):
    """The calibrated network as one module: `forward(x)` gives probabilities (N, K), float32 at least, of raw inputs.

    Of inputs that are several tensors, `forward` takes each, in the order of `kind`.

    Args:
        net: from inputs as it was trained on to logits (N, K), or an object that holds these as `logits`.
        kind: of the inputs, with the transform that they go through.
        temperature: T.
        scaling: a fitted map of z / T; None: none.
    """

    def __init__(self, net: nn.Module, kind: AnyKind, temperature: float, scaling: Scaling | None = None) -> None:
        super().__init__()
        self.net = net
        self.dtype = next(p.dtype for p in net.parameters() if p.is_floating_point())
        self.temperature = temperature
        self.scaling = scaling
        self.kinds: dict[Any, InputKind] = dict(kind.kinds) if isinstance(kind, InputKinds) else {"inputs": kind}
        self.several = isinstance(kind, InputKinds)
        self.transform = t = kind.transform
        self.gain: Tensor | None
        self.shift: Tensor | None
        shape = (-1,) + (1,) * (0 if isinstance(kind, InputKinds) else len(kind.shape) - 1)
        self.register_buffer("gain", None if t is None else (t.scale / t.std).to(self.dtype).view(shape))
        self.register_buffer("shift", None if t is None else (t.mean / t.std).to(self.dtype).view(shape))
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        x = inputs[0]
        if self.gain is not None and self.shift is not None:
            inputs = (x.to(self.dtype) * self.gain - self.shift,)
        named = {key: x for key, x in zip(self.kinds, inputs) if self.several and isinstance(key, str)}
        logits = logits_in(self.net(**named) if named else self.net(*inputs))
        return self.calibrated(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    def calibrated(self, logits: Tensor) -> Tensor:
        z = logits / self.temperature
        return torch.softmax(z, dim=1) if self.scaling is None else self.scaling.calibrated(z).to(z.dtype)

    def example(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """`n` random inputs of the type, shape and range of those in training."""
        return tuple(self._example(kind, (n, *kind.shape), generator) for kind in self.kinds.values())

    def _example(self, kind: InputKind, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if kind.dtype == torch.uint8:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if kind.dtype in (torch.int64, torch.bool):
            return torch.randint(int(kind.low), int(kind.high) + 1, shape, generator=generator).to(kind.dtype)
        x = torch.rand(shape, generator=generator, dtype=torch.float64) * (kind.high - kind.low) + kind.low
        return x.to(self.dtype)


def export(
    net: nn.Module,
    kind: AnyKind,
    temperature: float,
    class_names: Sequence[str],
    path: str | Path,
    format: str,
    scaling: Scaling | None = None,
) -> None:
    """Write the calibrated network to `path`, after the file was compared with it on random inputs, on the CPU.

    - ``torch-export``: `torch.export.load(path).module()(x)`; the names are in its extra file ``class_names.json``.
    - ``onnx``: input ``inputs``, output ``probabilities``; the names are in its metadata, ``class_names``, as JSON.
    - ``state_dict``: a dictionary for `torch.load(path, weights_only=True)`: ``weights`` of the network, ``scale``,
      ``mean``, ``std`` (None where inputs go in as they are), ``temperature``, ``class_names``; ``scaling``, of another
      map its name in `metacal.calibration.SCALINGS` and its arrays, of which `metacal.calibration.choice.restored`
      makes it again.

    A network of several tensors takes them in their order in training; in ONNX by the names of its arguments.

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
    network = Probabilities(copy.deepcopy(net), kind, temperature, scaling).cpu().requires_grad_(False)
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


Exported = tuple[bytes, Callable[..., Tensor]]
"""The content of a file, and the function that was read back from it."""


def _torch_export(network: Probabilities, class_names: list[str]) -> Exported:
    program = torch.export.export(network, _traced(network), dynamic_shapes=_any_batch(network))
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"class_names.json": json.dumps(class_names)})
    file.seek(0)
    return file.getvalue(), torch.export.load(file).module()


def _onnx(network: Probabilities, class_names: list[str]) -> Exported:
    import onnxruntime

    names = [str(key) if isinstance(key, str) else f"input_{key}" for key in network.kinds]
    program: Any = torch.onnx.export(
        network,
        _traced(network),
        dynamo=True,
        dynamic_shapes=_any_batch(network),
        input_names=list(names),
        output_names=["probabilities"],
    )
    program.model.metadata_props["class_names"] = json.dumps(class_names)
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        given = {name: x.numpy() for name, x in zip(names, inputs)}
        return torch.from_numpy(np.asarray(session.run(["probabilities"], given)[0]))

    return content, run


def _state_dict(network: Probabilities, class_names: list[str]) -> Exported:
    t, scaling = network.transform, network.scaling
    state = {
        "weights": dict(network.net.state_dict()),
        "scale": None if t is None else t.scale,
        "mean": None if t is None else t.mean.cpu().to(network.dtype),
        "std": None if t is None else t.std.cpu().to(network.dtype),
        "temperature": network.temperature,
        "scaling": None if scaling is None else as_tensors(scaling),
        "class_names": class_names,
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    bare = copy.deepcopy(network)
    for tensor in bare.state_dict().values():  # what is compared comes from the file alone
        tensor.zero_()
    bare.net.load_state_dict(read["weights"])
    bare.gain = bare.shift = None
    bare.temperature = read["temperature"]
    bare.scaling = None if read["scaling"] is None else restored(read["scaling"])

    def run(*inputs: Tensor) -> Tensor:
        if read["mean"] is not None:
            (x,) = inputs
            shape = (-1,) + (1,) * (x.ndim - 2)
            mean, std = read["mean"].view(shape), read["std"].view(shape)
            inputs = ((read["scale"] * x.to(mean.dtype) - mean) / std,)
        return bare(*inputs)

    return file.getvalue(), run


FORMATS: dict[str, Callable[[Probabilities, list[str]], Exported]] = {
    "torch-export": _torch_export,
    "onnx": _onnx,
    "state_dict": _state_dict,
}


def _traced(network: Probabilities) -> tuple[Tensor, ...]:
    """Inputs to trace the network with: two, since one is taken for a dimension of constant size."""
    return network.example(2, torch.Generator().manual_seed(0))


def _any_batch(network: Probabilities) -> Any:
    """The first dimension of all inputs is one and may have any size."""
    batch = torch.export.Dim("batch")
    return (tuple({0: batch} for _ in network.kinds),)


def _compare(network: Probabilities, read_back: Callable[..., Tensor], format: str) -> None:
    half = network.dtype in (torch.float16, torch.bfloat16)
    limit, generator = (1e-2 if half else 1e-5), torch.Generator().manual_seed(1)
    for n in _BATCHES:
        x = network.example(n, generator)
        with torch.no_grad():
            expected = network(*x)
            try:
                given = read_back(*x)
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
