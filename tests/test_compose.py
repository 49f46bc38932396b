"""Configs: typed, checked before work, and a run's own config is a valid input."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from metacal.config.compose import compose, config_dir, to_yaml
from metacal.config.help import key_table, train_help
from metacal.config.schema import keys
from metacal.config.unread import check_read
from metacal.errors import InputError
from metacal.training.setup import build_objective


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lrr=1"], "unknown key 'optimizer.lrr' (did you mean 'optimizer.lr'?)"),
        (["optmizer=sgd"], "did you mean 'optimizer'?"),
        (["+foo=1"], "unknown key 'foo'"),
        (["~method"], "~method: a run needs a choice of the group method, which cannot be taken away"),
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
        (["method=gamma_net", "meta.engine=higher", "optimizer=adam"], "meta.engine=higher unrolls only sgd"),
        (["meta.inner_steps=3"], "meta.inner_steps > 1 needs meta.engine=higher"),
        (
            ["method=gamma_net", "meta.engine=higher", "meta.inner_steps=3"],
            "meta.inner_steps must be <= meta.every=1",
        ),
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
        (["method=gamma_net", "gamma.input=layer"], "gamma.layer names a module"),
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


def test_a_sum_of_terms_replaces_the_one_of_a_file(tmp_path):
    published = compose(["method=meta_calibration"])
    assert published.meta.objective == {"nll": 1.0, "dece": 0.5} and not published.data.meta_augment
    sum_of_two = "meta.objective={sece: 1, brier: {weight: 0.5}}"
    replaced = compose(["method=meta_calibration", sum_of_two])
    assert replaced.meta.objective == {"sece": 1, "brier": {"weight": 0.5}}
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(published))
    assert compose([sum_of_two], file).meta.objective == replaced.meta.objective
    assert compose(["meta.objective=sece"], file).meta.objective == "sece"


def test_a_proper_score_stands_beside_any_objective():
    def terms(*words):
        outer = build_objective(compose(words))
        return {name: (weight, keys) for name, (weight, _, keys) in outer.parts.items()}

    assert terms("meta=dece", "meta.n_bins=10", "meta.proper=nll", "meta.proper_weight=0.2") == {
        "dece": (1.0, {"n_bins": 10, "t_a": 100.0, "t_b": 0.01, "norm": "l1"}),
        "nll": (0.2, {}),
    }
    assert terms("meta.objective={mmce: 2, skce: 1}", "meta.proper=brier")["brier"] == (1.0, {})
    with pytest.raises(InputError, match=r"meta.proper=nll is in meta.objective already"):
        compose(["method=meta_calibration", "meta.proper=nll"])


def test_an_objective_that_is_chosen_takes_the_place_of_the_methods():
    assert compose([]).meta.objective == "confidence_gap" and compose([]).meta.squared
    assert compose(["meta=dece"]).meta.objective == "dece"
    assert compose(["method=metacal", "meta=dece", "meta.objective=nll"]).meta.objective == "nll"


def test_the_table_of_keys_in_the_docs_is_the_schemas():
    """`python -m metacal.config.help > docs/keys.md` writes it anew."""
    docs = Path(__file__).resolve().parents[1] / "docs"
    assert (docs / "keys.md").read_text() == key_table()


def test_help_has_a_line_for_every_key():
    lines = [line.split() for line in train_help().splitlines()]
    for key in keys():
        (line,) = [words for words in lines if words and words[0].startswith(f"{key}=")]
        assert len(line) > 1, key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=0.1"], "unknown key 'lr' (did you mean 'optimizer.lr' or 'meta.lr'?)"),
        (["model=resnet18"], "(did you mean 'model=torchvision/resnet18'?)"),
        (["loss=focal"], "did you mean method=focal or loss.name=focal?"),
        (["gamma=flsd"], "did you mean gamma.source=flsd?"),
        (["penalties.margin_tail=0.1"], "did you mean penalties.margin_tail.weight=0.1?"),
        (["epochs", "3"], "words must be group=name or key=value, got 'epochs' (did you mean epochs=…?)"),
        (["penalties.sece.bandwith=1"], "did you mean 'penalties.sece.bandwidth'?"),
        (["penalties.sece.bandwidth=0"], "penalties.sece.bandwidth must be > 0, got 0.0"),
        (["meta=dece", "meta.bandwidth=0.1"], "meta.bandwidth=0.1 is no setting of dece"),
        (["meta.objective={sece: 1, mmce: 1}", "meta.bandwidth=0.1"], "meta.bandwidth=0.1 could be of sece or mmce"),
        (
            ["optimizer=sam", "optimizer.base=adamm"],
            "optimizer.base must be one of sgd, adam, adamw, muon, got 'adamm'",
        ),
        (["schedule=constant", "schedule.final=0.1"], "schedule.final=0.1 is no setting of constant"),
    ],
)
def test_a_slip_gets_the_nearest_valid_word(words, message):
    with pytest.raises(InputError) as caught:
        compose(words)
    assert message in str(caught.value)


def test_a_part_brings_its_own_defaults_and_options():
    assert compose(["optimizer.name=muon"]).optimizer == compose(["optimizer=muon"]).optimizer
    around = compose(["optimizer=sam", "optimizer.base=adamw", "optimizer.eps=1e-6"]).optimizer
    assert (around.lr, around.eps, around.rho) == (1e-3, 1e-6, 0.05) and not hasattr(around, "momentum")
    config = compose(["meta.objective={sece: 1, dece: {weight: 2, n_bins: 5}}", "meta.bandwidth=0.1"])
    assert config.meta.bandwidth == 0.1 and not hasattr(config.meta, "norm")
    assert compose(["model=torchvision/resnet18"]).model.name == "torchvision/resnet18"


def test_a_config_of_an_older_version_is_the_same_config(tmp_path):
    """Its optimizer has the options of all of them, at their defaults; so have its gammas and its outer problem."""
    config = compose(["method=focal", "optimizer=adamw", "meta=nll"])
    old = yaml.safe_load(to_yaml(config))
    old["optimizer"] |= {"momentum": 0.9, "nesterov": False, "rest": "adamw", "rho": 0.05, "k": 1, "tolerance": 1e-3}
    old["gamma"] |= {"init": 1.0, "hidden": 32, "milestones": [], "n_bins": 15}
    old["meta"] |= {"bandwidth": 0.05, "self_term": True, "norm": "l1"}
    old["loss"] |= {"smoothing": 0.05, "beta": 0.1}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(old))
    assert compose([], file) == config
    assert compose(["optimizer.name=sgd"], file).optimizer.momentum == 0.9
    old["optimizer"]["momentum"] = 0.5
    file.write_text(yaml.safe_dump(old))
    with pytest.raises(InputError, match=r"optimizer\.momentum=0\.5 is no setting of adamw"):
        compose([], file)


@pytest.mark.parametrize(
    ("words", "reader"),
    [
        (["gamma.hidden=8"], "gamma.hidden would be ignored: nothing of this run reads it; it belongs to gamma.so"),
        (["method=cross_entropy", "meta.lr=0.1"], "it belongs to an outer problem, of gamma.source=scalar or curve or"),
        (["method=focal", "meta=brier"], "meta would be ignored"),
        (["method=cross_entropy", "gamma.value=3"], "it belongs to loss.name=adafocal or dual_focal or focal or"),
        (["method=brier", "loss.smoothing=0.1"], "it belongs to loss.name=label_smoothing"),
        (["penalties.sece.bandwidth=0.1"], "it belongs to penalties.sece.weight > 0"),
        (["meta.optimizer=sgd", "meta.beta1=0.4"], "it belongs to meta.optimizer=adam"),
        (["method=gamma_net", "meta.horizon_decay=0.5"], "it belongs to meta.horizon > 1 or meta.engine=tangent"),
        (["monitor.tolerance=0.1"], "it belongs to monitor.curvature=true"),
        (["monitor.robust_units=inputs"], "it belongs to monitor.robust_eps"),
    ],
)  # fmt: skip
def test_a_key_given_by_hand_has_a_reader(words, reader):
    with pytest.raises(InputError) as caught:
        check_read([(compose(words), words)])
    assert reader in str(caught.value)


def test_what_a_file_sets_and_what_some_run_of_a_grid_reads_may_go_unread():
    for words in (
        ["method=gamma_net", "gamma.source=scalar", "gamma.tau=0.2"],  # the method's gamma.hidden has no reader
        ["method=learned_smoothing", "meta.lr=0.1"],
        ["method=focal", "gamma.source=fixed", "penalties.sece.weight=0", "data.meta_from=val"],
        ["meta.objective={sece: 1, dece: {weight: 2, n_bins: 5}}", "penalties.mmce={weight: 1}", "monitor.every=0"],
    ):
        check_read([(compose(words), words)])
    shared = "meta.lr=0.1"
    runs = [(compose([f"method={method}", shared]), [shared]) for method in ("focal", "cross_entropy", "metacal")]
    check_read(runs)
    with pytest.raises(InputError, match=r"meta\.lr would be ignored: none of these runs reads it"):
        check_read(runs[:2])
