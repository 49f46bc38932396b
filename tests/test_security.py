"""Configs, studies and tables that somebody else made: nothing is called, fetched, or written elsewhere by them."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from metacal.cli import main
from metacal.config.compose import check_config_file, compose, to_yaml
from metacal.config.files import read_yaml
from metacal.errors import InputError
from metacal.report.tables import Column, Table
from metacal.runs.naming import folder_of
from metacal.studies.spec import read_spec

CALL = "{_target_: os.mkdir, path: %s}"


@pytest.mark.parametrize("name", ["../../x", "/abs", "a/../../b", "..", ".", "", "a//b", "..\\x", "a\nb"])
def test_a_name_does_not_lead_out_of_runs(name):
    config = compose(["method=focal"])
    config.name = name
    with pytest.raises(InputError, match=r"must name a folder inside runs=runs"):
        folder_of(config, ["method=focal"])
    config.name = "digits/first"
    assert folder_of(config, []).path == Path("runs/digits/first/focal/seed0")
    config.method = ".."  # of a config file
    with pytest.raises(InputError, match="must name a folder"):
        folder_of(config, [])


@pytest.mark.parametrize("how", [[], ["-m", "seed=0,1"], ["--cfg", "job"]])
@pytest.mark.parametrize(
    "lines",
    [
        ["hydra:", f"  callbacks: {{x: {CALL}}}"],
        ["hydra:", f"  launcher: {CALL}"],
        ["hydra:", f"  job_logging: {{version: 1, formatters: {{x: {CALL.replace('_target_', '()')}}}}}"],
        ["defaults:", "  - override hydra/launcher: joblib"],
        ["meta:", f"  objective: {CALL}"],
    ],
)
def test_a_config_file_cannot_have_anything_called(how, lines, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, made = tmp_path / "config.yaml", tmp_path / "made"
    file.write_text(to_yaml(compose([])) + "\n".join(lines).replace("%s", str(made)) + "\n")
    if lines[0] == "meta:":
        file.write_text("\n".join(lines).replace("%s", str(made)) + "\n")
    assert main(["train", str(file), *how]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not made.exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["+hydra.callbacks.x={_target_:os.getcwd}"],
        ["-m", "seed=0,1", "+hydra.callbacks.x._target_=os.getcwd"],
        ["+meta.objective._target_=os.getcwd"],
        ["hydra.run.dir=elsewhere"],
        ["--config-dir=elsewhere"],
        ["--config-name", "other"],
        ["--config-n=other"],
        ["--experimental-rerun=job.pickle"],
    ],
)
def test_words_cannot_either(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["${oc.env:SECRET}", "a${oc.env:SECRET,none}", "${${method}:SECRET}", "${oc.decode:1}"]
)
def test_nothing_is_fetched_from_the_environment(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "s3cret")
    for words in ([f"name={text}"], ["-m", "seed=0,1", f"name={text}"], [f"method={text}"], [f"data.path={text}"]):
        assert main(["train", *words]) == 2
    file = tmp_path / "config.yaml"
    file.write_text(f'method: focal\nname: "{text}"\n')
    assert main(["train", str(file)]) == 2
    captured = capsys.readouterr()
    assert "s3cret" not in captured.out + captured.err and captured.err.count("would look something up") == 5
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert compose(["seed=3", "data.split_seed=${seed}"]).data.split_seed == 3


BOMBS = {
    "aliases": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    "merges": "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
    "itself": "a: &a [*a]\n",
    "deep lists": "a: " + "[" * 60_000,
    "deep keys": "a: " + "{a: " * 16_000,
    "deep interpolations": "a: '" + "${" * 30_000 + "'",
    "long": "a: [" + "x, " * 10**7 + "x]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_yaml_bomb_is_refused_within_a_second(name, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(BOMBS[name])
    for read in (read_yaml, check_config_file, lambda file: compose([], file), read_spec):
        began = time.process_time()
        with pytest.raises(InputError) as caught:
            read(file)
        assert time.process_time() - began < 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["a: [1", "- a", "3", "a: 1\na: 2", "a: ${", "? {a: 1}\n: 2", "a: !!python/object/apply:os.getcwd []", "\xff", "="],
)
def test_files_that_are_no_mapping_are_one_line(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputError) as caught:
        read_yaml(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a: 1e-3\nb: [yes, 1_0, 0x1F, 2026-01-01, ~, .inf, 1:30, '1', '???']\nc: {d: {}, e: []}\nf: |\n  x\n",
        "a: &a {b: [1]}\nc: *a\nd: {<<: *a, e: 2}\n",
        'a: 1\nb: ${a}\nc: "\\x24{a}"\n',
        "1: a\n2.5: b\ntrue: c\n",
        "a: !!binary aGk=\n",
        "",
    ],
)
def test_a_file_is_read_as_omegaconf_reads_it(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    whole = OmegaConf.to_container(OmegaConf.load(file))
    read = read_yaml(file)
    assert repr(read) == repr({str(key): value for key, value in whole.items()})
    if "c" in read and "d" in read:  # an alias is a copy
        read["c"]["b"].append(2)
        assert read["a"] == {"b": [1]} == {"b": read["d"]["b"]}


def test_a_study_cannot_smuggle_flags(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("report: compare\ncommon: ['--config-dir=x']\ngroups: {a: {words: [method=focal]}}\n")
    with pytest.raises(InputError, match="must be a list of key=value words"):
        read_spec(file)


def test_text_in_csv_is_no_formula():
    columns = [Column("=1+1"), Column("value"), Column("text")]
    rows = [("@name", [-0.5, -0.25, "-0.5"]), ("+x", ["=HYPERLINK(1)", 1e-30, "\t=1"]), ("-2", ["-1e-3", 1.0, "a=b"])]
    table = Table(columns, rows, "-method")
    head, *body = csv.reader(io.StringIO(table.render("csv")))
    assert head == ["'-method", "'=1+1", "value", "text"]
    assert body == [
        ["'@name", "-0.5", "-0.25", "-0.5"], ["'+x", "'=HYPERLINK(1)", "1e-30", "'\t=1"], ["-2", "-1e-3", "1.0", "a=b"]
    ]  # fmt: skip
