"""Short computations that one process and several ranks make alike, and the processes that make them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from metacal import ranks
from metacal.batchnorm import synchronise
from metacal.bilevel import MetaStep
from metacal.config.compose import compose, config_dir
from metacal.curvature import Curvature, top_eigenpairs
from metacal.data import Batches
from metacal.data.splits import Split
from metacal.errors import InputError
from metacal.gamma import ScalarGamma
from metacal.models import Backbone
from metacal.optim import SAM
from metacal.pixels import Pixels
from metacal.predictions import Predictions
from metacal.training.setup import Parts, build_parts

K, SHAPE, STEPS = 4, (2, 4, 4), 9  # the default takes an outer step after every eighth

Made = dict[str, Tensor]


# -- trainings ---------------------------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    """Batch normalisation by the statistics of all ranks, after layers without a bias: it would have the gradient 0."""
    return synchronise(
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten(),
            nn.Linear(48, 5, bias=False),
            nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Linear(5, K),
        )
    )  # fmt: skip


def network(words: str) -> nn.Module:
    """A perceptron, whose traces have closed forms, or for some a net of convolutions."""
    if "method=calmo" in words or "gn_trace" in words or "method=metacal" in words:
        return nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.SiLU(), nn.Conv2d(3, 4, 2, stride=2), nn.Tanh(), nn.Flatten(),
            nn.Linear(16, K),
        )  # fmt: skip
    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, K))
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))  # no gradient on any rank: weight decay spares it
    return net


def parts_of(words: str, dtype: torch.dtype, norm: bool) -> Parts:
    torch.manual_seed(0)
    backbone = Backbone(normalised() if norm else network(words)).to(dtype)
    images, labels = torch.rand(40, *SHAPE, dtype=dtype), torch.arange(40) % K
    batches = Batches(Split("train", images, labels), 8)
    config = compose(words.split())
    parts = build_parts(config, backbone, batches, batches, batches, pixels=Pixels((0.0,) * 2, (1.0,) * 2))
    if parts.gamma is not None:
        parts.gamma.to(dtype)
    return parts


def share(n: int, step: int) -> slice:
    """This rank's rows: at every other step one for each, and all that are left for the last rank."""
    if step % 2 == 0:
        return ranks.share(n)
    start = min(ranks.rank(), n)
    return slice(start, n if ranks.rank() == ranks.size() - 1 else min(start + 1, n))


