"""How much the prediction changes under a small perturbation of the input that raises the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.errors import require
from metacal.margins import descend_in_ball
from metacal.options import option
from metacal.penalties.evaluate import check_batch, logits_of
from metacal.penalties.part import InputPart
from metacal.pixels import NORMS, OUTSIDE, RADIUS, Pixels, to_inputs

__all__ = ["RobustKL", "perturbed", "robust_kl"]


@dataclass
class RobustKL(InputPart):
    """`robust_kl` as a penalty."""

    eps: float = option(RADIUS, "radius of the attack", low=0)
    alpha: float = option(2 / 255, "length of its steps", above=0)
    steps: int = option(3, "number of its steps", low=1, must="an integer >= 1")
    norm: str = option("linf", "of the perturbation", choices=NORMS)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        return robust_kl(
            model, x, y, self.eps, self.alpha, self.steps, self.norm, self.pixels, logits=logits, units=self.units
        )

    def look(self, x: Tensor) -> None:
        """Raise `InputError` for inputs outside the pixel box."""
        if self.units == "pixels" or self.pixels is not None:
            mean, std = to_inputs(self.pixels, x)
            _require_in_box(x * std + mean, self.pixels)


def robust_kl(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float = RobustKL.eps,
    alpha: float = RobustKL.alpha,
    steps: int = RobustKL.steps,
    norm: str = RobustKL.norm,
    pixels: Pixels | None = None,
    *,
    logits: Tensor | None = None,
    units: str = RobustKL.units,
) -> Tensor:
    """mean_i KL(p(x_i) ‖ p(x_i^adv)) in nats, x^adv = `perturbed(x)`. CalMO (arXiv 2604.20614) weighs it by 0.5.

    No gradient flows through the attack; p(x) and p(x^adv) both carry θ. All forwards run in the model's present
    mode: a network that trains with batch statistics is attacked with those of the perturbed batch, since its
    running statistics lag behind early in training. Parameters' gradients, buffers and modes stay as they are.
    Dropout draws anew in each of the `steps` + 1 forwards, from the stream that training draws from.

    Args:
        x: (N, C, ...) in [0, 1], or normalised as `pixels` says; floating point.
        y: (N,) labels, which the attack moves away from.
        eps, alpha, steps, norm: radius, step length (both in `units`) and number of steps of the attack.
        units: "pixels", or "inputs" for those of x, whose limits are then those of `pixels`, none where it is None.
        logits: of the plain forward of x, with their graph, if there are any: they spare one forward.

    Raises `InputError` for bad arguments and for inputs outside the pixel box, which are looked for on the CPU alone.
    """
    RobustKL(eps, alpha, steps, norm, pixels=pixels, units=units)
    check_batch("robust_kl", model, x, y, inputs=True)
    if logits is None:
        logits = logits_of(model, x)
    adversarial = logits_of(model, perturbed(model, x, y, eps, alpha, steps, norm, pixels, units=units))
    logits = logits.to(adversarial.dtype)
    log_p, log_q = logits.log_softmax(1), adversarial.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def perturbed(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float = RobustKL.eps,
    alpha: float = RobustKL.alpha,
    steps: int = RobustKL.steps,
    norm: str = RobustKL.norm,
    pixels: Pixels | None = None,
    *,
    units: str = RobustKL.units,
) -> Tensor:
    """x^adv, like x and without graph: `steps` steps of projected gradient ascent on cross-entropy, from x.

    With δ the perturbation in `units`, one step is δ ← δ + α·sign(g) ("linf") or δ + α·g/‖g‖₂ ("l2"), with
    g the gradient of sample i's cross-entropy, then the projection on ‖δ‖ <= ε, then on pixels within
    [0, 1], where these are known.
    """
    RobustKL(eps, alpha, steps, norm, pixels=pixels, units=units)
    check_batch("the attack", model, x, y, inputs=True)
    start = x.detach()
    _, scale = to_inputs(pixels if units == "pixels" else None, start)  # units of δ in one of the inputs
    lowest, highest = _room(pixels, units, start)
    centre = torch.zeros_like(start)
    delta = centre
    for _ in range(steps):
        with torch.enable_grad():
            at = delta.detach().requires_grad_()
            loss = F.cross_entropy(logits_of(model, start + at / scale), y, reduction="sum")
            (slope,) = torch.autograd.grad(loss, at)
        delta = descend_in_ball(delta.detach(), -slope, centre, eps, alpha, norm)
        if lowest is not None and highest is not None:
            delta = torch.minimum(torch.maximum(delta, lowest), highest)
    return start + delta / scale


def _room(pixels: Pixels | None, units: str, start: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The least and the largest perturbation, in `units`, with which pixels stay in [0, 1]; None for no limits.

    Raises `InputError` for pixels that are outside already, on the CPU.
    """
    if units == "inputs" and pixels is None:
        return None, None
    mean, std = to_inputs(pixels, start)
    pixel = start * std + mean
    if pixel.device.type == "cpu":  # a look at the values would make a GPU wait
        _require_in_box(pixel, pixels)
    # where rounding left a pixel just outside, the perturbation does not take it further
    lowest, highest = (-pixel).clamp(max=0), (1 - pixel).clamp(min=0)
    return (lowest, highest) if units == "pixels" else (lowest / std, highest / std)


def _require_in_box(pixel: Tensor, pixels: Pixels | None) -> None:
    low, high = torch.stack([pixel.min(), pixel.max()]).tolist()
    require(
        low >= -OUTSIDE and high <= 1 + OUTSIDE,
        f"x must have pixels in [0, 1], they reach from {low:.4g} to {high:.4g}: "
        + ("set pixels=Pixels(mean, std) as the inputs were normalised" if pixels is None else "check pixels"),
    )
