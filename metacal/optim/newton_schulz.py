"""Newton–Schulz iterations towards an orthogonal matrix, and the transpose of their derivative."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "newton_schulz", "newton_schulz_vjp"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    matrix: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """The nearest orthogonal matrix, roughly: singular values of `matrix` `(A, B)` are moved to about 0.7 to 1.2.

        X_0 = G / max(‖G‖_F, eps),   X_{k+1} = a X_k + (b S + c S²) X_k,   S = X_k X_kᵀ

    on the side of the smaller dimension. Differentiable, in the dtype of `matrix`.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".

    >>> x = newton_schulz(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64), (1.5, -0.5, 0.0), 25)
    >>> torch.allclose(x, torch.eye(2, 3, dtype=torch.float64))
    True
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def newton_schulz_vjp(
    matrix: Tensor,
    cotangent: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """(∂ newton_schulz / ∂ matrix)ᵀ cotangent, both `(A, B)`: what autograd gives, in fewer products.

    S and P = b S + c S² are symmetric. So with Y the cotangent of X_{k+1} = (a + P) X, X = X_k, that of X_k is

        a Y + P Y + (b W + c (W S + S W)) X,    W = Y Xᵀ + X Yᵀ

    and that of G is (Y − ⟨X_0, Y⟩ X_0) / ‖G‖ by the normalisation.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x, y = (matrix.T, cotangent.T) if tall else (matrix, cotangent)
    norm = x.norm()
    x = first = x / norm.clamp(min=eps)
    kept = []
    for k in range(steps):
        s = x @ x.T
        p = torch.addmm(s, s, s, beta=b, alpha=c)
        kept.append((x, s, p))
        if k + 1 < steps:
            x = torch.addmm(x, p, x, beta=a)
    while kept:
        x, s, p = kept.pop()
        w = y @ x.T
        w = w + w.T
        ws = w @ s
        y = torch.addmm(y, p, y, beta=a).addmm_(torch.add(ws, ws.T).mul_(c).add_(w, alpha=b), x)
    # max(‖G‖, eps) is a constant below eps
    y = torch.where(norm < eps, y, y - first * (first * y).sum()) / norm.clamp(min=eps)
    return y.T if tall else y
