"""What importing costs: heavy packages are loaded by what uses them."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

from metacal.errors import EXTRAS

HEAVY = ("matplotlib", "sklearn", "scipy", "tensorboard", "torchvision", "higher")
CODE = f"""
import sys
import metacal
assert "torch" not in sys.modules and "hydra" not in sys.modules

def loaded(*names):
    return [name for name in names if name in sys.modules]

metacal.calibration.ece([[0.25, 0.75]], [1]), metacal.calibration.surrogates
assert not loaded("hydra", "omegaconf", "rich", *{HEAVY!r}), ("measuring", *sys.modules)
for name in metacal.__all__:
    getattr(metacal, name)
import metacal.training.run
assert not loaded(*{HEAVY!r}), ("training", *sys.modules)
import torch
metacal.report.reliability_diagram(metacal.Predictions.from_logits(torch.eye(3), torch.arange(3)))
assert loaded("matplotlib") and not loaded("matplotlib.pyplot"), ("drawing", *sys.modules)
"""


def test_the_whole_api_needs_none_of_the_heavy_packages() -> None:
    """Measuring needs no trainer either, and a figure that is drawn does not import pyplot."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BASE = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in {{name for names in {EXTRAS!r}.values() for name in names}}
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def without_extras(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code where no extra is installed."""
    return subprocess.run([sys.executable, "-c", BASE + code, *map(str, arguments)], capture_output=True, text=True)


def test_measures_steps_and_saved_models_need_no_extra(tmp_path: Path) -> None:
    import torch
    from torch import nn

    import metacal

    x, y = torch.randn(60, 4), torch.arange(60) % 3
    net = nn.Linear(4, 3)
    metacal.fit(net, (x, y), method="cross_entropy", epochs=1, progress=False).save(tmp_path / "model.pt")
    done = without_extras(
        "import torch, metacal\n"
        "x, y = torch.randn(60, 4), torch.arange(60) % 3\n"
        "model = metacal.load(sys.argv[1], torch.nn.Linear(4, 3))\n"
        "assert model.predict_proba(x).shape == (60, 3)\n"
        "print(metacal.evaluate(model, (x, y), resamples=20))\n"
        "metacal.calibration.scaling.IsotonicScaling\n"
        "net = metacal.Backbone(torch.nn.Linear(4, 3))\n"
        "gamma = metacal.GammaNet(net.in_features)\n"
        "step = metacal.MetaStep(net, torch.optim.SGD(net.parameters(), lr=0.1), gamma,\n"
        "                        torch.optim.Adam(gamma.parameters()), outer=metacal.calibration.surrogates.soft_ece)\n"
        "step.step(x, y, x, y)\n"
        "for name in metacal.__all__:\n"
        "    try:\n"
        "        getattr(metacal, name)\n"
        "    except ImportError as error:\n"
        "        print(name, error, file=sys.stderr)\n",
        tmp_path / "model.pt",
    )
    assert done.returncode == 0, done.stderr
    sentence = "needs hydra, which is not installed here: pip install 'metacal[train]'"
    assert set(done.stderr.splitlines()) == {f"{name} metacal.{name} {sentence}" for name in ("Fit", "fit")}


def test_a_command_names_the_extra_that_it_lacks() -> None:
    for command in ("train", "sweep", "study"):
        done = without_extras(f"from metacal.cli import main\nsys.exit(main([{command!r}, 'epochs=1']))")
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == (
            f"metacal: metacal {command} needs hydra, which is not installed here: pip install 'metacal[train]'\n"
        )


def test_extras_are_those_of_the_package() -> None:
    listed = configparser.ConfigParser()
    listed.read(Path(__file__).parents[1] / "setup.cfg")
    imported_as = {"hydra-core": "hydra omegaconf", "pillow": "PIL", "scikit-learn": "sklearn"}
    for extra, names in EXTRAS.items():
        lines = [re.split("[<>=]", line)[0] for line in listed["options.extras_require"][extra].split()]
        assert " ".join(imported_as.get(line, line) for line in lines).split() == list(names)


def test_training_says_what_it_loads_before_it_loads_it() -> None:
    code = "sys.modules['torch'] = None\nfrom metacal.cli import main\nmain(['train', 'seed=1', *sys.argv[1:]])"
    for words, said in (([], "metacal train: loading PyTorch for seed=1\n"), (["progress=false"], "")):
        done = subprocess.run([sys.executable, "-c", "import sys\n" + code, *words], capture_output=True, text=True)
        assert done.stdout == said and "torch" in done.stderr, done.stderr
