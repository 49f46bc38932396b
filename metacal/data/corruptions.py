"""Common corruptions of images in five severities, with the constants of CIFAR-10-C (Hendrycks & Dietterich 2019).

    corrupt(images, "gaussian_noise", severity=3)              # uint8 (N, C, H, W) -> uint8 (N, C, H, W)
    corrupt(images, "shot_noise", 5, index=positions, seed=1)  # sample i is corrupted the same in any batch

A corruption is a function of the image, the severity and, where it is random, of (seed, name, position of the sample):
not of the batch that it is in, nor of any global generator. Draws are shared by the severities, so that of one sample
the noise grows and the direction of motion stays. Arithmetic runs over the whole batch, on the images' device.

Lengths in pixels (radii, standard deviations of blurs) are those of 32x32 images, and are multiplied by min(H, W)/32
on larger ones; on smaller ones they stay, since less than a pixel of blur would change nothing. All other constants
have no length in them and hold for any size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from metacal.data.batches import derived_seed
from metacal.errors import require, require_choice

__all__ = ["CONSTANTS", "CORRUPTIONS", "SEVERITIES", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)

CONSTANTS: dict[str, tuple[float, ...] | tuple[tuple[float, float], ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": (500, 250, 100, 75, 50),  # photons of a white pixel
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share of values that become 0 or 1
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation in pixels
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # disk's radius, its smoothing; pixels
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, standard deviation; pixels
    "zoom_blur": (1.06, 1.11, 1.15, 1.20, 1.25),  # largest zoom; the others are 1, 1.01, ... up to it
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # added to the value max(R, G, B)
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor on the distance from the mean
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # side of the small image, as a share
    "jpeg_compression": (80, 65, 58, 50, 40),  # quality
}
"""The constant of each corruption at severities 1 to 5, in units of pixel values in [0, 1]."""

CORRUPTIONS: tuple[str, ...] = tuple(CONSTANTS)


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0, index: Tensor | None = None) -> Tensor:
    """Images `(N, C, H, W)` uint8 under the corruption `name`; uint8 of the same shape and device.

    Values are rounded to the nearest of the 256 levels and clipped to 0..255.

    Args:
        severity: 1 to 5, or 0: the images themselves.
        seed: of the random corruptions (noises and motion blur).
        index: (N,) integers that identify the samples, such as positions in the test set; None: 0..N-1.

    Raises:
        InputError: for an unknown name, another severity, images of another kind, or an index of another length.

    Source:
        Hendrycks & Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
        arXiv 1903.12261.
    """
    require_choice("corruption", name, CORRUPTIONS)
    require(
        isinstance(severity, int) and not isinstance(severity, bool) and 0 <= severity <= 5,
        f"severity must be an integer from 0 (the image itself) to 5, got {severity!r}",
    )
    kind = f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
    require(
        isinstance(images, Tensor) and images.dtype == torch.uint8 and images.ndim == 4 and images.numel() > 0,
        f"images must be a non-empty uint8 tensor (N, C, H, W), got {kind}",
    )
    if name == "jpeg_compression":
        require(images.shape[1] in (1, 3), f"jpeg_compression needs images of 1 or 3 channels, got {images.shape[1]}")
    require(
        index is None or tuple(index.shape) == (len(images),),
        f"index must have shape ({len(images)},), got {None if index is None else tuple(index.shape)}",
    )
    if severity == 0:
        return images.clone()
    positions = range(len(images)) if index is None else index.tolist()
    seeds = [derived_seed(seed, name, i) for i in positions] if name in _RANDOM else []
    with torch.no_grad():
        x = _FUNCTIONS[name](images.float(), CONSTANTS[name][severity - 1], seeds)
        return x.add_(0.5).floor_().clamp_(0, 255).to(torch.uint8)


# Each takes pixels x (N, C, H, W), float32 in 0..255 and free to be written into, the constant, and a seed per sample
# for those in _RANDOM. Pixels stay on the scale of 0..255, where the sums behind a mean are exact in float32.


def _gaussian_noise(x: Tensor, deviation: float, seeds: Sequence[int]) -> Tensor:
    return x.add_(_drawn(torch.randn, x, seeds), alpha=255 * deviation)


def _shot_noise(x: Tensor, photons: float, seeds: Sequence[int]) -> Tensor:
    """Poisson(x · photons) / photons, for x in [0, 1]."""
    rates = x.mul_(photons / 255)
    on_host = rates.cpu()
    generator = torch.Generator()
    counts = torch.stack([torch.poisson(r, generator.manual_seed(s)) for r, s in zip(on_host, seeds, strict=True)])
    return counts.mul_(255 / photons).to(x.device)


def _impulse_noise(x: Tensor, share: float, seeds: Sequence[int]) -> Tensor:
    """Each value becomes black or white with probability share / 2 each: the ends of one uniform draw, so that the
    values hit at one severity are hit at the next.
    """
    u = _drawn(torch.rand, x, seeds)
    return x.masked_fill_(u < share / 2, 0).masked_fill_(u >= 1 - share / 2, 255)


def _gaussian_blur(x: Tensor, deviation: float, seeds: Sequence[int]) -> Tensor:
    from torchvision.transforms.v2.functional import gaussian_blur

    deviation *= _scale(x)
    # Four deviations hold all but 6e-5 of the mass; a reflected border cannot be wider than the image.
    sizes = [2 * min(int(4 * deviation + 0.5), side - 1) + 1 for side in (x.shape[3], x.shape[2])]
    return gaussian_blur(x, sizes, [deviation, deviation])


def _defocus_blur(x: Tensor, constants: tuple[float, float], seeds: Sequence[int]) -> Tensor:
    """Convolution with a disk, itself smoothed over 3x3 pixels (5x5 for a radius above 8); borders reflected."""
    radius, smoothing = (c * _scale(x) for c in constants)
    around = 1 if radius <= 8 else 2
    reach = int(radius) + around
    near = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (near[:, None].square() + near.square() <= radius**2).double()
    bell = torch.exp(-torch.arange(-around, around + 1, dtype=torch.float64).square() / (2 * smoothing**2))
    bell = torch.outer(bell, bell)
    kernel = functional.conv2d((disk / disk.sum())[None, None], (bell / bell.sum())[None, None], padding=around)
    return _convolved(x, kernel[0, 0])


def _motion_blur(x: Tensor, constants: tuple[float, float], seeds: Sequence[int]) -> Tensor:
    """Mean of the image shifted by 0, 1, ..., 2·radius pixels in one direction, weighted by exp(-i² / 2σ²).

    The direction is uniform within 45° of the horizontal; shifts are rounded to whole pixels and borders repeated.
    """
    radius, deviation = (c * _scale(x) for c in constants)
    steps = torch.arange(2 * math.ceil(radius) + 1, dtype=torch.float64)
    weights = torch.exp(-steps.square() / (2 * deviation**2))
    steps, weights = steps[weights > 1e-6], weights[weights > 1e-6]
    angle = (_drawn(torch.rand, torch.empty(len(x), 1, dtype=torch.float64), seeds) - 0.5) * (math.pi / 2)
    down = torch.ceil(steps * angle.sin() - 0.5).long().to(x.device)  # (N, steps)
    right = torch.ceil(steps * angle.cos() - 0.5).long().to(x.device)
    height, width = x.shape[2:]
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    out = torch.zeros_like(x)
    for i, weight in enumerate((weights / weights.sum()).tolist()):
        row = (rows + down[:, i, None]).clamp_(0, height - 1)[:, None, :, None]
        column = (columns + right[:, i, None]).clamp_(0, width - 1)[:, None, None, :]
        shifted = x.gather(2, row.expand_as(x)).gather(3, column.expand_as(x))
        out.add_(shifted, alpha=weight)
    return out


def _zoom_blur(x: Tensor, largest: float, seeds: Sequence[int]) -> Tensor:
    """Mean of the image, once more, and of itself zoomed about its centre by 1, 1.01, ..., `largest`."""
    from torchvision.transforms.v2.functional import InterpolationMode, affine

    zooms = [1 + k / 100 for k in range(1, round(100 * (largest - 1)) + 1)]
    out = 2 * x
    for zoom in zooms:
        out += affine(
            x, angle=0.0, translate=[0, 0], scale=zoom, shear=[0.0, 0.0], interpolation=InterpolationMode.BILINEAR
        )
    return out / (len(zooms) + 2)


def _brightness(x: Tensor, added: float, seeds: Sequence[int]) -> Tensor:
    """The value v = max(R, G, B) of HSV becomes min(v + added, 1) at the same hue and saturation: colours are scaled
    by the ratio of the two, and black becomes grey. Grey images are shifted.
    """
    value = x.amax(1, keepdim=True)
    brighter = (value + 255 * added).clamp_(max=255)
    return torch.where(value > 0, x * (brighter / value.clamp(min=1)), brighter)


def _contrast(x: Tensor, factor: float, seeds: Sequence[int]) -> Tensor:
    """x becomes m + factor · (x - m), with the mean m of each channel of each image."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _pixelate(x: Tensor, share: float, seeds: Sequence[int]) -> Tensor:
    """Reduced to ⌊share · side⌋ pixels a side by box averages, and enlarged by repeating pixels: a linear map of rows,
    and one of columns.
    """
    rows, columns = (
        _enlarging(m, side) @ _reducing(side, m) for side in x.shape[2:] for m in (max(1, int(share * side)),)
    )
    return rows.to(x.device, x.dtype) @ x @ columns.to(x.device, x.dtype).T


