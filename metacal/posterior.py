"""Predictions averaged over a posterior of the weights: last-layer Laplace, and Monte-Carlo dropout.

laplace = LastLayerLaplace().fit(train_features, train_logits).choose(val_features, val_logits, val_labels)
laplace.probabilities(features, logits)             # (N, K)
dropout_predictions(model, batches, samples=30)     # Predictions
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metacal.errors import require
from metacal.modes import evaluation_mode
from metacal.predictions import Predictions

__all__ = ["LARGEST", "LastLayerLaplace", "Outputs", "dropout_predictions", "outputs_of"]

LARGEST = 4096
"""Weights of a last layer whose whole curvature is decomposed, K (D + 1)."""

_ENTRIES = 1 << 24  # of an intermediate tensor
_PRECISIONS = 10.0 ** torch.arange(-3, 5.01, 0.5, dtype=torch.float64)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Outputs(NamedTuple):
    """Logits (N, K), features (N, D) and labels (N,) of a data set."""

    logits: Tensor
    features: Tensor
    labels: Tensor


def outputs_of(backbone: Callable[[Tensor], tuple[Tensor, Tensor]], batches: Iterable[tuple[Tensor, ...]]) -> Outputs:
    """All that a backbone, x -> (logits, features), makes of batches (x, y), in evaluation mode, float64 on the CPU."""
    parts = []
    with torch.no_grad(), evaluation_mode(backbone):
        for x, y in batches:
            logits, features = backbone(x)
            parts.append((logits.double().cpu(), features.double().cpu(), y.cpu()))
    require(len(parts) > 0, "batches must hold at least one batch (x, y), got none")
    return Outputs(*map(torch.cat, zip(*parts)))


class LastLayerLaplace:
    """The Laplace approximation of a trained network's last layer, logits W φ with φ = (features, 1).

    W (K, D + 1) has a normal posterior around its trained value, with the inverse of the Gauss-Newton matrix

        G + τ I,  G = Σ_i (diag(p_i) − p_i p_iᵀ) ⊗ φ_i φ_iᵀ

    over the training samples (the Hessian of their total NLL, since the layer is linear) as covariance, τ the precision
    of a normal prior. Logits are then normal: f = z + N(0, S), S_kl = φᵀ Σ_kl φ. Daxberger et al. 2021 (arXiv
    2106.14806).

    This is the `full` structure of laplace-torch, and the only one here: its `kron` and `diag` approximate the same G
    where the whole of it is too large, and a last layer of a few thousand weights needs no approximation.

    Attributes:
        precision: τ; 1 until `choose`.
        eigenvalues, eigenvectors: of G, (M,) and (K, D + 1, M), M = K (D + 1).
    """

    def __init__(self, precision: float = 1.0) -> None:
        require(0 < precision < math.inf, f"precision must be > 0, got {precision}")
        self.precision = precision
        self.eigenvalues: Tensor | None = None
        self.eigenvectors: Tensor | None = None

    def fit(self, features: Tensor, logits: Tensor) -> LastLayerLaplace:
        """Take G from the training samples' features (N, D) and logits (N, K); returns self.

        Raises:
            InputError: for a layer of more than 4,096 weights.
        """
        phi, p = _with_one(features), torch.softmax(logits.double(), 1)
        k, d = p.shape[1], phi.shape[1]
        require(k * d <= LARGEST, f"the last layer must have at most {LARGEST:,} weights, K (D + 1), got {k} · {d}")
        curvature = phi.new_zeros(k * d, k * d)
        for rows in torch.arange(len(p)).split(max(1, _ENTRIES // (k * d))):
            outer = (p[rows, :, None] * phi[rows, None, :]).flatten(1)
            curvature -= outer.t() @ outer
            for c in range(k):
                block = slice(c * d, (c + 1) * d)
                curvature[block, block] += (phi[rows] * p[rows, c, None]).t() @ phi[rows]
        values, vectors = torch.linalg.eigh(curvature)
        self.eigenvalues, self.eigenvectors = values.clamp(min=0), vectors.view(k, d, k * d)
        return self

    def choose(self, features: Tensor, logits: Tensor, labels: Tensor) -> LastLayerLaplace:
        """Take the τ of 10^-3, 10^-2.5, … 10^5 with the least NLL of held-out predictions; returns self."""
        best = math.inf
        for precision in _PRECISIONS.tolist():
            p = self.probabilities(features, logits, precision=precision)
            nll = -float(p.gather(1, labels[:, None]).log().mean())
            if nll < best:
                best, self.precision = nll, precision
        return self

    def probabilities(
        self,
        features: Tensor,
        logits: Tensor,
        *,
        samples: int | None = None,
        seed: int = 0,
        precision: float | None = None,
    ) -> Tensor:
        """Predictive probabilities (N, K): the probit approximation softmax(z_k / √(1 + π S_kk / 8)) of MacKay 1992, or
        with `samples` the mean of softmax over that many draws of the weights.
        """
        require(samples is None or samples >= 1, f"samples must be >= 1, got {samples}")
        scale = self._scales(self.precision if precision is None else precision)
        z, out = logits.double(), []
        generator = torch.Generator().manual_seed(seed)
        noise = None if samples is None else torch.randn(len(scale), samples, generator=generator, dtype=scale.dtype)
        noise = None if noise is None else noise.to(scale.device)
        for rows, along in self._along(features):
            if noise is None:
                variance = along.square() @ scale.square()
                out.append(torch.softmax(z[rows] / (1 + math.pi / 8 * variance).sqrt(), 1))
            else:
                out.append(torch.softmax(z[rows, :, None] + along @ (scale[:, None] * noise), 1).mean(2))
        return torch.cat(out)

    def covariance(self, features: Tensor) -> Tensor:
        """S of each sample's logits, (N, K, K)."""
        scale = self._scales(self.precision)
        return torch.cat([(along * scale) @ (along * scale).transpose(1, 2) for _, along in self._along(features)])

    def _scales(self, precision: float) -> Tensor:
        """Standard deviations along the eigenvectors."""
        require(self.eigenvalues is not None, "the posterior must be fitted first")
        assert self.eigenvalues is not None
        return (self.eigenvalues + precision).rsqrt()

    def _along(self, features: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """(rows, what a unit along each eigenvector does to their logits (n, K, M)), a few rows at a time."""
        assert self.eigenvectors is not None
        k, d, m = self.eigenvectors.shape
        phi = _with_one(features)
        require(phi.shape[1] == d, f"features must have {d - 1} columns, got {phi.shape[1] - 1}")
        for rows in torch.arange(len(phi)).split(max(1, _ENTRIES // (k * m))):
            yield rows, torch.einsum("nd,kdm->nkm", phi[rows], self.eigenvectors)


def dropout_predictions(
    model: nn.Module, batches: Iterable[tuple[Tensor, ...]], samples: int = 30, seed: int = 0
) -> Predictions:
    """The mean of softmax over `samples` passes with Dropout active and all else in evaluation mode (Gal & Ghahramani
    2016). The model's modes and the global random streams are left as they were.

    Raises:
        InputError: for a model without Dropout, or whose Dropout has p = 0.
    """
    require(samples >= 1, f"samples must be >= 1, got {samples}")
    dropouts = [module for module in model.modules() if isinstance(module, _DROPOUT) and module.p > 0]
    require(
        len(dropouts) > 0, f"model {type(model).__name__} has no Dropout with p > 0, so there is nothing to average"
    )
    probs, labels = [], []
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    with torch.no_grad(), evaluation_mode(model), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for module in dropouts:
            module.train()
        for x, y in batches:
            drawn = (_softmax(model(x)) for _ in range(samples))
            probs.append(sum(drawn, torch.zeros((), dtype=torch.float64)) / samples)
            labels.append(y.cpu())
    require(len(probs) > 0, "batches must hold at least one batch (x, y), got none")
    return Predictions.from_probabilities(torch.cat(probs), torch.cat(labels))


def _softmax(out: Any) -> Tensor:
    logits = out[0] if isinstance(out, tuple) else out
    return torch.softmax(logits.double().cpu(), 1)


def _with_one(features: Tensor) -> Tensor:
    features = features.double()
    return torch.cat([features, features.new_ones(len(features), 1)], 1)
