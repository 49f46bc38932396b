"""Corruptions: what they do to pixels, and that a sample's does not depend on its batch."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from metacal.data.corruptions import CONSTANTS, CORRUPTIONS, SEVERITIES, corrupt
from metacal.errors import InputError

RANDOM = ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur")


def pictures(n: int = 6, channels: int = 3, side: int = 32, seed: int = 0) -> torch.Tensor:
    """Smooth colours with edges and some texture, as photographs have; uint8 (n, channels, side, side)."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 5, 5, generator=g)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic", align_corners=True)
    blocks = torch.rand(n, channels, side // 8 + 1, side // 8 + 1, generator=g)
    blocks = blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, 3 : side + 3, 3 : side + 3]
    fine = 0.1 * torch.randn(n, channels, side, side, generator=g)
    return (255 * (0.5 * smooth + 0.4 * blocks + fine)).clamp(0, 255).to(torch.uint8)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().mean())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 28), (1, 8), (3, 64)])
def test_uint8_out_of_the_same_shape_the_input_untouched_and_severity_0_is_the_image(name, channels, side):
    x = pictures(3, channels, side)
    before = x.clone()
    for severity in (1, 5):
        y = corrupt(x, name, severity)
        assert y.dtype == torch.uint8 and y.shape == x.shape and not torch.equal(y, x)
    same = corrupt(x, name, 0)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_distance_to_the_image_grows_with_severity(name, channels):
    x = pictures(16, channels)
    by_severity = [distance(corrupt(x, name, s), x) for s in SEVERITIES]
    if name == "motion_blur":  # 3 and 4 differ in the radius alone, six deviations out
        assert by_severity[2] <= by_severity.pop(3)
    assert all(a < b for a, b in pairwise(by_severity)), by_severity


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_samples_corruption_does_not_depend_on_its_batch(name):
    x, index = pictures(7), torch.tensor([3, 0, 11, 8, 2, 500, 41])
    for severity in (2, 5):
        whole = corrupt(x, name, severity, seed=4, index=index)
        order = torch.tensor([5, 1, 6, 0, 3, 2, 4])
        assert torch.equal(corrupt(x[order], name, severity, seed=4, index=index[order]), whole[order])
        for i in range(7):
            alone = corrupt(x[i : i + 1], name, severity, seed=4, index=index[i : i + 1])
            assert torch.equal(alone[0], whole[i])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seed_and_position_decide_the_random_ones_and_no_global_generator(name):
    x = pictures(1).expand(3, -1, -1, -1)
    state = torch.get_rng_state()
    a, b = corrupt(x, name, 4), corrupt(x, name, 4)
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), state)
    other = corrupt(x, name, 4, seed=1)
    if name in RANDOM:
        assert not torch.equal(a, other) and not torch.equal(a[0], a[1])
    else:
        assert torch.equal(a, other) and torch.equal(a[0], a[1])


@given(
    name=st.sampled_from(CORRUPTIONS),
    severity=st.integers(0, 5),
    shape=st.tuples(st.integers(1, 3), st.sampled_from([1, 3]), st.integers(1, 20), st.integers(1, 20)),
    seed=st.integers(0, 2**31),
)
def test_any_image_size_works_and_batches_do_not_matter(name, severity, shape, seed):
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    y = corrupt(x, name, severity, seed=seed)
    assert y.dtype == torch.uint8 and y.shape == x.shape
    last = corrupt(x[-1:], name, severity, seed=seed, index=torch.tensor([len(x) - 1]))
    assert int((last[0].int() - y[-1].int()).abs().max()) <= 1  # a convolution may round otherwise in another batch


# ------------------------------------------------------------------------- against closed form and other libraries


def flat(value: int, n: int = 64, side: int = 32) -> torch.Tensor:
    return torch.full((n, 3, side, side), value, dtype=torch.uint8)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noises_have_the_moments_of_their_constants(severity):
    x, n = flat(128).double() / 255, 64 * 3 * 32 * 32
    value, k = 128 / 255, severity - 1
    wanted = {
        "gaussian_noise": CONSTANTS["gaussian_noise"][k] ** 2,
        "shot_noise": value / CONSTANTS["shot_noise"][k],
    }
    for name, variance in wanted.items():
        y = corrupt(flat(128), name, severity).double() / 255
        assert float((y - x).mean()) == pytest.approx(0, abs=6 * math.sqrt(variance / n))
        assert float(y.var()) == pytest.approx(variance + 1 / (12 * 255**2), rel=0.03)  # plus that of rounding
    y = corrupt(flat(128), "impulse_noise", severity)
    share = CONSTANTS["impulse_noise"][k]
    for end in (0, 255):
        assert float((y == end).double().mean()) == pytest.approx(share / 2, abs=5 * math.sqrt(share / 2 / n))
    assert bool(((y == 0) | (y == 128) | (y == 255)).all())


def test_noise_of_a_sample_grows_and_does_not_change_its_pattern():
    x = flat(128, n=2)
    noise = [(corrupt(x, "gaussian_noise", s).double() - 128).flatten() for s in SEVERITIES]
    for other in noise[1:]:
        assert float(torch.corrcoef(torch.stack([noise[0], other]))[0, 1]) > 0.995
    hit = [corrupt(x, "impulse_noise", s) != 128 for s in SEVERITIES]
    assert all(bool((a <= b).all()) for a, b in pairwise(hit))


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "motion_blur", "zoom_blur", "contrast", "pixelate"])
def test_blurs_contrast_and_pixelate_leave_a_flat_image(name):
    for severity in SEVERITIES:
        assert torch.equal(corrupt(flat(77, n=2), name, severity), flat(77, n=2))