def _jpeg_compression(x: Tensor, quality: float, seeds: Sequence[int]) -> Tensor:
    """Encoded and decoded by Pillow, on the CPU, with its default of halved colour resolution."""
    pictures = x.to("cpu", torch.uint8).movedim(1, 3).squeeze(3).contiguous().numpy()  # one channel: (N, H, W)
    decoded = np.empty_like(pictures)
    for picture, out in zip(pictures, decoded, strict=True):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=int(quality))
        out[...] = Image.open(file)
    return torch.from_numpy(decoded).view(len(x), *x.shape[2:], x.shape[1]).movedim(3, 1).to(x.device, x.dtype)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "gaussian_blur": _gaussian_blur,
    "defocus_blur": _defocus_blur,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "brightness": _brightness,
    "contrast": _contrast,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg_compression,
}

_RANDOM = ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur")


def _scale(x: Tensor) -> float:
    """What lengths in pixels are multiplied by."""
    return max(1.0, min(x.shape[2:]) / 32)


def _drawn(draw: Callable[..., Tensor], like: Tensor, seeds: Sequence[int]) -> Tensor:
    """A tensor like `like` whose row i is drawn by a generator seeded by seeds[i]; on the CPU, so alike everywhere."""
    generator = torch.Generator()
    out = torch.empty(like.shape, dtype=like.dtype)
    for row, seed in zip(out, seeds, strict=True):
        draw(row.shape, generator=generator.manual_seed(seed), dtype=row.dtype, out=row)
    return out.to(like.device)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Every channel convolved with a symmetric kernel (k, k), borders reflected."""
    reach = kernel.shape[0] // 2
    # Reflection needs a border below the side: of a wider kernel the outermost rows, all but empty, go.
    keep = min(reach, *(side - 1 for side in x.shape[2:]))
    kernel = kernel[reach - keep : reach + keep + 1, reach - keep : reach + keep + 1]
    weight = (kernel / kernel.sum()).to(x.device, x.dtype).expand(x.shape[1], 1, -1, -1)
    return functional.conv2d(functional.pad(x, [keep] * 4, mode="reflect"), weight, groups=x.shape[1])


def _reducing(n: int, m: int) -> Tensor:
    """(m, n): output pixel i is the mean of the input pixels whose centres lie within n/m of a side around its own."""
    centre = (torch.arange(m, dtype=torch.float64)[:, None] + 0.5) * n / m
    offset = torch.arange(n, dtype=torch.float64) + 0.5 - centre
    inside = ((offset > -n / m / 2) & (offset <= n / m / 2)).double()
    return inside / inside.sum(1, keepdim=True)


def _enlarging(m: int, n: int) -> Tensor:
    """(n, m): output pixel i repeats the input pixel that its centre falls into."""
    nearest = torch.from_numpy(np.floor((np.arange(n) + 0.5) * m / n).astype(np.int64))
    return functional.one_hot(nearest, m).double()
