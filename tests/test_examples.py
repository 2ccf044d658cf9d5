"""Every file of examples/ runs, and does what it says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from layernorm_cli import layer_norm

EXAMPLES = Path(__file__).parent.parent / "examples"
GPT2 = Path(__file__).parent / "data" / "gpt2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


def run(command: list[str], folder: Path, variables=None, **options) -> bytes:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environ = {**os.environ, **(variables or {}), "PATH": path}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, check=True, **options
    ).stdout


def test_every_script_is_tested_here():
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    tested_with_a_cluster = {"dask.sh"}  # in test_dask.py
    assert scripts - tested_with_a_cluster == {"folder.sh", "normalize.py", "pipe.sh", "slurm.sh"}


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


@pytest.fixture
def activations(folder: Path) -> dict[str, np.ndarray]:
    """acts/, a file for each sequence that went into h.0.ln_1 of a trained GPT-2; its output by name."""
    tensors = load_file(GPT2 / "activations.safetensors")
    (folder / "acts/more").mkdir(parents=True)
    names = ["acts/0.npy", "acts/more/1.npy"]
    for name, x in zip(names, tensors["h.0.ln_1.input"], strict=True):
        np.save(folder / name, x)
    return dict(zip(["0.npy", "more/1.npy"], tensors["h.0.ln_1.output"], strict=True))


def manifest(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_folder(folder: Path, activations: dict[str, np.ndarray]):
    command = ["sh", "folder.sh", "acts", str(GPT2 / "norms.safetensors"), "h.0.ln_1", "out"]
    assert "out: 2 files" in run(command, folder).decode()
    for name, torchs in activations.items():
        np.testing.assert_allclose(np.load(folder / "out" / name), torchs, rtol=1e-5, atol=1e-6)
    run(command, folder)
    assert manifest(folder / "out.jsonl")[-1]["summary"]["skipped"] == 2


def test_slurm(folder: Path, activations: dict[str, np.ndarray]):
    """The tasks of an array job, one of them twice; without Slurm, by what it sets."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    options = ["--params", str(GPT2 / "norms.safetensors"), "--site", "h.0.ln_1"]
    array = {"MIN": "1", "MAX": "8", "STEP": "1", "COUNT": "8"}
    for task in ("1", "2", "2", "8"):
        variables = {f"SLURM_ARRAY_TASK_{name}": value for name, value in {**array, "ID": task}.items()}
        run(["bash", "slurm.sh", "acts", "out", *options], folder, variables)
    for name, torchs in activations.items():
        np.testing.assert_allclose(np.load(folder / "out" / name), torchs, rtol=1e-5, atol=1e-6)
    counts = {task: manifest(folder / f"out.{task}.jsonl")[-1]["summary"] for task in ("1", "2", "8")}
    assert [counts[task]["files"] for task in ("1", "2", "8")] == [1, 1, 0]
    assert (counts["1"]["done"], counts["2"]["skipped"]) == (1, 1)
