"""Every model: shapes, published sizes, derivatives of both modes, and refusals."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from metacal.errors import InputError
from metacal.models import Backbone, build_model, model_names
from metacal.models.options import ModelConfig

# Small members of every family, for tests that run the model.
SMALL = {
    "mlp": ModelConfig("mlp", hidden=[16, 8]),
    "mlp, dropout": ModelConfig("mlp", hidden=[16], activation="gelu", dropout=0.5),
    "cnn": ModelConfig("cnn", width=8),
    "cnn, group": ModelConfig("cnn", width=8, norm="group", activation="tanh", dropout=0.2),
    "resnet20": ModelConfig("resnet20", width=4),
    "resnet20, group": ModelConfig("resnet20", width=4, norm="group"),
    "wide_resnet": ModelConfig("wide_resnet", depth=10, width=1, dropout=0.3),
    "densenet": ModelConfig("densenet", depth=16, width=4, dropout=0.1),
    "vit": ModelConfig("vit", width=16, depth=2, heads=2, dropout=0.1),
    "torchvision resnet18": ModelConfig("torchvision/resnet18"),
}
cases = pytest.mark.parametrize("cfg", SMALL.values(), ids=SMALL.keys())


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@cases
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)], ids=["rgb32", "grey8"])
def test_logits_are_the_head_of_the_features(cfg: ModelConfig, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    backbone = Backbone(build_model(cfg, 7, shape)).double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    for mode in (True, False):
        logits, features = backbone.train(mode)(x)
        assert logits.shape == (4, 7)
        assert features.shape == (4, backbone.in_features)
        torch.testing.assert_close(logits, features @ backbone.head.weight.T + backbone.head.bias)


@cases
def test_forward_and_reverse_derivatives_agree(cfg: ModelConfig) -> None:
    """<u, J v> by forward mode equals <Jᵀu, v> by reverse mode, in training mode, dropout masks being the same."""
    torch.manual_seed(0)
    backbone = Backbone(build_model(cfg, 5, (3, 8, 8))).double()
    params = {n: p.detach() for n, p in backbone.named_parameters()}
    v = {n: torch.randn_like(p) for n, p in params.items()}
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    u = torch.randn(4, 5, dtype=torch.float64)

    def logits(params: dict[str, torch.Tensor]) -> torch.Tensor:
        buffers = {n: b.clone() for n, b in backbone.named_buffers()}
        torch.manual_seed(1)
        return functional_call(backbone, (params, buffers), (x,))[0]

    _, forward = jvp(logits, (params,), (v,))
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    grads = torch.autograd.grad((logits(leaves) * u).sum(), list(leaves.values()))
    reverse = sum((g * v[n]).sum() for n, g in zip(leaves, grads))
    torch.testing.assert_close((forward * u).sum(), reverse)


@cases
def test_double_backward_exists(cfg: ModelConfig) -> None:
    torch.manual_seed(0)
    net = build_model(cfg, 5, (3, 8, 8)).double()
    params = list(net.parameters())
    loss = net(torch.randn(4, 3, 8, 8, dtype=torch.float64)).square().mean()
    grads = torch.autograd.grad(loss, params, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), params, allow_unused=True)
    assert any(g is not None and g.abs().sum() > 0 for g in second)
    assert all(torch.isfinite(g).all() for g in second if g is not None)


@cases
def test_no_module_works_in_place(cfg: ModelConfig) -> None:
    assert not any(getattr(m, "inplace", False) for m in build_model(cfg, 5, (3, 8, 8)).modules())


@cases
def test_initialisation_depends_on_the_global_seed_alone(cfg: ModelConfig) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build_model(cfg, 5, (3, 8, 8)).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values()))


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet20", 0.27), ("resnet32", 0.46), ("resnet44", 0.66), ("resnet56", 0.85), ("resnet110", 1.7)],
)
def test_sizes_of_table_6_of_he_et_al(name: str, millions: float) -> None:
    net = build_model(ModelConfig(name), 10, (3, 32, 32))
    assert count(net) / 1e6 == pytest.approx(millions, abs=0.05 if millions > 1 else 0.006)
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == int(name.removeprefix("resnet"))


def test_other_published_sizes() -> None:
    with torch.device("meta"):
        wide = build_model(ModelConfig("wide_resnet"), 10, (3, 32, 32))
        dense = build_model(ModelConfig("densenet"), 10, (3, 32, 32))
    assert count(wide) / 1e6 == pytest.approx(36.5, abs=0.05)  # WRN-28-10
    assert count(dense) / 1e6 == pytest.approx(0.77, abs=0.01)  # DenseNet-BC, L = 100, k = 12
    assert count(build_model(ModelConfig("mlp"), 10, (3, 32, 32))) == 3072 * 200 + 200 + 200 * 201 + 10 * 201
    assert 50_000 <= count(build_model(ModelConfig("cnn"), 10, (3, 32, 32))) <= 150_000


def test_option_a_shortcut_takes_every_second_pixel_and_pads_zeros() -> None:
    net = build_model(ModelConfig("resnet20"), 10, (3, 32, 32)).eval()
    block = net.blocks[3]
    nn.init.zeros_(block.conv2.weight)  # what remains is relu(shortcut)
    x = torch.rand(2, 16, 32, 32)
    with torch.no_grad():
        y = block(x)
    assert y.shape == (2, 32, 16, 16)
    torch.testing.assert_close(y[:, 8:24], x[:, :, ::2, ::2])
    assert y[:, :8].abs().sum() == 0
    assert y[:, 24:].abs().sum() == 0


def test_vit_attention_equals_torchs() -> None:
    torch.manual_seed(0)
    attention = build_model(ModelConfig("vit", width=16, depth=1, heads=2), 3, (3, 8, 8)).layers[0].attention
    x = torch.randn(2, 5, 16)
    q, k, v = attention.qkv(x).chunk(3, -1)
    heads = [t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = nn.functional.scaled_dot_product_attention(*heads)
    torch.testing.assert_close(attention(x), attention.out(expected.transpose(1, 2).flatten(2)))


class TestTorchvision:
    def test_small_stem_keeps_the_resolution(self) -> None:
        net = build_model(ModelConfig("torchvision/resnet18"), 10, (1, 32, 32))
        assert net.conv1.in_channels == 1
        assert net.conv1.stride == (1, 1) and net.conv1.kernel_size == (3, 3)
        assert isinstance(net.maxpool, nn.Identity)
        sizes = []
        net.layer4.register_forward_hook(lambda _m, _i, out: sizes.append(out.shape[-1]))
        net(torch.zeros(2, 1, 32, 32))
        assert sizes == [4]

    def test_original_stem_is_torchvisions(self) -> None:
        cfg = ModelConfig("torchvision/resnet18", stem="original")
        theirs = torchvision.models.resnet18(num_classes=10)
        ours = build_model(cfg, 10, (3, 32, 32))
        assert {k: v.shape for k, v in ours.state_dict().items()} == {
            k: v.shape for k, v in theirs.state_dict().items()
        }
        assert ours.conv1.stride == (2, 2)

    @pytest.mark.parametrize(
        "name", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "regnet_y_400mf", "squeezenet1_1", "alexnet"]
    )
    def test_other_families_take_small_images(self, name: str) -> None:
        net = build_model(ModelConfig(f"torchvision/{name}"), 5, (2, 32, 32)).eval()
        with torch.no_grad():
            assert net(torch.zeros(2, 2, 32, 32)).shape == (2, 5)
            if name != "squeezenet1_1":
                _, features = Backbone(net)(torch.zeros(2, 2, 32, 32))
                assert features.ndim == 2

    def test_head_that_is_a_convolution_is_refused(self) -> None:
        net = build_model(ModelConfig("torchvision/squeezenet1_1"), 5, (3, 32, 32))
        with pytest.raises(InputError, match="SqueezeNet has no Linear layer"):
            Backbone(net)

    def test_forward_mode_through_their_transformer(self) -> None:
        net = torchvision.models.VisionTransformer(8, 4, 1, 2, 16, 32, num_classes=3)
        backbone = Backbone(net)
        params = {n: p.detach() for n, p in backbone.named_parameters()}
        x = torch.randn(2, 3, 8, 8)
        with sdpa_kernel(SDPBackend.MATH):
            (z, h), (dz, _) = jvp(lambda p: functional_call(backbone, p, (x,)), (params,), (params,))
        assert z.shape == dz.shape == (2, 3) and h.shape == (2, 16)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", [n for n in torchvision.models.list_models(module=torchvision.models) if not n.startswith("maxvit")]
    )
    def test_every_model(self, name: str) -> None:
        if name.startswith(("vit_h", "regnet_y_128")):
            pytest.skip("does not fit a small machine")
        net = build_model(ModelConfig(f"torchvision/{name}"), 3, (1, 32, 32))
        x = torch.zeros(2, 1, 32, 32)
        with torch.no_grad():
            if name.startswith("squeezenet"):  # its head is a convolution
                assert net(x).shape == (2, 3)
            else:
                backbone = Backbone(net)
                logits, features = backbone(x)
                assert logits.shape == (2, 3) and features.shape == (2, backbone.in_features)


@pytest.mark.parametrize(
    ("cfg", "shape", "message"),
    [
        (ModelConfig("vitt"), (3, 32, 32), "model.name must be one of .*got 'vitt'.*did you mean 'vit'"),
        (ModelConfig("torchvision/resnet19"), (3, 32, 32), "no classification model 'resnet19'; did you mean resnet1"),
        (ModelConfig("mlp", width=3), (3, 8, 8), "model mlp has no option width .*it has hidden, activation, dropout"),
        (ModelConfig("torchvision/resnet18", depth=3), (3, 32, 32), "has no option depth .*it has stem"),
        (ModelConfig("mlp", hidden=[]), (3, 8, 8), "model.hidden must be a list of sizes >= 1"),
        (ModelConfig("mlp", hidden=[8, 0]), (3, 8, 8), "model.hidden must be a list of sizes >= 1"),
        (ModelConfig("mlp", activation="swish"), (3, 8, 8), "model.activation must be one of .*got 'swish'"),
        (ModelConfig("mlp", dropout=1.0), (3, 8, 8), r"model.dropout must be in \[0, 1\), got 1.0"),
        (ModelConfig("cnn"), (20,), r"model cnn needs images \(channels, height, width\), got inputs of shape \(20,\)"),
        (ModelConfig("cnn", norm="layer"), (3, 8, 8), "model.norm must be .*batch.*group.*got 'layer'"),
        (ModelConfig("cnn", width=0), (3, 8, 8), "model.width must be >= 1, got 0"),
        (ModelConfig("cnn", pool=5), (3, 16, 16), "model.pool must be between 1 and 4 for images of 16x16, got 5"),
        (ModelConfig("cnn"), (3, 2, 2), "model cnn needs images of at least 4x4, got 2x2"),
        (ModelConfig("wide_resnet", depth=20), (3, 32, 32), r"model.depth of wide_resnet must be 6n \+ 4"),
        (ModelConfig("densenet", depth=4), (3, 32, 32), r"model.depth of densenet must be 6n \+ 4"),
        (ModelConfig("vit", patch_size=5), (3, 32, 32), "model.patch_size must divide the image's sides 32x32, got 5"),
        (ModelConfig("vit", width=10, heads=4), (3, 8, 8), "model.width must be a multiple of model.heads"),
        (ModelConfig("torchvision/maxvit_t"), (3, 32, 32), "model torchvision/maxvit_t cannot take images of shape"),
        (ModelConfig("torchvision/resnet18", stem="tiny"), (3, 32, 32), "model.stem must be .*got 'tiny'"),
    ],
)
def test_refusals_are_one_line(cfg: ModelConfig, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as info:
        build_model(cfg, 10, shape)
    assert "\n" not in str(info.value)


def test_names() -> None:
    assert {"mlp", "cnn", "resnet20", "resnet110", "wide_resnet", "densenet", "vit"} <= set(model_names())
