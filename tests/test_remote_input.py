"""The installed command on files of other machines: the same results as from files here."""

import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import servers
from conftest import COMMAND, TIMEOUT, assert_refused, environment, wait_until
from safetensors.numpy import save_file

pytestmark = [
    pytest.mark.remote,
    pytest.mark.skipif(importlib.util.find_spec("fsspec") is None, reason="no fsspec"),
]
needs_moto = pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="no moto")

rng = np.random.default_rng(5)
X = rng.normal(3, 2, (5000, 768)).astype("<f4")
GAMMA, BETA = rng.normal(1, 1, (2, 768)).astype("<f4")


@pytest.fixture(autouse=True)
def files(here, monkeypatch):
    """x.npy, residual.npy, norms.safetensors; and no proxies."""
    for name in servers.NO_PROXIES:
        monkeypatch.delenv(name, raising=False)
    np.save("x.npy", X)
    np.save("residual.npy", X[::-1])
    norms = {"h.0.ln_1.weight": GAMMA, "h.0.ln_1.bias": BETA.astype(ml_dtypes.bfloat16)}
    save_file(norms, "norms.safetensors")
    return here


@pytest.fixture
def server(files):
    with servers.serving() as running:
        for path in files.iterdir():
            running.put(path.name, path.read_bytes())
        yield running


PARAMETERS = ("--gamma", "{}/norms.safetensors#h.0.ln_1.weight", "--beta", "{}/norms.safetensors#bias")


def parameters(place):
    return [option.format(place) for option in PARAMETERS]


@needs_moto
def test_https_and_s3_give_the_same_bits(layernorm, server, files):
    import fsspec

    with servers.s3() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("bucket")
        for path in files.iterdir():
            system.pipe_file(f"bucket/{path.name}", path.read_bytes())
        here = layernorm("apply", "x.npy", *parameters("."), "-o", "here.npy", "--format", "json")
        there = layernorm(
            "apply",
            f"{server.address}/x.npy",
            *parameters("s3://bucket"),
            *("-o", "there.npy", "--format", "json"),
        )
        s3 = layernorm("apply", "s3://bucket/x.npy", *parameters(server.address), "-o", "s3.npy", "-q")
    assert (here.code, there.code, s3.code) == (0, 0, 0), there.err + s3.err
    assert there.err == s3.err == ""
    written = (files / "here.npy").read_bytes()
    assert (files / "there.npy").read_bytes() == written
    assert (files / "s3.npy").read_bytes() == written
    assert there.json["table"] == here.json["table"]
    assert there.json["input"] == f"{server.address}/x.npy"
    assert there.json["gamma"] == "s3://bucket/norms.safetensors#h.0.ln_1.weight"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_threads_and_a_residual(layernorm, server, files, threads):
    residual = ("--residual", f"{server.address}/residual.npy")
    assert layernorm("apply", "x.npy", "--residual", "residual.npy", "-o", "a.npy", "-q").code == 0
    for x in ("x.npy", f"{server.address}/x.npy"):
        done = layernorm("apply", x, *residual, "-o", "b.npy", "-qf", "--threads", str(threads))
        assert (done.code, done.err) == (0, "")
        assert (files / "b.npy").read_bytes() == (files / "a.npy").read_bytes()


def test_hub(layernorm, server, files):
    server.always(servers.hub)
    there = {"HF_ENDPOINT": server.address, "HOME": str(files), "HF_HUB_DISABLE_TELEMETRY": "1"}
    place = "hf://org/repo@v1"
    done = layernorm("apply", f"{place}/x.npy", *parameters(place), "-o", "a.npy", "-q", **there)
    assert (done.code, done.err) == (0, "")
    assert layernorm("apply", "x.npy", *parameters("."), "-o", "b.npy", "-q").code == 0
    assert (files / "a.npy").read_bytes() == (files / "b.npy").read_bytes()
    spans = [asked for asked in server.asked if "/resolve/" in asked.target]
    assert all("range" in asked.headers for asked in spans)
    assert server.sent < X.nbytes + 500_000
    gone = layernorm("apply", f"{place}/gone.npy", **there)
    assert_refused(gone, 3, f"{place}/gone.npy: no such file", "hf auth login")
    nobody = layernorm("apply", "hf://org/nosuch/x.npy", **there)
    assert_refused(nobody, 3, "hf://org/nosuch/x.npy: no such file", "hf auth login")


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (servers.status(404), "no such file"),
        (servers.status(403), "access denied: 403 Forbidden"),
        (servers.without_ranges, "the server ignores range requests"),
        (servers.hangs_up, "the connection broke off, 3 times"),
        (servers.login_page, "an HTML page"),
    ],
    ids=["404", "403", "no ranges", "hangs up", "login page"],
)
def test_trouble_with_servers(layernorm, server, trouble, said):
    server.always(trouble)
    address = f"{server.address}/x.npy"
    assert_refused(layernorm("apply", address, "-o", "y.npy"), 3, f"{address}: {said}")
    assert_refused(layernorm("apply", "x.npy", "--gamma", address), 3, f"{address}: {said}")