def test_brightness_adds_to_the_value_of_hsv():
    import colorsys

    x = torch.randint(0, 256, (1, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    x[:, :, 0, 0] = 0
    for severity, added in zip(SEVERITIES, CONSTANTS["brightness"]):
        y = corrupt(x, "brightness", severity)
        for i in range(6):
            for j in range(6):
                h, s, v = colorsys.rgb_to_hsv(*(x[0, :, i, j].double() / 255).tolist())
                wanted = torch.tensor(colorsys.hsv_to_rgb(h, s, min(v + added, 1.0))) * 255
                assert torch.allclose(y[0, :, i, j].double(), wanted.double(), atol=0.51)


def test_contrast_by_its_formula():
    x = pictures(2)
    means = x.double().mean((2, 3), keepdim=True)
    for severity, factor in zip(SEVERITIES, CONSTANTS["contrast"]):
        wanted = means + factor * (x.double() - means)
        assert torch.allclose(corrupt(x, "contrast", severity).double(), wanted, atol=0.51)


@pytest.mark.parametrize("side", [32, 28])
def test_pixelate_is_pillows_box_filter(side):
    x = pictures(2, side=side)
    for severity, share in zip(SEVERITIES, CONSTANTS["pixelate"]):
        small = int(share * side)
        y = corrupt(x, "pixelate", severity)
        for image, ours in zip(x, y):
            picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((small, small), Image.Resampling.BOX)
            theirs = np.asarray(picture.resize((side, side), Image.Resampling.BOX)).astype(int)
            assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs).max() <= 1  # it rounds twice


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_near_torchvisions(channels):
    coder = pytest.importorskip("torchvision.io")
    if not hasattr(coder, "encode_jpeg"):
        pytest.skip("this torchvision has no JPEG coder")
    x = pictures(2, channels)
    for severity, quality in zip(SEVERITIES, CONSTANTS["jpeg_compression"]):
        for image, ours in zip(x, corrupt(x, "jpeg_compression", severity)):
            theirs = coder.decode_jpeg(coder.encode_jpeg(image, quality=quality))
            assert distance(ours, theirs) < 0.1 * distance(ours, image)


def test_blurs_have_the_widths_of_their_constants():
    """A white pixel's image is the kernel: its second moment along a side, in pixels squared."""
    point = torch.zeros(1, 1, 33, 33, dtype=torch.uint8)
    point[0, 0, 16, 16] = 255
    near = torch.arange(33.0).double() - 16

    def spread(name: str, severity: int) -> float:
        mass = corrupt(point, name, severity)[0, 0].double().sum(0)
        return float((mass * near**2).sum() / mass.sum())

    # 33 pixels a side: lengths are 33/32 of the constants.
    assert spread("gaussian_blur", 5) == pytest.approx((33 / 32) ** 2, rel=0.1)
    assert spread("defocus_blur", 4) == pytest.approx(2 / 5, rel=0.1)  # five pixels in a cross
    assert spread("defocus_blur", 5) == pytest.approx(6 / 9, rel=0.1)  # nine in a square
    motion = corrupt(point.expand(40, -1, -1, -1), "motion_blur", 5)[:, 0].double()
    rows, columns = motion.sum(2), motion.sum(1)
    assert bool((columns[:, 17:] == 0).all())  # one-sided
    across = (rows * near**2).sum(1) / rows.sum(1)
    along = (columns * near**2).sum(1) / columns.sum(1)
    assert bool((across <= along + 0.5).all()) and float(across.max()) > 2  # within 45 degrees of the horizontal


def test_lengths_grow_with_the_image_above_32_pixels():
    """An image of twice the size under twice the blur is the small image's blur, seen larger."""
    small = torch.nn.functional.interpolate(pictures(4, side=8).float(), scale_factor=4, mode="bilinear")
    large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear").clamp(0, 255).to(torch.uint8)
    small = small.clamp(0, 255).to(torch.uint8)
    for name in ("gaussian_blur", "defocus_blur", "motion_blur", "zoom_blur"):
        a = distance(corrupt(small, name, 5), small)
        b = distance(corrupt(large, name, 5), large)
        assert b == pytest.approx(a, rel=0.35), name


@pytest.mark.parametrize(
    ("images", "name", "severity", "message"),
    [
        (pictures(1), "gausian_noise", 1, "did you mean 'gaussian_noise'"),
        (pictures(1), "contrast", 6, "severity must be an integer from 0"),
        (pictures(1), "contrast", 1.0, "severity must be an integer from 0"),
        (pictures(1), "contrast", True, "severity must be an integer from 0"),
        (pictures(1).float(), "contrast", 1, "got torch.float32 of shape"),
        (pictures(1)[0], "contrast", 1, "uint8 tensor"),
        (pictures(1)[:0], "contrast", 1, "non-empty"),
        (pictures(1).numpy(), "contrast", 1, "got ndarray"),
        (pictures(1, 2), "jpeg_compression", 1, "1 or 3 channels, got 2"),
    ],
)
def test_bad_input(images, name, severity, message):
    with pytest.raises(InputError, match=message):
        corrupt(images, name, severity)


def test_an_index_of_another_length():
    with pytest.raises(InputError, match=r"index must have shape \(2,\), got \(3,\)"):
        corrupt(pictures(2), "contrast", 1, index=torch.arange(3))
