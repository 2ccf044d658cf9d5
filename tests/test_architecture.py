"""The house: who imports whom, what starts fast, the same names everywhere, examples that run."""

import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import typer.main
from conftest import BASH, COMMAND, environment
from safetensors.numpy import save_file

import layernorm_cli
from layernorm_cli.cli.main import app

TESTS = Path(__file__).parent
PACKAGE = Path(layernorm_cli.__file__).parent
COMMANDS = typer.main.get_command(app).commands


def modules(folder):
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_import_contracts():
    pytest.importorskip("importlinter")
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [script, "--no-cache"],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", done.stdout)


IMPORTS = {"typer": {"cli"}, "rich": {"cli", "reports"}, "fsspec": {"tensorfiles"}}


@pytest.mark.parametrize("package", IMPORTS)
def test_who_imports_what(package):
    importing = re.compile(rf"^\s*(import|from) {package}\b", re.MULTILINE)
    places = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if importing.search(path.read_text(encoding="utf-8"))
    }
    assert places <= IMPORTS[package]


def imported_by(code, *packages):
    """Which of the packages a fresh process has imported after this code."""
    report = "atexit.register(lambda: print(json.dumps(sorted(sys.modules))))"
    script = f"import atexit, json, sys; {report}; {code}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment(), check=False
    )
    return set(json.loads(done.stdout.splitlines()[-1])) & set(packages)


HEAVY = ("numpy", "rich", "ml_dtypes", "safetensors", "typer", "torch", "numba", "jax", "onnxruntime")
RUN = "sys.argv = ['layernorm', *{}]; from layernorm_cli.cli.main import main; main()"


def test_importing_the_package_imports_nothing():
    assert imported_by("import layernorm_cli", *HEAVY) == set()


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["nosuch"], ["apply", "--help"]], ids=" ".join
)
def test_no_numpy_before_there_is_work(arguments):
    assert imported_by(RUN.format(arguments), *HEAVY) == {"typer"}


def test_apply_imports_only_what_it_needs(here):
    np.save("x.npy", np.ones((3, 4), "f4"))
    assert imported_by(RUN.format(["apply", "x.npy"]), *HEAVY) == {"typer", "numpy"}


def test_each_command_has_its_files():
    helpers = {"main", "options", "terminal"}
    assert modules(PACKAGE / "cli") - helpers == set(COMMANDS)
    assert modules(PACKAGE / "tasks") - {
        "apply_sites",
        "batch_dask",
        "batch_inputs",
        "batch_plan",
        "file_job",
        "file_parts",
        "row_table",
        "site_pairs",
        "stated_norm",
    } == set(COMMANDS)
    tests = {name.removeprefix("test_") for name in modules(TESTS / "cli") if name.startswith("test_")}
    assert tests - {"main"} == set(COMMANDS)


@pytest.mark.parametrize("folder", ["norm", "tensorfiles", "checkpoints", "cli", "reports", "backends"])
def test_tests_mirror_the_package(folder):
    tested = {name.removeprefix("test_") for name in modules(TESTS / folder) if name.startswith("test_")}
    if folder in ("norm", "tensorfiles"):
        assert tested == modules(PACKAGE / folder)
    elif folder == "backends":
        assert tested
    else:
        assert tested <= modules(PACKAGE / folder)


def public_modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("layernorm_cli", *path.relative_to(PACKAGE).with_suffix("").parts))
        if path.stem != "__main__" and "layernorm_cli.backends." not in name:
            yield name.removesuffix(".__init__")


@pytest.mark.parametrize("name", list(public_modules()))
def test_all_names_exist_and_modules_say_what_they_are(name):
    module = import_module(name)
    assert module.__doc__
    for public in getattr(module, "__all__", ()):
        getattr(module, public)


@pytest.fixture
def example_files(here):
    """The files that the examples name."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (6, 8)).astype("f4")
    np.save("x.npy", x)
    np.save("gamma.npy", x[0])
    np.save("beta.npy", x[1])
    np.save("dy.npy", x[::-1].copy())
    (here / "acts").mkdir()
    np.save("acts/x.npy", x)
    np.save("normalized.npy", layernorm_cli.layer_norm(x, x[0], x[1]).astype("f4"))
    save_file({"h.0.ln_1.input": x, "h.0.ln_1.output": x}, "acts.safetensors")
    save_file({"ln_f.weight": x[0], "ln_f.bias": x[1]}, "model.safetensors")
    return here


EXAMPLES = [
    line for name in sorted(COMMANDS) for line in import_module(f"layernorm_cli.cli.{name}").EXAMPLES
]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] if line.startswith("layernorm bench") else [])
        for line in EXAMPLES
    ],
)
def test_examples_of_the_help_run(line, example_files):
    if BASH is None:
        pytest.skip("no bash")
    script = line.replace("layernorm", shlex.quote(COMMAND), 1)
    done = subprocess.run(
        [BASH, "-o", "pipefail", "-c", script], capture_output=True, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    if " y.npy" in line:
        assert np.load("y.npy").shape == (6, 8)
    assert bool(done.stdout) == ("-o -" not in line)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_help_ends_with_its_examples(name, main):
    examples = import_module(f"layernorm_cli.cli.{name}").EXAMPLES
    assert 2 <= len(examples) <= 3
    lines = main(name, "--help").out.rstrip("\n").splitlines()
    assert [line.strip() for line in lines[-len(examples) :]] == list(examples)
