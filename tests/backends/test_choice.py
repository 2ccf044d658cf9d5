"""Which engine is used, which are refused, and what is imported for it."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import assert_refused, environment

from layernorm_cli import backends
from layernorm_cli.backends import ENGINES, all_engines, choose_engine, is_installed, load_prepare
from layernorm_cli.errors import MissingEngine, UsageError
from layernorm_cli.norm.dtypes import DTYPES

OTHERS = [name for name in ENGINES if name != "numpy"]
FOREIGN = ("numba", "torch", "onnx", "onnxruntime", "jax")


def asked_and_not_offered():
    for name, engine in ENGINES.items():
        for dtype in DTYPES:
            if ("integers" if "int" in dtype else dtype) not in engine.dtypes:
                yield name, "layer", dtype, "cpu"
        for device in ("cuda", "tpu"):
            if device not in engine.devices:
                yield name, "layer", "float32", device
        yield name, "batch", "float32", "cpu"


@pytest.fixture
def installed(monkeypatch):
    """Decides which engines' packages are there."""

    def only(*names):
        monkeypatch.setattr(backends, "is_installed", lambda engine: engine.package in ("numpy", *names))

    return only


@pytest.mark.parametrize(("name", "kind", "dtype", "device"), list(asked_and_not_offered()))
def test_what_is_not_offered_is_a_usage_error(name, kind, dtype, device):
    with pytest.raises(UsageError, match=f"backend {name}: cannot do ") as caught:
        load_prepare(name, ENGINES[name], kind, dtype, device)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_kind_not_offered(kind, monkeypatch, x, main):
    other = {"layer": "rms", "rms": "layer"}[kind]
    monkeypatch.setitem(ENGINES, "numpy", ENGINES["numpy"]._replace(kinds=(kind,)))
    assert main("apply", "x.npy", "--backend", "numpy", "--kind", kind).code == 0
    assert_refused(main("apply", "x.npy", "--backend", "numpy", "--kind", other), 2, other, kind)


@pytest.mark.parametrize("name", ["torch", "onnxruntime", "jax"])
def test_integers_not_offered(name, here, main, installed):
    np.save("x.npy", np.ones((2, 3), np.int16))
    installed(name)
    run = main("apply", "x.npy", "--backend", name)
    assert_refused(run, 2, name, "integers", "float32", "--backend numpy")


def test_device_not_offered(x, main):
    assert_refused(main("apply", "x.npy", "--backend", "numpy", "--device", "cuda"), 2, "cuda", "cpu")


@pytest.mark.torch
def test_cuda_where_torch_finds_none(x, main, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = main("apply", "x.npy", "--backend", "torch", "--device", "cuda")
    assert_refused(run, 2, "cuda", "--device cpu")


def test_unknown_engine(x, main):
    assert_refused(main("apply", "x.npy", "--backend", "nump"), 2, "'nump'", ", ".join(ENGINES))


@pytest.mark.parametrize("name", OTHERS)
def test_missing_package(name, x, main, installed):
    installed()
    with pytest.raises(MissingEngine):
        choose_engine(name, 1)
    run = main("apply", "x.npy", "--backend", name)
    assert_refused(run, 4, f"backend {name}: not installed", f"pip install 'layernorm[{name}]'")


def test_is_installed():
    assert is_installed(ENGINES["numpy"])
    assert not is_installed(ENGINES["numpy"]._replace(package="no_such_package"))


# auto


@pytest.mark.parametrize(
    ("packages", "elements", "expected"),
    [(["numba"], 99, "numpy"), (["numba"], 100, "numba"), (["torch", "jax"], 100, "numpy")],
)
def test_auto(packages, elements, expected, installed, monkeypatch):
    monkeypatch.setattr(backends, "AUTO_ELEMENTS", 100)
    installed(*packages)
    assert choose_engine("auto", elements) == (expected, ENGINES[expected])


@pytest.mark.parametrize(
    ("limit", "expected"), [(13, "numpy"), pytest.param(12, "numba", marks=pytest.mark.numba)]
)
def test_auto_counts_the_elements_of_x(limit, expected, x, main, monkeypatch):
    pytest.importorskip(expected)
    monkeypatch.setattr(backends, "AUTO_ELEMENTS", limit)
    assert main("apply", "x.npy", "--format", "json").json["backend"] == expected


# Engines of other packages


ENGINE_ROW = """
from layernorm_cli.backends import Engine
ENGINE = Engine("fake_engine.kernels", "fake_engine", kinds=("layer",), dtypes=("float32",))
"""
KERNELS = """
from layernorm_cli.norm.forward import row_kernel

def prepare(norm, width, device):
    kernel = row_kernel(norm, width)

    def sevens(x, y):
        stats = kernel(x, y)
        if y is not None:
            y[...] = 7
        return stats

    return sevens
"""


@pytest.fixture
def fake_distribution(tmp_path, monkeypatch):
    """A package that registers itself under these names."""

    def install(*names):
        site = tmp_path / "site"
        package, info = site / "fake_engine", site / "fake_engine-1.5.dist-info"
        package.mkdir(parents=True)
        info.mkdir()
        (package / "__init__.py").write_text(ENGINE_ROW)
        (package / "kernels.py").write_text(KERNELS)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_engine\nVersion: 1.5\n")
        points = "".join(f"{name} = fake_engine:ENGINE\n" for name in names)
        (info / "entry_points.txt").write_text(f"[layernorm_cli.backends]\n{points}")
        monkeypatch.syspath_prepend(site)

    yield install
    for name in ("fake_engine", "fake_engine.kernels"):
        sys.modules.pop(name, None)


def test_registered_engine_computes(fake_distribution, x, main):
    fake_distribution("fake")
    run = main("apply", "x.npy", "--backend", "fake", "-o", "y.npy", "--format", "json")
    assert run.json["backend"] == "fake"
    assert (np.load("y.npy") == 7).all()


def test_registered_engine_is_held_to_its_row(fake_distribution, x, main):
    fake_distribution("fake")
    assert_refused(
        main("apply", "x.npy", "--backend", "fake", "--kind", "rms"), 2, "fake", "rms", "layer"
    )


def test_registered_engine_is_listed(fake_distribution, main):
    fake_distribution("fake")
    infos = {info["backend"]: info for info in main("backends", "--format", "json").json["backends"]}
    assert infos["fake"]["version"] == "1.5"
    assert infos["fake"]["kinds"] == ["layer"]


def test_registered_engine_replaces_none_of_ours(fake_distribution):
    fake_distribution("numpy", "fake")
    assert all_engines()["numpy"] == ENGINES["numpy"]
    assert all_engines()["fake"].package == "fake_engine"


# Imports


APPLY = """
import sys
import layernorm_cli
import layernorm_cli.backends
from layernorm_cli.cli.main import main
sys.argv = ["layernorm", "apply", "x.npy", "--backend", {backend!r}, "-o", "y.npy"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(*sorted({{name.split(".")[0] for name in sys.modules}} & set({foreign!r})))
"""


def imported(backend):
    code = APPLY.format(backend=backend, foreign=FOREIGN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_numpy_imports_no_other_engine(backend, x):
    assert imported(backend) == []


@pytest.mark.onnx
def test_onnxruntime_imports_only_its_own(x):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert imported("onnxruntime") == ["onnx", "onnxruntime"]
