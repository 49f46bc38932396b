"""The command line: exit statuses, one-line errors, a quick start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from metacal.cli import main


def test_help_and_import_need_no_torch():
    code = (
        "import sys; from metacal.cli import main; main(['--help']); main(['list', 'methods']);"
        "import metacal; metacal.InputError;"
        "sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "metacal train" in done.stdout and "Plain cross-entropy." in done.stdout


def test_too_little_memory_to_import_is_one_line():
    resource = pytest.importorskip("resource")
    limit = 300 * 2**20

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    command = [sys.executable, "-m", "metacal", "train", "epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "may use 0.3 GiB of addresses (ulimit -v)" in done.stderr


def test_train_help_lists_groups_and_keys(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("method: ", "gamma_net", "optimizer: ", "adamw", "bandwidth", "resume=RUN"):
        assert word in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "did you mean 'train'?"),
        (["train", "optimizer.lrr=1"], "did you mean 'optimizer.lr'?"),
        (["train", "-m", "seed=0,1", "optimizer.lrr=1"], "did you mean 'optimizer.lr'?"),
        (["train", "method=0"], "method must be one of adafocal, brier"),
        (["train", "-m", "seed=0,1", "data=1"], "data must be one of cifar10"),
        (["train", "--cfg", "job", "monitor=true"], "monitor must be one of full, light, off, got 'true'"),
        (["train", "optimizer=null"], "optimizer must be one of adam"),
        (["train", "model=[a]"], "model must be one of cnn"),
        (["train", "data=../x"], "data must be one of cifar10"),
        (["train", "=3"], "one of =3 does not give it"),
        (["train", "--epochs", "3"], "did you mean epochs=3?"),
        (["train", "--multirum"], "--multirum is no flag of metacal train"),
        (["train", "--gama.max=3"], "did you mean 'gamma.max'?"),
        (["train", "--lr=0.1"], "did you mean optimizer.lr=0.1?"),
        (["train", "baselines=[focl]"], "did you mean 'focal'?"),
        (["train", "resume=nowhere"], "nowhere does not exist"),
        (["train", "missing.yaml"], "missing.yaml does not exist"),
        (["train", "device=tpu"], "device 'tpu' cannot be used"),
        (["train", "data=npz"], "data.path"),
        (["train", "model.width=3"], "width"),
        (["list", "method"], "(did you mean 'methods'?)"),
        (["show", "nowhere"], "run folder nowhere does not exist"),
        (["evaluate"], "required"),
        (["evaluate", "nowhere"], "nowhere does not exist"),
        (["evaluate", "."], "is no run folder"),
        (["evaluate", "--n-bins", "0", "."], "--n-bins must be >= 1, got 0"),
    ],
)
def test_bad_input_is_status_2_and_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.rglob("config.yaml"))


def test_version(capsys):
    import metacal

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"metacal {metacal.__version__}\n"


def test_public_names_exist():
    import metacal

    for name in metacal.__all__:
        assert getattr(metacal, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = metacal.nonsense


def test_a_warning_of_the_package_is_one_line(capfd):
    import metacal.cli

    home = metacal.cli.__file__
    metacal.cli._show("rests on 4 wrong predictions", UserWarning, home, 3)
    assert capfd.readouterr().err == "metacal: rests on 4 wrong predictions\n"
    metacal.cli._show("deprecated", DeprecationWarning, "/elsewhere/file.py", 3)
    assert "/elsewhere/file.py:3: DeprecationWarning: deprecated" in capfd.readouterr().err
