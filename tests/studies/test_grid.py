"""Grids from words: which runs they make, in which folders, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metacal.config.compose import compose, config_dir
from metacal.config.files import read_yaml
from metacal.errors import InputError
from metacal.runs.naming import folder_of
from metacal.studies import measured
from metacal.studies.grid import expand, grid_jobs, load_study, study_names
from metacal.studies.spec import read_spec


def test_expand_is_the_product_with_the_last_key_fastest():
    found = expand(["method=focal,cross_entropy", "epochs=1", "seed=range(0,2)"])
    assert [words for words, _ in found] == [
        ("method=focal", "epochs=1", "seed=0"),
        ("method=focal", "epochs=1", "seed=1"),
        ("method=cross_entropy", "epochs=1", "seed=0"),
        ("method=cross_entropy", "epochs=1", "seed=1"),
    ]
    assert found[1][1] == {"method": "focal", "seed": "1"}


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optimizer.lr=0.1,1e-3", ["0.1", "0.001"]),
        ("optimizer.lr=choice(0.1,0.2)", ["0.1", "0.2"]),
        ("seed=range(1,7,2)", ["1", "3", "5"]),
        ("optimizer.betas=[0.9,0.99],[0.9,0.999]", ["[0.9,0.99]", "[0.9,0.999]"]),
        ("meta.objective={sece: 1.0, nll: 0.1},sece", ["{sece:1.0,nll:0.1}", "sece"]),
        ("model=glob(resnet2*)", ["resnet20"]),
        ("data.path=a.npz,b.npz", ["a.npz", "b.npz"]),
    ],
)
def test_expand_takes_hydras_grammar(word, values):
    key = word.split("=")[0]
    assert [swept[key] for _, swept in expand([word])] == values


@pytest.mark.parametrize("word", ["epochs=3", "baselines=[a,b]", "meta.objective={sece: 1.0, nll: 0.1}", "name='a,b'"])
def test_expand_leaves_single_values_as_they_stand(word):
    assert expand([word]) == [((word,), {})]


def test_expand_takes_a_path_with_grammars_signs_as_one_value(tmp_path):
    file = tmp_path / "a,b.npz"
    file.write_bytes(b"")
    for word in (f"data.path={file}", "data.path=runs/lr=1,x=2/seed0.npz"):
        assert expand([word]) == [((word,), {})]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_expand_makes_every_combination_once(sizes):
    keys = [f"k{i}" for i in range(len(sizes))]
    found = expand([f"{key}={','.join(map(str, range(n)))}" for key, n in zip(keys, sizes)])
    assert [tuple(int(w.split("=")[1]) for w in words) for words, _ in found] == list(
        itertools.product(*map(range, sizes))
    )
    assert all(set(swept) == {key for key, n in zip(keys, sizes) if n > 1} for _, swept in found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=interval(0,1)"], "no finite list"),
        (["seed=range(0)"], "no values"),
        (["seed=0,,1"], "seed=0,,1"),
        (["seed=0,1", "optimizer.lrr=1"], "did you mean 'optimizer.lr'"),
        (["method=focal,focl"], "did you mean 'focal'"),
        (["seed=0,-1"], "seed"),
        (["seed=0,1", "optimizer.lr=0.1,-1"], "optimizer.lr"),
        (["seed=0,1", "run_dir=here"], "run_dir"),
        (["seed=0,1", "baselines=[focal]"], "baselines"),
        (["seed=0,1", "threads=1,2"], "threads cannot be swept over"),
    ],
)
def test_bad_words_are_refused_whole(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        grid_jobs(words)
    assert not list(tmp_path.iterdir())


def test_jobs_are_those_of_the_single_commands():
    jobs = grid_jobs(["method=focal,cross_entropy", "seed=0,3", "epochs=2", "optimizer.lr=0.1,0.2"])
    assert len(jobs) == 8
    for job in (jobs[0], jobs[3], jobs[7]):
        alone = compose(job.words)
        assert job.config == alone
        assert job.folder.path == folder_of(alone, job.words).path
    assert jobs[-1].title == "method=cross_entropy seed=3 optimizer.lr=0.2"
    assert jobs[-1].folder.path == Path("runs/default/cross_entropy,epochs=2,optimizer.lr=0.2/seed3")


def test_a_config_file_is_where_a_grid_can_start(tmp_path):
    from metacal.config.compose import to_yaml

    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(compose(["method=focal", "epochs=7"])))
    jobs = grid_jobs(["gamma.value=1,2"], str(file))
    assert [(j.config.epochs, j.config.gamma.value) for j in jobs] == [(7, 1.0), (7, 2.0)]
    assert len({j.folder.path for j in jobs}) == 2


def test_a_run_of_another_config_in_the_folder_is_refused(tmp_path):
    from metacal.config.compose import to_yaml

    words = [f"runs={tmp_path}", "method=focal", "seed=0,1"]
    folder = grid_jobs(words)[0].folder
    folder.path.mkdir(parents=True)
    folder.config.write_text(to_yaml(compose(["method=focal", "data.batch_size=64"])))
    folder.summary.write_text("{}")
    with pytest.raises(InputError, match=r"another data\.batch_size"):
        grid_jobs(words)
    assert len(grid_jobs([*words, "overwrite=true"])) == 2


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gamma_net" else [pytest.mark.slow]) for n in study_names()]
)
def test_every_study_composes(name):
    study = load_study(name, words=["data=digits"])
    assert len({job.folder.path for job in study.jobs}) == len(study.jobs)
    assert all(job.title.startswith(job.label) for job in study.jobs)
    if study.report == "measured":
        measured.check(study)


def write_study(folder: Path, groups: str, more: str = "") -> str:
    file = folder / "mine.yaml"
    file.write_text(f"report: compare\ncommon: [epochs=1, model=mlp]\ngroups:\n{groups}{more}")
    return str(file)


def test_a_study_from_a_file_of_ones_own(tmp_path):
    groups = "  a: {words: [method=focal], sweep: {seed: [0, 1]}}\n  b: {sweep: {data.train_size: [200, null]}}\n"
    more = "variants:\n  long: {common: [epochs=5], groups: {b: {sweep: {seed: [7]}}}}\n"
    file = write_study(tmp_path, groups, more)
    study = load_study(file, words=["optimizer.lr=0.5"])
    assert study.command == f"metacal study {file} optimizer.lr=0.5" and study.report == "compare"
    assert [job.title for job in study.jobs] == [
        "a seed=0",
        "a seed=1",
        "b data.train_size=200",
        "b data.train_size=None",
    ]
    assert [job.config.data.train_size for job in study.jobs[2:]] == [200, None]
    assert all(job.config.epochs == 1 and job.config.name == "mine" for job in study.jobs)
    assert study.folder == Path("runs/mine/report")
    long = load_study(file, "long", ["name=a b"])
    assert [(job.config.epochs, job.config.seed) for job in long.jobs] == [(5, 0), (5, 1), (5, 7)]
    assert long.folder == Path("runs/a b/report") and long.command.endswith("variant=long 'name=a b'")


@pytest.mark.parametrize(
    ("groups", "words", "message"),
    [
        (
            "  f2: {words: [method=focal, gamma.value=2]}\n",
            ["gamma.value=3"],
            "gamma.value=3 cannot be given.* gamma.value=2 .*'f2'",
        ),
        ("  f2: {sweep: {seed: [0, 1]}}\n", ["seed=3"], "the study sweeps over seed"),
        ("  a: {words: [threads=1]}\n  b: {words: [threads=2]}\n", [], "two groups need other words.* a and b would"),
        ("  a: {sweep: {threads: [1, 2]}}\n", [], "threads cannot be swept over: a threads=1 and a threads=2"),
        ("  a: {words: [seed=1]}\n", ["baselines=[focal]"], "are for one run"),
    ],
)
def test_a_study_refuses_words_that_mix_its_groups(groups, words, message, tmp_path):
    with pytest.raises(InputError, match=message):
        load_study(write_study(tmp_path, groups), words=words)
    same = ["gamma.value=2"] if "gamma" in groups else []
    if same:
        assert load_study(write_study(tmp_path, groups), words=same).jobs[0].config.gamma.value == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("report: [", "mine.yaml cannot be read"),
        ("- a list", "mine.yaml must be a mapping"),
        ("report: compar\ngroups: {a: {}}", "did you mean 'compare'"),
        ("report: compare", "must have groups"),
        ("report: compare\ngroups: {a: {}}\nvariant: {}", "did you mean 'variants'"),
        ("report: compare\ngroups: {a: {word: [x=1]}}", "groups: a must be one of words, sweep"),
        ("report: compare\ngroups: {a: null}", "groups: a must be a mapping"),
        ("report: compare\ngroups: {1: {}}", "a label must be text, got 1"),
        ("report: compare\ngroups: {a: {words: focal}}", "a: words must be a list of key=value words, got 'focal'"),
        ("report: compare\ngroups: {a: {sweep: {seed: 3}}}", "a: sweep must map each key to a list"),
        ("report: compare\ngroups: {a: {}}\nvariants: {x: {common: [epochs]}}", "variants: x: common must be a list"),
        ("report: compare\ngroups: {a: {}}\nvariants: [x]", "variants must be a mapping"),
        ("report: compare\ngroups: {abc: {}}\nchoices: {x: [abd]}", "did you mean 'abc'"),
        ("report: compare\ngroups: {a: {}}\nchoices: [a]", "choices must map labels"),
        ("report: compare\ngroups: {a: {}}\nvariants: {x: {leave_out: a}}", "leave_out must be a list"),
    ],
)
def test_a_file_that_is_no_study_is_refused(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_study(str(file))


def test_a_study_file_that_does_not_exist(tmp_path):
    with pytest.raises(InputError, match=r"missing\.yaml does not exist"):
        load_study(str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize("name", study_names())
def test_every_study_of_the_package_can_be_read(name):
    spec = read_spec(config_dir() / "study" / f"{name}.yaml")
    assert spec["groups"]
    for variant in read_yaml(config_dir() / "study" / f"{name}.yaml").get("variants", {}):
        assert read_spec(config_dir() / "study" / f"{name}.yaml", variant)["groups"]
