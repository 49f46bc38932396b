"""Scripts: setup.sh with an interpreter that writes down what it is asked to do; benchmarks, that they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INTERPRETER = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *find_spec*) exit "$LACKS_TORCH" ;;
    *pytorch.org*) exit "$OFFLINE" ;;
esac
"""


@pytest.mark.skipif(os.name != "posix" or os.uname().sysname != "Linux", reason="CPU builds are Linux's")
@pytest.mark.parametrize("offline", [0, 1])
def test_a_machine_without_gpu_gets_the_cpu_build_or_hears_why_not(tmp_path: Path, offline: int) -> None:
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")) or shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "setup.cfg").touch()
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(INTERPRETER)
    python.chmod(0o755)

    def set_up(**extra: str) -> tuple[str, list[str]]:
        log.write_text("")
        settings = {"PYTHON": str(python), "LOG": str(log), "OFFLINE": str(offline), "LACKS_TORCH": "1", "PIP_ARGS": ""}
        environment = os.environ | settings | extra
        command = [str(tmp_path / "scripts" / "setup.sh"), "train"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout, [line for line in log.read_text().splitlines() if "install" in line]

    said, installs = set_up()
    assert "https://download.pytorch.org/whl/cpu torch torchvision" in installs[0]
    assert installs[1:] == [f"-m pip install -qq -e {tmp_path}[train]"]
    assert ("cannot be reached" in said) == bool(offline)
    assert set_up(LACKS_TORCH="0")[1] == [], "all was done before"
    (tmp_path / ".venv" / ".metacal-train").unlink()
    assert set_up(LACKS_TORCH="0")[1] == installs[1:], "PyTorch is there already"
    (tmp_path / ".venv" / ".metacal-train").unlink()
    assert set_up(PIP_ARGS="--no-index")[1] == [f"-m pip install -qq --no-index -e {tmp_path}[train]"]


def test_the_benchmark_of_a_device_runs_on_a_cpu() -> None:
    script = ROOT / "scripts" / "benchmarks" / "device.py"
    command = [sys.executable, str(script), "--device", "cpu", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, _, *rows = done.stdout.splitlines()
    assert [row.split(" | ")[2] for row in rows[-4:]] == [
        "eager plain",
        "eager gamma_net",
        "eager metacal",
        "eager calmo",
    ]
    assert all(float(row.split(" | ")[4]) > 0 for row in rows if "higher" not in row)
