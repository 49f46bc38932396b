"""Configs: typed, checked before work, and a run's own config is a valid input."""

from __future__ import annotations

import pytest

from metacal.config.compose import compose, config_dir, to_yaml
from metacal.errors import InputError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lrr=1"], "unknown key 'optimizer.lrr' (did you mean 'optimizer.lr'?)"),
        (["optmizer=sgd"], "did you mean 'optimizer'?"),
        (["+foo=1"], "unknown key 'foo'"),
        (["method=focl"], "did you mean 'focal'?"),
        (["optimizer=sdg"], "did you mean 'sgd'?"),
        (["loss.name=focl"], "loss.name must be one of"),
        (["meta.engine=forwrd"], "did you mean 'forward'?"),
        (["epochs=x"], "epochs: value 'x'"),
        (["epochs=0"], "epochs must be >= 1, got 0"),
        (["seed=0.5"], "seed: value '0.5'"),
        (["optimizer.lr=-0.1"], "optimizer.lr must be >= 0, got -0.1"),
        (["optimizer.lr=nan"], "optimizer.lr must be >= 0, got nan"),
        (["optimizer.momentum=1.5"], "optimizer.momentum must be in [0, 1], got 1.5"),
        (["optimizer=adamw", "optimizer.betas=[0.9,1.0]"], "optimizer.betas must be two numbers in [0, 1)"),
        (["optimizer.clip_norm=0"], "optimizer.clip_norm must be > 0, got 0.0"),
        (["optimizer.nesterov=true", "optimizer.momentum=0"], "optimizer.nesterov=true needs momentum > 0"),
        (["meta.bandwidth=0"], "meta.bandwidth must be > 0, got 0.0"),
        (["meta.lr=-1"], "meta.lr must be >= 0"),
        (["meta.engine=higher", "optimizer=adam"], "meta.engine=higher unrolls only sgd"),
        (["meta.inner_steps=3"], "meta.inner_steps > 1 needs meta.engine=higher"),
        (["meta.engine=higher", "meta.inner_steps=3"], "meta.inner_steps must be <= meta.every=1"),
        (["monitor.curvature=true"], "monitor.curvature needs monitor.every > 0"),
        (["monitor.certificate=8", "monitor.every=5"], "monitor.certificate needs monitor.curvature=true"),
        (["monitor=off", "monitor.every=5"], "monitor=off measures nothing"),
        (["meta.objective=[sece,nll]"], "meta.objective must be a name or {name: weight"),
        (["monitor.n_bins=0"], "monitor.n_bins must be >= 1, got 0"),
        (["method=focal", "gamma.source=step"], "gamma.values must hold one number"),
        (
            ["method=focal_schedule", "epochs=30", "gamma.milestones=[10,20]"],
            "gamma.milestones must be increasing fractions of the training in (0, 1), got [10.0, 20.0]; with epochs=30",
        ),
        (["gamma.init=60"], "gamma.init must be < gamma.max=50.0, got 60.0"),
        (["gamma.input=layer"], "gamma.layer names a module"),
        (["method=cross_entropy", "gamma.source=gamma_net"], "gamma.source=gamma_net needs a loss with a gamma"),
        (["schedule.milestones=[0.7,0.3]"], "schedule.milestones must be increasing"),
        (["noequals"], "noequals"),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(words, message):
    with pytest.raises(InputError) as caught:
        compose(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_written_like_yaml_strings_are_numbers():
    assert compose(["optimizer.lr=1e-3"]).optimizer.lr == 0.001


@pytest.mark.parametrize(
    "group", [p.name for p in config_dir().iterdir() if p.is_dir() and p.name not in ("study", "__pycache__")]
)
def test_every_choice_of_every_group_composes(group):
    for file in sorted((config_dir() / group).glob("*.yaml")):
        config = compose([f"{group}={file.stem}"])
        if group == "method":
            assert config.method == file.stem


def test_a_runs_own_config_is_a_valid_input(tmp_path):
    config = compose(["method=focal", "optimizer=adamw", "gamma.value=2", "meta.objective={sece:1,nll:0.5}"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert compose([], file) == config
    assert compose(["seed=7"], file).seed == 7
    with pytest.raises(InputError, match="chooses a group"):
        compose(["method=cross_entropy"], file)
    with pytest.raises(InputError, match="does not exist"):
        compose([], tmp_path / "none.yaml")
