"""layernorm batch on a Dask cluster: a scheduler and two workers in processes on loopback."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    COMMAND,
    TIMEOUT,
    assert_refused,
    environment,
    group_has_ended,
    sparse_npy,
    wait_until,
)
from servers import free_port, process_on

pytestmark = [
    pytest.mark.dask,
    pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="no Dask"),
]
DASK = (sys.executable, "-m", "distributed.cli.dask_scheduler")
WORKER = (sys.executable, "-m", "distributed.cli.dask_worker")


def quiet():
    """Dask warns of much of its own."""
    return {name: value for name, value in environment().items() if name != "PYTHONWARNINGS"}


@contextlib.contextmanager
def worker(address, folder):
    process = subprocess.Popen(
        [*WORKER, address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1"],
        cwd=folder,
        env=quiet(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT)


@pytest.fixture
def cluster(here, tmp_path_factory):
    """The address of a scheduler, and its two workers."""
    elsewhere = tmp_path_factory.mktemp("cluster")
    port = free_port()
    command = [*DASK, "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    address = f"tcp://127.0.0.1:{port}"
    with (
        process_on(port, *command, cwd=elsewhere, env=quiet()),
        worker(address, here) as one,
        worker(address, here) as other,
    ):
        yield address, (one, other)


@pytest.fixture
def files(here):
    """Forty small files, a bad one, and a large one; out-here is what is made of them locally."""
    os.mkdir("in")
    for number in range(40):
        np.save(f"in/{number}.npy", np.random.default_rng(number).normal(0, 1, (50, 96)).astype("f4"))
    Path("in/bad.npy").write_bytes(b"no tensor")
    sparse_npy("in/large.npy", (1 << 17, 256))  # 134 MB: in two parts
    done = subprocess.run(
        [COMMAND, "batch", "in", "-o", "out-here", "--threads", "1"],
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 5
    return here


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.parent.name != ".layernorm-batch"
    }


def manifest(text):
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["input"]: line for line in lines[:-1]}, lines[-1]["summary"]


def test_the_same_bytes_manifest_and_exit_code(layernorm, cluster, files):
    address, _ = cluster
    batch = ("batch", "in", "-o", "out", "--engine", "dask", "--scheduler", address)
    run = layernorm(*batch, PYTHONWARNINGS="default")
    assert run.code == 5, run.err
    assert "1 of 42 files failed; the first is in/bad.npy" in run.err
    lines, summary = manifest(run.out)
    assert (summary["done"], summary["failed"], summary["files"]) == (41, 1, 42)
    assert lines["in/large.npy"]["rows"] == 1 << 17
    assert lines["in/large.npy"]["bytes"] == 1 << 27
    assert "in/bad.npy" in lines["in/bad.npy"]["error"]
    assert tree("out") == tree("out-here")
    _, summary = manifest(layernorm(*batch, "--resume", PYTHONWARNINGS="default").out)
    assert summary["skipped"] == 41
    _, summary = manifest(layernorm("batch", "in", "-o", "out", "--resume").out)
    assert summary["skipped"] == 41  # who made the outputs does not matter


def test_a_worker_is_killed_in_mid_run(cluster, files):
    address, (victim, _) = cluster
    command = [COMMAND, "batch", "in", "-o", "out", "--engine", "dask", "--scheduler", address]
    with open("m.jsonl", "wb") as out, open("errors", "wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=quiet())
        wait_until(lambda: len(tree("out")) >= 3, "some outputs", None)
        victim.send_signal(signal.SIGKILL)
        assert process.wait(TIMEOUT) == 5, Path("errors").read_text()
    lines, summary = manifest(Path("m.jsonl").read_text())
    assert (summary["done"], summary["failed"]) == (41, 1)
    assert len(lines) == 42
    assert tree("out") == tree("out-here")


def test_a_cluster_of_its_own(layernorm, files):
    os.unlink("in/bad.npy")
    run = layernorm(
        "batch", "in", "-o", "out", "--engine", "dask", "--jobs", "2", PYTHONWARNINGS="default"
    )
    assert run.code == 0, run.err
    expected = tree("out-here")
    assert tree("out") == expected


def test_interrupted(cluster, files):
    address, _ = cluster
    command = [COMMAND, "batch", "in", "-o", "out", "--engine", "dask", "--scheduler", address]
    with open("m.jsonl", "wb") as out, open("errors", "wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=quiet(), start_new_session=True)
        wait_until(lambda: len(tree("out")) >= 1, "an output", None)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    assert Path("errors").read_bytes() == b""
    assert group_has_ended(process.pid)
    run = subprocess.run([*command, "--resume"], env=quiet(), capture_output=True, check=False)
    assert run.returncode == 5
    assert tree("out") == tree("out-here")


def test_no_scheduler(layernorm, here):
    np.save("x.npy", np.ones((3, 4)))
    batch = ("batch", "x.npy", "-o", "out", "--engine", "dask", "--scheduler")
    for address, code, mention in (
        ("nonsense", 2, "tcp://HOST:PORT"),
        (f"tcp://127.0.0.1:{free_port()}", 3, "no scheduler answers"),
    ):
        run = layernorm(*batch, address, PYTHONWARNINGS="default")
        assert_refused(run._replace(created=set()), code, address, mention)


def test_the_example(cluster, files):
    address, _ = cluster
    example = Path(__file__).parent.parent / "examples" / "dask.sh"
    path = os.pathsep.join((str(Path(COMMAND).parent), os.environ["PATH"]))
    command = ["sh", str(example), "in", "out", address, "--exclude", "large.npy"]
    for status in ("done", "skipped"):
        run = subprocess.run(command, env={**quiet(), "PATH": path}, capture_output=True, check=False)
        assert run.returncode == 5, run.stderr  # of bad.npy
        _, summary = manifest(Path("out.jsonl").read_text())
        assert summary[status] == 40
    expected = tree("out-here")
    del expected["large.npy"]
    assert tree("out") == expected
