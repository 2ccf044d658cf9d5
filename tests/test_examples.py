"""Every file of examples/ runs, and does what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from layernorm_cli import layer_norm

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


def run(command: list[str], folder: Path, **options) -> bytes:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environ = {**os.environ, "PATH": path}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, check=True, **options
    ).stdout


def test_every_script_is_tested_here():
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert scripts == {"normalize.py", "pipe.sh"}


def test_normalize(folder: Path):
    lines = run([sys.executable, "normalize.py"], folder).decode().splitlines()
    assert lines[0] == "x float32 (2, 6, 8) -> y float64 (2, 6, 8)"
    assert len(lines) == 4
    for line in lines[1:]:
        mean, var = re.search(r"-> +mean +(\S+), var +(\S+)", line).groups()
        assert abs(float(mean)) < 1e-15
        assert float(var) == pytest.approx(1, abs=1e-5)


def test_pipe(folder: Path):
    output = run(["sh", "pipe.sh"], folder, input=(folder / "x.npy").read_bytes())
    (folder / "y.npy").write_bytes(output)
    x, gamma, beta = (np.load(folder / f"{name}.npy") for name in ("x", "gamma", "beta"))
    expected = layer_norm(x, gamma, beta, eps=1e-5).astype("f4")
    np.testing.assert_array_equal(np.load(folder / "y.npy"), expected)
