"""Curvature of the loss: products, sharpness, traces, for any classifier and without the matrices.

Loss for curvature: the mean cross-entropy of the given batch, whatever loss trains the network; or `loss="mse"`,
`Focal(gamma)` or `LabelSmoothing(alpha)`, each with its own Hessian S in the logits (`metacal.curvature.loss`).
G = 1/N Σ J_nᵀ S_n J_n is the Gauss-Newton matrix, H the Hessian. Everything is measured in the network's present mode
and leaves the network as it was.
"""

from __future__ import annotations

from metacal.curvature.loss import Focal, LabelSmoothing
from metacal.curvature.products import Curvature, ggn_product, hessian_product
from metacal.curvature.sampling import Estimate
from metacal.curvature.sharpness import (
    NormCertificate,
    batch_sharpness,
    gn_norm_certificate,
    preconditioned_sharpness,
    preconditioner_of,
)
from metacal.curvature.spectrum import Eigen, extreme_eigenpairs, gn_sharpness, hessian_sharpness, top_eigenpairs
from metacal.curvature.traces import gn_trace, hessian_trace

__all__ = [
    "Curvature",
    "Eigen",
    "Estimate",
    "Focal",
    "LabelSmoothing",
    "NormCertificate",
    "batch_sharpness",
    "extreme_eigenpairs",
    "ggn_product",
    "gn_norm_certificate",
    "gn_sharpness",
    "gn_trace",
    "hessian_product",
    "hessian_sharpness",
    "hessian_trace",
    "preconditioned_sharpness",
    "preconditioner_of",
    "top_eigenpairs",
]
