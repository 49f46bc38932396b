"""Products on a ResNet-20 against curvlinops, and the whole set of measures on the library's own networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metacal.curvature import Curvature, batch_sharpness, gn_sharpness, gn_trace, hessian_sharpness, hessian_trace


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_products_on_resnet20(loss: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    resnet = pytest.importorskip("metacal.models.resnet").resnet
    torch.manual_seed(0)
    model = resnet(20, 10, (3, 8, 8)).double().eval()  # curvlinops cannot do BatchNorm in training mode
    x, y = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (6,))
    params = list(model.parameters())
    v = torch.randn(sum(p.numel() for p in params), dtype=torch.float64)
    if loss == "mse":
        criterion, target = nn.MSELoss(), torch.nn.functional.one_hot(y, 10).double()
    else:
        criterion, target = nn.CrossEntropyLoss(), y
    with Curvature(model, x, y, loss=loss) as c:
        parts = [a.view(p.shape) for a, p in zip(v.split([p.numel() for p in params]), params)]
        ours = {"GGN": c.gn(parts), "Hessian": c.hessian(parts)}
    for kind, product in ours.items():
        operator = getattr(curvlinops, f"{kind}LinearOperator")(
            model, criterion, params, [(x, target)], check_deterministic=False
        )
        theirs = operator @ v
        mine = torch.cat([t.reshape(-1) for t in product])
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-9


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20", "vit"])
def test_the_librarys_own_networks(name: str) -> None:
    small = pytest.importorskip("metacal.models.small")
    shape = (3, 8, 8)
    torch.manual_seed(0)
    if name == "mlp":
        model = small.mlp(5, shape)
    elif name == "cnn":
        model = small.cnn(5, shape)
    elif name == "resnet20":
        model = pytest.importorskip("metacal.models.resnet").resnet(20, 5, shape)
    else:
        model = pytest.importorskip("metacal.models.vit").vit(5, shape)
    model = model.eval()
    x, y = torch.randn(6, *shape), torch.randint(0, 5, (6,))
    sharp, h = gn_sharpness(model, x, y, tol=1e-3), hessian_sharpness(model, x, y, tol=1e-3)
    trace = gn_trace(model, x, y, exact=True)
    assert sharp.converged and h.converged
    assert 0 < sharp.value <= trace.value * (1 + 1e-5)
    assert hessian_trace(model, x, y).stderr >= 0
    assert abs(batch_sharpness(model, [(x, y)]).value) <= abs(h.value) * (1 + 1e-2)
    with Curvature(model, x, y) as c:  # the exact trace against the diagonal of G through J, on a few directions
        rows = torch.eye(5)
        total = 0.0
        z = c.logits
        p = z.softmax(1)
        for n in range(6):
            s = torch.diag(p[n]) - torch.outer(p[n], p[n])
            values, vectors = torch.linalg.eigh(s.double())
            for k in range(len(rows)):
                w = torch.zeros_like(z)
                w[n] = (values[k].clamp(min=0).sqrt() * vectors[:, k]).float()
                total += float(sum(t.square().sum() for t in c.jtu(w)))
    assert trace.value == pytest.approx(total / 6, rel=1e-4)