def test_no_partial_output_where_a_server_dies(layernorm, server):
    server.once(None, None)
    server.troubles = iter([None, None, *[servers.breaks_off] * 100])
    done = layernorm("apply", f"{server.address}/x.npy", "-o", "y.npy")
    assert_refused(done, 3, "the connection broke off, 3 times")


def test_no_secret_is_printed_or_written(layernorm, server, files):
    address = f"{server.address}/x.npy?sig=hush".replace("//", "//me:secret@")
    for form in ("table", "json", "markdown"):
        done = layernorm("apply", address, "--eps", "0", "-o", "y.safetensors", "-f", "--format", form)
        assert done.code == 0
        for text in (done.stdout, done.stderr, (files / "y.safetensors").read_bytes()):
            assert b"secret" not in text
            assert b"hush" not in text


def test_without_the_extra(layernorm, files):
    (files / "fsspec.py").write_text("raise ImportError('no fsspec', name='fsspec')")
    done = layernorm("apply", "https://host/x.npy", PYTHONPATH=str(files))
    assert_refused(done, 4, "https://host/x.npy", "pip install 'layernorm[remote]'")


def test_files_here_need_no_fsspec(layernorm, files):
    (files / "fsspec.py").write_text("raise SystemError")
    done = layernorm("apply", "x.npy", "-q", PYTHONPATH=str(files))
    assert (done.code, done.err) == (0, "")


def test_interrupt_while_a_server_is_silent(server):
    server.always(servers.silent)
    process = subprocess.Popen(
        [COMMAND, "apply", f"{server.address}/x.npy"], env=environment(), stderr=subprocess.PIPE
    )
    wait_until(lambda: server.asked, "the first request", process)
    begun = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (130, b"")
    assert time.monotonic() - begun < 10


@pytest.fixture
def checkpoint(server):
    """A checkpoint of 64 MB on the server, its norms among large matrices, with a config."""
    tensors = {}
    for layer in range(12):
        tensors[f"h.{layer}.ln_1.weight"] = GAMMA
        tensors[f"h.{layer}.ln_1.bias"] = BETA
        tensors[f"h.{layer}.mlp.c_fc.weight"] = np.zeros((768, 1820), "f4")
    save_file(tensors, "large.safetensors")
    data = Path("large.safetensors").read_bytes()
    server.put("model/model.safetensors", data)
    server.put("model/config.json", b'{"model_type": "gpt2", "layer_norm_epsilon": 1e-6}')
    server.forget()
    return f"{server.address}/model", len(data)


@pytest.mark.parametrize("name", ["/model.safetensors", ""])
def test_inspect_fetches_the_norms_alone(name, checkpoint, server, layernorm):
    address, size = checkpoint
    done = layernorm("inspect", address + name, "--format", "json")
    assert (done.code, done.err) == (0, "")
    assert len(done.json["sites"]) == 12
    assert {site["eps"] for site in done.json["sites"]} == {1e-6}
    assert server.sent < 0.01 * size


def test_apply_with_a_site_from_afar(checkpoint, files, layernorm):
    address, _ = checkpoint
    done = layernorm("apply", "x.npy", "--params", address, "--site", "h.3.ln_1", "-o", "y.npy")
    assert (done.code, done.err) == (0, "")
    save_file({"ln.weight": GAMMA, "ln.bias": BETA}, "one.safetensors")
    refs = ("--gamma", "one.safetensors#ln.weight", "--beta", "one.safetensors#ln.bias")
    assert layernorm("apply", "x.npy", *refs, "--eps", "1e-6", "-o", "z.npy").code == 0
    assert (files / "y.npy").read_bytes() == (files / "z.npy").read_bytes()