def batches(dtype: torch.dtype, steps: int, full: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of 11 samples and 9 meta samples; unless `full`, every fifth of one sample, and the last meta batch too."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        n, m = 1 if step % 5 == 4 and not full else 11, 1 if step == steps - 1 and not full else 9
        x, x_meta = (torch.rand(count, *SHAPE, generator=generator, dtype=torch.float64).to(dtype) for count in (n, m))
        y, y_meta = (torch.randint(K, (count,), generator=generator) for count in (n, m))
        yield x, y, x_meta, y_meta


def train(words: str, dtype: torch.dtype = torch.float64, norm: bool = False, steps: int = STEPS) -> Made:
    """Everything that a training leaves: parameters, states, and all numbers of all steps.

    norm: of a network with batch normalisation over all ranks, and no batch of one sample, which that cannot take.
    """
    parts = parts_of(words, dtype, norm)
    values: dict[str, list[float]] = {}
    for step, (x, y, x_meta, y_meta) in enumerate(batches(dtype, steps, full=norm)):
        here, meta = share(len(x), step), share(len(x_meta), step)
        if step == steps - 1:
            parts.step.detail()
        for name, value in parts.step.step(x[here], y[here], x_meta[meta], y_meta[meta]).items():
            if not name.startswith("time/"):
                values.setdefault(name, []).append(float(value))
        if hasattr(parts.gamma, "update") and step % 5 == 4:
            with torch.no_grad():
                parts.gamma.update(Predictions.from_logits(parts.backbone(x_meta)[0], y_meta))
    modules = {"backbone": parts.backbone, "gamma": parts.gamma}
    state = {f"{m}.{k}": v for m, module in modules.items() if module for k, v in module.state_dict().items()}
    last = parts.step.last
    assert last is not None
    state |= {"last logits": last.logits, "last labels": last.labels}
    return state | {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in values.items()}


METHODS = sorted(file.stem for file in (config_dir() / "method").glob("*.yaml"))
OPTIMIZERS = {
    "sgd": "optimizer=sgd optimizer.lr=0.1 optimizer.nesterov=true",
    "adam": "optimizer=adam optimizer.lr=0.01",
    "adamw": "optimizer=adamw optimizer.lr=0.01",
    "muon": "optimizer=muon optimizer.lr=0.02",
    "sam": "optimizer=sam optimizer.lr=0.1",
    "bulk_sgd": "optimizer=bulk_sgd optimizer.lr=0.05 optimizer.momentum=0.9 optimizer.k=2 optimizer.tolerance=1e-6",
}
NET = "method=gamma_net meta.lr=0.05 meta.every=2"
TRAININGS = {
    "gamma_net, sgd": f"{NET} {OPTIMIZERS['sgd']}",
    "difference, adam": f"{NET} meta.engine=difference {OPTIMIZERS['adam']}",
    "reverse, noise, adamw": f"{NET} meta.engine=reverse gamma.input=noise {OPTIMIZERS['adamw']}",
    "random features, label-aware, muon": f"{NET} gamma.input=random gamma.label_aware=true {OPTIMIZERS['muon']}",
    "horizon through penalties, sam": f"{NET} meta.horizon=2 penalties.soft_ece.weight=0.5 "
    f"penalties.gn_trace.weight=0.1 {OPTIMIZERS['sam']}",
    "bank, two terms, inner layer, bulk_sgd": f"{NET} meta.reference_points=bank meta.objective={{sece:1,skce:0.5}} "
    f"gamma.input=layer gamma.layer=2 {OPTIMIZERS['bulk_sgd']}",
    "tangent": f"method=gamma_scalar meta.engine=tangent meta.horizon_decay=0.9 meta.lr=0.05 meta.every=3 "
    f"{OPTIMIZERS['sgd']} penalties.soft_ece.weight=0.5",
    "default, gd in parts": "method=metacal optimizer=gd optimizer.lr=0.1 data.batch_size=4",
    "calmo": f"method=calmo {OPTIMIZERS['adam']}",
    "adafocal": f"method=adafocal {OPTIMIZERS['sgd']}",
    "mixup, class weights, clipping": "method=mixup loss.class_weight=[1,2,0.5,3] optimizer.clip_norm=0.1",
    "batch penalties": "method=mmce penalties.hessian_trace.weight=0.1 penalties.hessian_trace.batch=5",
}
"""By name: the words of a configuration."""
EVERY = {f"{m}, {o}": f"method={m} {words}" for m in METHODS for o, words in OPTIMIZERS.items()}


# -- other computations ------------------------------------------------------------------------------------------------


def products() -> Made:
    """Products and eigenpairs of a batch's Hessian and Gauss-Newton matrix, some ranks having no sample of it."""
    made: Made = {}
    for n in (7, 1):
        torch.manual_seed(2)
        net = network("gn_trace").double()
        x, y = torch.rand(n, *SHAPE, dtype=torch.float64), torch.arange(n) % K
        v = [torch.randn_like(p) for p in net.parameters()]
        w, here = torch.randn(n, K, dtype=torch.float64), ranks.share(n)
        for route in ("tape", "reverse"):
            with Curvature(net, x[here], y[here], route=route, across=ranks.size() > 1) as c:
                results = {"hv": c.hessian(v), "gv": c.gn(v), "jtw": c.jtu(w[here]), "gradient": c.gradient()}
                made |= {f"{n} {route} {name} {i}": t for name, ts in results.items() for i, t in enumerate(ts)}
                made[f"{n} {route} jv"] = ranks.gather_rows(c.jv(v))
                made[f"{n} {route} numbers"] = torch.tensor([*c.residual_quadratic(v), c.loss_value]).double()
        options: dict[str, Any] = {"matrix": "hessian", "tol": 1e-8, "across": ranks.size() > 1}
        pairs = top_eigenpairs(net, x[here], y[here], 2, **options)
        made[f"{n} eigenvalues"] = torch.tensor([pair.value for pair in pairs])
    return made


def spoken() -> dict[str, Any]:
    """Bytes of one step, in units of the parameters', and what is refused where ranks disagree or cannot work."""
    made: dict[str, Any] = {}
    x, y = torch.rand(8, 20), torch.arange(8) % K
    here = ranks.share(8)
    for name, optimizer in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)):
        for rho in (None, 0.1):
            torch.manual_seed(0)
            net = Backbone(
                nn.Sequential(nn.Linear(20, 400), nn.Tanh(), nn.Linear(400, 100), nn.Tanh(), nn.Linear(100, K))
            )
            base, source = optimizer(net.parameters(), lr=0.01), ScalarGamma(2.0)
            step = MetaStep(
                net, base if rho is None else SAM(base, rho), source, torch.optim.SGD(source.parameters(), 0.1), every=2
            )
            theta = sum(p.numel() * p.element_size() for p in net.parameters())
            for kind in ("plain", "meta"):
                before = ranks.bytes_sent()
                step.step(x[here], y[here], x[here], y[here])
                made[f"{kind}, {name}, {rho}"] = (ranks.bytes_sent() - before) / theta
    plain, meta_optimizer = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(source.parameters(), 0.1)
    step = MetaStep(net, plain, source, meta_optimizer, engine="higher")
    embedding = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(4, K))
    sparse = MetaStep(embedding, torch.optim.SGD(embedding.parameters(), 0.1), loss="cross_entropy")
    attempts: dict[str, Callable[[], Any]] = {
        "seed": lambda: ranks.require_same(ranks.rank(), "seed"),
        "sparse": lambda: sparse.step(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
        "empty": lambda: sparse.step(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
        "higher": lambda: step.step(x[here], y[here], x[here], y[here]),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except InputError as error:
            made[name] = str(error)
    return made


CASES: dict[str, Callable[[], Made]] = {
    **{name: partial(train, words) for name, words in TRAININGS.items()},
    "normalised, forward": partial(train, f"{NET} optimizer.lr=0.02 penalties.hessian_trace.weight=0.01", norm=True),
    "normalised, reverse": partial(train, f"{NET} meta.engine=reverse {OPTIMIZERS['adam']}", norm=True),
    "products": products,
    # Adam divides by the size of the gamma-net's gradients: its rate times their relative rounding must be small
    "gamma_net, float32": partial(train, f"{TRAININGS['gamma_net, sgd']} meta.lr=0.003", torch.float32, steps=20),
}
SLOW: dict[str, Callable[[], dict[str, Any]]] = {
    **CASES,
    "default, float32": partial(train, f"method=metacal {OPTIMIZERS['sgd']}", torch.float32, steps=20),
    "spoken": spoken,
    "normalised, difference": partial(train, f"{NET} meta.engine=difference", norm=True),
    "normalised, horizon, sam": partial(train, f"{NET} meta.horizon=2 {OPTIMIZERS['sam']}", norm=True),
    "normalised, calmo": partial(train, "method=calmo", norm=True),
    "normalised, bulk_sgd": partial(train, f"{NET} {OPTIMIZERS['bulk_sgd']}", norm=True),
    **{name: partial(train, words) for name, words in EVERY.items()},
}


# -- processes ---------------------------------------------------------------------------------------------------------


def _rank(number: int, size: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=size)
    ranks.BUCKET = 200  # several messages of each sum
    made: dict[str, Any] = {}
    for name in names:
        try:
            made[name] = SLOW[name]()
        except Exception:
            made[name] = traceback.format_exc()
            break  # the others wait for this one
    torch.save(made, f"{folder}/{number}.pt")
    dist.destroy_process_group()


def start(size: int, folder: Path, names: list[str]) -> Any:
    """`size` ranks that make these one after the other."""
    return mp.spawn(_rank, (size, str(folder), names), nprocs=size, join=False)


def made_by_ranks(processes: Any, size: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank made."""
    while not processes.join():
        pass
    return [torch.load(folder / f"{number}.pt") for number in range(size)]
