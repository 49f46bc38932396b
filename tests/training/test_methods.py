"""Every method and every optimizer through the trainer: what they log, and that a stopped run goes on bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference.run_folders import composed

import metacal
from metacal.config.compose import compose, config_dir
from metacal.errors import InputError
from metacal.training.logging import ConsoleLog, RunLog
from metacal.training.loop import train
from metacal.training.run import build_watch
from metacal.training.setup import (
    Parts,
    build_backbone,
    build_parts,
    evaluation_batches,
    pixels_of,
    prepare_data,
    training_batches,
)
from metacal.training.state import Progress, complete_state, restore

SMALL = [
    "data.train_size=200",
    "data.batch_size=32",
    "data.meta_batch_size=16",
    "model.hidden=[16,12]",
    "epochs=2",
    "monitor.log_every=3",
    "monitor.figures_every=0",
]
METHODS = sorted(file.stem for file in (config_dir() / "method").glob("*.yaml"))
OPTIMIZERS = sorted(file.stem for file in (config_dir() / "optimizer").glob("*.yaml"))


def parts_of(words: list[str]) -> tuple:
    """Config, parts and watch of the run that `words` describe."""
    config = composed(tuple(words))
    device = torch.device("cpu")
    data = prepare_data(config, device)
    backbone = build_backbone(config, data, device)
    batches = training_batches(config, data)
    parts = build_parts(config, backbone, *batches, evaluation_batches(data.val), pixels=pixels_of(data))
    return config, parts, build_watch(config, parts)


@pytest.mark.parametrize("optimizer", ["sgd", "sam", "bulk_sgd"])
def test_a_slow_head_starts_smaller_and_has_its_own_rate(optimizer):
    words = ["data.train_size=200", f"optimizer={optimizer}", "optimizer.lr=0.1"]
    _, usual, _ = parts_of(words)
    _, slow, _ = parts_of([*words, "optimizer.head_lr=0.25"])
    for (name, p), q in zip(usual.backbone.named_parameters(), slow.backbone.parameters(), strict=True):
        of_head = name.startswith(f"net.{usual.backbone.head_name}.")
        assert torch.equal(q, 0.5 * p if of_head else p), name
    assert [group["initial_lr"] for group in slow.optimizer.param_groups] == [0.1, 0.025]


def run(
    words: list[str], folder: Path | None = None, stop_after: int | None = None, state: dict | None = None
) -> Parts:
    """Train; with `stop_after` a run is stopped after so many steps and gone on with in parts made anew."""
    config, parts, watch = parts_of(words)
    log = RunLog(folder)
    console = ConsoleLog("test", 1, 1, enabled=False)
    torch.manual_seed(config.seed)
    progress = restore(parts, watch, state, "a state") if state else Progress()
    stop = None if stop_after is None else lambda: progress.step >= stop_after
    try:
        train(config, parts, watch, log, console, None, progress, stop)
    except KeyboardInterrupt:
        saved = complete_state(parts, progress, watch, log)
        return run(words, state=torch_round_trip(saved))
    finally:
        log.close()
    return parts


def torch_round_trip(state: dict) -> dict:
    """As a checkpoint would give it back."""
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same(a: Parts, b: Parts) -> None:
    for left, right in ((a.backbone, b.backbone), (a.gamma, b.gamma)):
        if left is None:
            assert right is None
            continue
        for (name, p), q in zip(left.state_dict().items(), right.state_dict().values()):
            assert torch.equal(p, q), name


@pytest.mark.parametrize(
    "optimizer",
    [
        *OPTIMIZERS,
        "sam optimizer.base=adamw",
        "sam optimizer.base=muon optimizer.adaptive=true",
        "muon optimizer.rest=sgd",
        "bulk_sgd optimizer.k=3 optimizer.every=3 optimizer.matrix=gauss_newton",
    ],
)
def test_each_optimizer_trains_and_resumes_bit_for_bit(optimizer: str) -> None:
    words = [*SMALL, "method=metacal", *f"optimizer={optimizer}".split(), "meta.lr=0.1"]
    words += ["epochs=8"] if optimizer == "gd" else ["optimizer.lr=0.01"]
    whole = run(words)
    start = parts_of(words)[1]
    moved = [not torch.equal(p, q) for p, q in zip(whole.backbone.parameters(), start.backbone.parameters())]
    assert all(moved)
    assert any(not torch.equal(p, q) for p, q in zip(whole.gamma.parameters(), start.gamma.parameters()))
    assert_same(whole, run(words, stop_after=4))


def test_channels_last_and_mixed_outer_passes_train_alike() -> None:
    small = [word for word in SMALL if not word.startswith("model.")]
    words = [*small, "method=gamma_net", "model=cnn", "model.width=4", "epochs=1", "optimizer.lr=0.01"]
    plain, laid_out, mixed = (
        run([*words, *more]) for more in ([], ["memory_format=channels_last"], ["precision=bf16_outer"])
    )
    for p, q, r in zip(plain.backbone.parameters(), laid_out.backbone.parameters(), mixed.backbone.parameters()):
        assert q.dim() < 4 or q.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
        assert p.dtype == r.dtype and 0 <= (p - r).norm() <= 0.1 * p.norm()


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_and_resumes_bit_for_bit(method: str) -> None:
    words = [*SMALL, f"method={method}"]
    assert_same(run(words), run(words, stop_after=4))


@pytest.mark.parametrize("method", ["gamma_net", "adafocal"])
@pytest.mark.parametrize("meta_from", ["val", "folds"])
def test_no_image_is_lost_to_meta_and_a_stopped_run_goes_on(meta_from: str, method: str) -> None:
    words = [*SMALL, f"method={method}", f"data.meta_from={meta_from}", "data.meta_folds=3", "epochs=4"]
    whole = run(words)
    plain = parts_of([*words, "method=cross_entropy"])[1]
    assert torch.equal(whole.train.split.labels, plain.train.split.labels)
    for stop_after in (4, 9):  # in the first and in the second epoch, of six steps
        assert_same(whole, run(words, stop_after=stop_after))


def test_an_epoch_trains_on_all_folds_but_the_one_that_is_meta() -> None:
    words = [*SMALL, "data.meta_from=folds", "data.meta_folds=3", "data.flip=true", "data.crop_padding=1"]
    _, parts, _ = parts_of(words)
    meta, split = parts.meta, parts.train.split
    meta.with_index = parts.train.with_index = True
    for epoch in range(4):
        held_out = {i for batch, _ in zip(meta.again(epoch), range(20)) for i in batch[2].tolist()}
        trained = {i for batch in parts.train.epoch(epoch) for i in batch[2].tolist()}
        assert not held_out & trained and held_out | trained == set(range(200))
        assert len(held_out) in (66, 67)
    x, _, index = next(meta.again(2))
    assert len(x) == 16 and torch.equal(x, split.transform(split.storage[index])), "meta images are as they are"
    for method, meta_from in (("gamma_net", "train"), ("gamma_net", "folds"), ("cross_entropy", "train")):
        words = [*SMALL, f"method={method}", f"data.meta_from={meta_from}", "data.batch_size=20"]
        assert len(parts_of(words)[1].train) == 10, "every method takes as many steps an epoch"
    augmented = parts_of([*words[:-3], "method=gamma_net", "data.flip=true", "data.meta_augment=true"])[1]
    assert augmented.meta.augment and not parts.meta.augment


@pytest.mark.parametrize(
    ("method", "zero", "plain"),
    [
        ("calmo", ["robust_kl", "margin_smoothness"], ["method=cross_entropy"]),
        ("margin_tail", ["margin_tail"], ["method=cross_entropy"]),
        ("hessian_trace", ["hessian_trace"], ["method=cross_entropy"]),
        ("metacal", ["margin_tail"], ["method=gamma_horizon"]),
    ],
)
def test_penalties_without_weight_change_nothing(method: str, zero: list[str], plain: list[str]) -> None:
    without = [f"penalties.{name}.weight=0" for name in zero]
    assert_same(run([*SMALL, f"method={method}", *without]), run([*SMALL, *plain]))


def test_penalties_are_logged_with_share_gradient_and_time(tmp_path: Path) -> None:
    run(
        [
            *SMALL,
            "method=cross_entropy",
            "penalties.margin_tail.weight=0.1",
            "penalties.hessian_trace.weight=1e-3",
            "penalties.hessian_trace.every=2",
        ],
        tmp_path,
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["split"] == "penalty"]
    times = [line for line in lines if line["split"] == "time"]
    assert len(found) >= 2
    for name in ("margin_tail", "hessian_trace"):
        assert all(line[name] > 0 for line in found)
        detailed = [line for line in found if f"{name}_share" in line]
        assert detailed and all(0 < line[f"{name}_share"] < 1 for line in detailed)
        assert all(line[f"{name}_grad_norm"] > 0 for line in detailed)
        assert any(line.get(f"penalty_{name}_ms", 0) > 0 for line in times)


@pytest.mark.parametrize("method", ["gamma_net", "metacal"])
def test_gradient_descent_takes_the_whole_set_in_parts_of_any_size(method: str) -> None:
    words = [*SMALL, "optimizer=gd", f"method={method}", "epochs=4", "penalties.hessian_trace.every=1"]
    a, b = run([*words, "data.batch_size=7"]), run([*words, "data.batch_size=1000"])
    assert len(a.train) == 1 and a.step.count == 4
    for p, q in zip(a.backbone.parameters(), b.backbone.parameters()):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["penalties.margin_tail.weight=-1"], "penalties.margin_tail.weight must be >= 0, got -1"),
        (["penalties.robust_kl.weight=1", "penalties.robust_kl.eps=-0.1"], "penalties.robust_kl.eps must be >= 0"),
        (["penalties.robust_kl.weight=1", "penalties.robust_kl.eps=0"], "penalties.robust_kl.eps must be > 0"),
        (["penalties.hessian_trace.every=0"], "penalties.hessian_trace.every must be >= 1"),
        (["penalties.margn_tail.weight=1"], "penalties.margin_tail"),
        (["optimizer=sam", "optimizer.rho=-1"], "optimizer.rho must be >= 0, got -1"),
        (["optimizer=muno"], "did you mean 'muon'"),
        (["method=gamma_net", "optimizer=gd", "meta.engine=reverse"], "only meta.engine=forward"),
        (["method=dual_focal", "gamma.source=adafocal"], "go together"),
        (["loss.learn_smoothing=scalar"], "needs loss.name=label_smoothing"),
        (["optimizer=adamw", "optimizer.momentum=0.5"], "optimizer.momentum=0.5 is no setting of adamw"),
        (["optimizer=sgd", "optimizer.rho=0.3"], "optimizer.rho=0.3 is no setting of sgd"),
        (["optimizer=gd", "penalties.mmce.weight=1"], "penalties.mmce.weight=1.0 does not go with optimizer=gd"),
        (["optimizer=gd", "data.flip=true"], "optimizer=gd descends one function"),
        (["optimizer=gd", "data.mixup=0.2"], "does not go with optimizer=gd"),
        (["optimizer=gd", "data.meta_from=folds"], "data.meta_from=folds changes the training set at every epoch"),
        (["data.meta_from=test"], "data.meta_from must be one of train, val, folds, got 'test'"),
        (["data.meta_folds=1"], "data.meta_folds must be >= 2, got 1"),
    ],
)
def test_bad_words_are_refused_before_anything_is_done(words: list[str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        compose(words)


def test_penalties_on_pixels_need_to_know_these() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    x, y = torch.rand(60, 3, 2, 2), torch.arange(60) % 3
    with pytest.raises(InputError, match=r"penalties.robust_kl works on pixels.*pixels=\(mean, std\)"):
        metacal.fit(model, (x, y), method="calmo", epochs=1, progress=False)
    for given in (([0.0], [0.0]), ([0.0, 1.0], [1.0])):
        with pytest.raises(InputError, match="pixels must"):
            metacal.fit(model, (x, y), method="calmo", epochs=1, progress=False, pixels=given)
    fit = metacal.fit(model, (x, y), method="calmo", epochs=1, progress=False, pixels=([0.0] * 3, [1.0] * 3))
    assert fit.best_epoch == 1
    for words, remedy in (
        (["penalties.margin_smoothness.weight=0.01"], "penalties.margin_smoothness.units=inputs"),
        (["monitor.every=1", "monitor.robust_eps=0.1"], "monitor.robust_units=inputs"),
    ):
        method = "cross_entropy"
        with pytest.raises(InputError, match=f"or set {remedy.partition('=')[0]}"):
            metacal.fit(model, (x, y), method=method, epochs=1, progress=False, overrides=words)
        fit = metacal.fit(model, (x, y), method=method, epochs=1, progress=False, overrides=[*words, remedy])
        assert fit.best_epoch == 1


def test_bad_parts_are_refused_before_training() -> None:
    with pytest.raises(InputError, match="k must be at least 1 and below the"):
        parts_of([*SMALL, "optimizer=bulk_sgd", "optimizer.k=100000"])
    small = [word for word in SMALL if not word.startswith("model.hidden")]
    with pytest.raises(InputError, match=r"data.batch_size=32, but layer 1 takes statistics over a batch"):
        parts_of([*small, "optimizer=gd", "model=cnn", "model.width=4"])
    parts_of([*small, "optimizer=gd", "model=cnn", "model.width=4", "data.batch_size=200"])


def test_a_penalty_that_cannot_work_on_the_input_says_so_before_training() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    x, y = 9 * torch.rand(60, 3, 2, 2), torch.arange(60) % 3
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputError, match="pixels"):
        metacal.fit(model, (x, y), method="calmo", epochs=1, progress=False, pixels=([0.0] * 3, [1.0] * 3))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))


def test_fit_knows_gradient_descent_and_refuses_settings_of_another_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    x, y = torch.rand(60, 3, 2, 2), torch.arange(60) % 3
    fit = metacal.fit(model, (x, y), method="focal", epochs=3, progress=False, overrides=["optimizer=gd"], batch_size=7)
    assert fit.history[-1]["step"] == 3
    assert repr(fit).startswith("Fit(method=focal, best epoch ") and len(repr(fit)) < 100
    assert torch.equal(fit.predict_proba(x[:5].numpy()), fit.predict_proba(x[:5]))
    for keys, match in (
        ({"optimizer": torch.optim.Adam}, "optimizer must be the name of one, or a torch.optim.Optimizer over"),
        ({"overrides": ["epochs=3"]}, "epochs: it is an argument of metacal.fit"),
        ({"overrides": "optimizer.lr=0.05"}, "overrides must be a list of words"),
    ):
        with pytest.raises(InputError, match=match):
            metacal.fit(model, (x, y), progress=False, **keys)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"cannot hold optimizer.lr beside an optimizer of your own"):
        metacal.fit(model, (x, y), epochs=1, progress=False, optimizer=own, overrides=["optimizer.lr=0.5"])
