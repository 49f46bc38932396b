"""What every curvature measure starts from: checked inputs, and one guarded way to evaluate the network.

`Problem` holds a network, a batch and a loss after all checks; `Problem.logits` is the only place of the folder
that calls the network. Each evaluation leaves the network and the random streams as it found them
(`metacal.network`), writes no `.grad`, and has autocast off and float32 products in full; attention runs as plain
matrix products (the fused kernels have no double backward). Logits of the same examples are compared from evaluation to
evaluation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from metacal import ranks
from metacal.autodiff.derivatives import naming_reentrant_checkpoints
from metacal.curvature.loss import LogitLoss, check_loss, loss_of_rows
from metacal.devices import full_float32
from metacal.errors import InputError, require
from metacal.network import Network, Streams, check_repeated, coupling_layer

__all__ = ["OtherWay", "Problem", "check_vector"]


def _is_backbone(model: nn.Module) -> bool:
    # by name, since the ground floor imports nothing from the floors above
    return any(c.__name__ == "Backbone" and c.__module__.startswith("metacal.models") for c in type(model).__mro__)


@contextlib.contextmanager
def _exact_math(device: torch.device) -> Iterator[None]:
    plain = torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False)
    with plain[0], plain[1], plain[2], full_float32(), naming_reentrant_checkpoints():
        yield


class OtherWay(InputError):
    """An example takes another way through the network alone than with the other examples of its batch."""

    def __init__(self) -> None:
        super().__init__("an example's logits change with the other examples of its batch")


def tolerance_of(z: Tensor) -> float:
    """Relative rounding error that logits of two evaluations may differ by."""
    return 1e-9 if z.dtype == torch.float64 else 1e-3


@dataclass
class Problem:
    """A network, a batch and a loss, checked. Make it with `Problem.of`."""

    network: Network
    x: Tensor
    y: Tensor
    loss: LogitLoss
    randomness: str = "refuse"
    seed: int = 0
    pairs: bool = False  # whether the model may return (logits, features)
    total: int = 0  # examples that the mean loss is over: these, or those of all ranks
    across: bool = False  # of all ranks
    random: bool = False  # whether the last evaluation drew random numbers
    compares: bool = True  # whether evaluations are compared, for which a GPU is waited
    row_modules: set[nn.Module] | None = None  # see `layers.examples_depend`
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # places of the examples in the batch
    noted: dict[bytes, tuple[np.ndarray, Tensor]] = field(default_factory=dict)  # rows and logits, see `note`

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: LogitLoss = "cross_entropy",
        randomness: str = "refuse",
        seed: int = 0,
        pairs: bool = False,
        across: bool = False,
    ) -> Problem:
        """Check the arguments.

        `loss` is one of `metacal.curvature.loss`; `randomness` says what happens if the network draws random numbers
        (dropout in training mode): "refuse" raises, "freeze" evaluates with one mask, drawn from `seed`. `pairs`: the
        model may return (logits, features), as a Backbone does anyway. `across`: x and y are this rank's share of the
        examples, maybe none (`metacal.ranks`).

        Raises `InputError` for a model that is no module or has no trainable parameter, empty or mismatched x
        and y, labels that are no integers, parameters in half precision or complex, and unknown names.
        """
        require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}")
        network = Network(model)
        require(randomness in ("refuse", "freeze"), f"randomness must be refuse or freeze, got {randomness!r}")
        require(isinstance(x, Tensor) and isinstance(y, Tensor), "x and y must be tensors")
        total = ranks.rows(len(x)).total if across else len(x)
        require(x.ndim >= 1 and total > 0, f"x must hold at least one example, got shape {tuple(x.shape)}")
        require(
            y.ndim == 1 and len(y) == len(x),
            f"y must have shape ({len(x)},) like x's first dimension, got {tuple(y.shape)}",
        )
        require(
            not (y.is_floating_point() or y.is_complex() or y.dtype is torch.bool),
            f"y must hold integer labels, got {y.dtype}",
        )
        require(bool(network.params), "model has no trainable parameter (none with requires_grad)")
        dtypes = {p.dtype for p in network.params}
        require(
            len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64},
            f"trainable parameters must all be float32 or all float64, got {sorted(map(str, dtypes))}",
        )
        with torch.inference_mode(False):  # tensors made in inference mode cannot be saved for a reverse pass
            x, y = (t.clone() if t.is_inference() else t.detach() for t in (x, y))
            y = y.to(device=x.device, dtype=torch.long)
            loss = check_loss(loss, x)
        pairs = pairs or _is_backbone(network.model)
        return cls(network, x, y, loss, randomness, seed, pairs, total, across, rows=np.arange(len(x)))

    @property
    def model(self) -> nn.Module:
        return self.network.model

    @property
    def names(self) -> list[str]:
        return self.network.names

    @property
    def params(self) -> list[Tensor]:
        return self.network.params

    def __len__(self) -> int:
        return len(self.x)

    @property
    def coupled(self) -> str | None:
        """Why the examples of this batch depend on each other, or None."""
        coupling = coupling_layer(self.model)
        if coupling is None:
            return None
        name, layer = coupling
        return f"{name} ({type(layer).__name__}) normalises by the statistics of the batch"

    def summed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sums over the examples, completed by those of the other ranks, in place."""
        if self.across:
            ranks.sum_(tensors)
        return tensors

    def total_of(self, *values: float) -> list[float]:
        """The same of numbers."""
        return self.summed([torch.tensor(values, dtype=torch.float64, device=self.x.device)])[0].tolist()

    def part(self, rows: slice | Tensor) -> Problem:
        """The same problem on some of the examples."""
        places = self.rows[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
        return replace(self, x=self.x[rows], y=self.y[rows], loss=loss_of_rows(self.loss, rows), rows=places)

    def parts(self, chunk_size: int | None) -> list[Problem]:
        """The examples in order, at most `chunk_size` at a time.

        Raises `InputError` where splitting would change the result: BatchNorm in training mode, frozen masks.
        """
        n = len(self)
        if chunk_size is None or chunk_size >= n:
            return [self]
        require(chunk_size >= 1, f"chunk_size must be at least 1, got {chunk_size}")
        why = self.coupled
        require(
            why is None,
            f"chunk_size={chunk_size} < {n} examples changes the result, since {why}: "
            "leave chunk_size out, or measure in evaluation mode",
        )
        require(
            self.randomness == "refuse",
            f"chunk_size={chunk_size} < {n} examples would draw one mask a chunk: "
            "leave chunk_size out, or use randomness='refuse'",
        )
        return [self.part(slice(i, i + chunk_size)) for i in range(0, n, chunk_size)]

    def math(self) -> contextlib.AbstractContextManager[None]:
        """The context in which everything about this problem is evaluated."""
        return _exact_math(self.x.device)

    def logits(self, values: Mapping[str, Tensor] | None = None, x: Tensor | None = None) -> Tensor:
        """The network's logits (n, K), checked; call it inside `math()`.

        `values` gives other values to some parameters by name; x other inputs. Buffers and random streams do not move.
        Raises `InputError` for outputs that are no logits, for random numbers drawn under randomness="refuse", and for
        logits that are not those of an earlier evaluation of the same examples.
        """
        repeatable = x is None and values is None
        x = self.x if x is None else x
        frozen = self.randomness == "freeze"
        params = [(values or {}).get(name, p) for name, p in zip(self.names, self.params)]
        with Streams.aside(self.x.device, seed=self.seed, seeded=frozen):
            before = Streams(self.x.device)
            with self.network.holding(params) if values else contextlib.nullcontext():
                out, features = self.network.aside(x)
            self.random = before.moved()
        require(
            not self.random or frozen,
            "model draws random numbers (dropout in training mode?), so two evaluations differ: call "
            "model.eval(), or pass randomness='freeze' to hold one mask",
        )
        require(
            features is None or self.pairs,
            "model must map x to logits (N, K), it returned a tuple of 2: return the logits alone, or wrap the network "
            "in metacal.Backbone",
        )
        require(
            out.ndim == 2 and len(out) == len(x) and out.shape[1] >= 2,
            f"model must map x to logits (N, K) with N = {len(x)}, K >= 2; it returned shape {tuple(out.shape)}",
        )
        if repeatable:
            self.note(out)
        return out

    def note(self, z: Tensor, alone: bool = False) -> None:
        """Keep logits of these examples, `alone` if each was evaluated by itself.

        Raises `InputError` unless they are, up to rounding, those of the same evaluation before.
        """
        key = self.rows.tobytes() + b"alone" * (alone and len(self) > 1)
        if key not in self.noted:
            self.noted[key] = self.rows, z.detach()
            return
        _, known = self.noted[key]
        if self.compares and bool(torch.isfinite(known).all()):  # other checks say where they are not
            check_repeated(z, known, tolerance_of(z), "its curvature is not defined unless that is held fixed")

    def check_ways(self) -> None:
        """Raise `OtherWay` unless each example had the same logits in all evaluations, whatever came with it."""
        evaluations = [] if self.random else list(self.noted.values())  # masks depend on the number of examples
        known: Tensor | None = None
        for rows, z in evaluations:
            places = torch.from_numpy(rows).to(z.device)
            if known is None:
                known = z.new_full((int(max(r.max() for r, _ in evaluations)) + 1, z.shape[1]), math.nan)
            gap = (z - known[places]).abs().amax(1)
            if bool((gap > tolerance_of(z) * z.abs().amax()).any()):
                raise OtherWay
            known[places] = z

    def check_logits(self, z: Tensor) -> None:
        """Raise `InputError` unless the logits are finite and the labels lie in 0..K-1."""
        z = z.detach()
        k = z.shape[1]
        bad = ~torch.isfinite(z).all(1)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise InputError(f"logits must be finite, row {row} holds {z[row].tolist()[:8]}")
        wrong = (self.y < 0) | (self.y >= k)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise InputError(f"labels must lie in 0..{k - 1}, y[{row}] is {int(self.y[row])}")


def check_vector(v: Sequence[Tensor], params: Sequence[Tensor], name: str = "v") -> list[Tensor]:
    """`v` as a list of tensors with the shapes, type and device of `params`; `InputError` otherwise."""
    require(
        isinstance(v, Sequence) and not isinstance(v, Tensor),
        f"{name} must be a list of tensors like the trainable parameters, got {type(v).__name__}",
    )
    require(
        len(v) == len(params),
        f"{name} must hold {len(params)} tensors, one for each trainable parameter, got {len(v)}",
    )
    for i, (a, p) in enumerate(zip(v, params)):
        require(
            isinstance(a, Tensor) and a.shape == p.shape,
            f"{name}[{i}] must have the parameter's shape {tuple(p.shape)}, "
            f"got {tuple(a.shape) if isinstance(a, Tensor) else type(a).__name__}",
        )
    with torch.inference_mode(False):
        plain = [a.clone() if a.is_inference() else a.detach() for a in v]
        return [a.to(dtype=p.dtype, device=p.device) for a, p in zip(plain, params)]
