"""Outputs in an object store, by the installed command: seen when whole, known again when resumed."""

import importlib.util
import os
import signal
import subprocess

import numpy as np
import pytest
import servers
from conftest import COMMAND, TIMEOUT, assert_refused, environment, wait_until
from safetensors.numpy import save_file

pytestmark = [
    pytest.mark.remote,
    pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="no moto"),
]
X = np.random.default_rng(5).normal(3, 2, (40, 96)).astype("<f4")


@pytest.fixture(scope="module")
def store():
    """The variables that lead to a bucket."""
    with servers.s3() as variables:
        yield variables


@pytest.fixture
def system(store, here, monkeypatch):
    """The store as fsspec sees it, with a new empty bucket, called bucket."""
    import fsspec

    for name in servers.NO_PROXIES:
        monkeypatch.delenv(name, raising=False)
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    system = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    if system.exists("bucket"):
        system.rm("bucket", recursive=True)
    system.mkdir("bucket")
    return system


def names(system, place):
    system.invalidate_cache()
    return sorted(name.removeprefix(f"{place}/") for name in system.find(place))


def status(run):
    """The status of each input, as the manifest says."""
    import json

    lines = [json.loads(line) for line in run.out.splitlines()]
    return {line["input"].rpartition("/")[2]: line["status"] for line in lines[:-1]}


def test_apply(layernorm, system):
    np.save("x.npy", X)
    assert layernorm("apply", "x.npy", "-o", "y.npy", "-q").code == 0
    options = ("-o", "s3://bucket/a/y.npy", "--save-stats", "s3://bucket/a/stats.csv", "-q")
    run = layernorm("apply", "x.npy", *options)
    assert (run.code, run.err, run.created) == (0, "", set())
    assert names(system, "bucket") == ["a/stats.csv", "a/y.npy"]
    with open("y.npy", "rb") as file:
        assert system.cat_file("bucket/a/y.npy") == file.read()
    assert_refused(layernorm("apply", "x.npy", "-o", "s3://bucket/a/y.npy"), 2, "exists already")
    assert layernorm("apply", "x.npy", "-o", "s3://bucket/a/y.npy", "-qf", "--eps", "1").code == 0
    assert layernorm("apply", "s3://bucket/a/y.npy", "-q").code == 0


def test_an_upload_in_parts_is_whole(layernorm, system, monkeypatch):
    rows = np.random.default_rng(1).normal(0, 1, (30_000, 256)).astype("<f4")  # 30 MB
    np.save("x.npy", rows)
    assert layernorm("apply", "x.npy", "-o", "s3://bucket/y.npy", "-q").code == 0
    assert layernorm("apply", "x.npy", "-o", "y.npy", "-q").code == 0
    with open("y.npy", "rb") as file:
        assert system.cat_file("bucket/y.npy") == file.read()


def test_what_fails_leaves_nothing(layernorm, system):
    np.save("x.npy", X)
    with open("x.npy", "rb+") as file:
        file.truncate(2000)
    run = layernorm("apply", "x.npy", "-o", "s3://bucket/y.npy")
    assert_refused(run, 3, "truncated")
    np.save("x.npy", X)
    run = layernorm("apply", "x.npy", "-o", "s3://nosuchbucket/y.npy")
    assert_refused(run, 3, "s3://nosuchbucket/y.npy", "does not exist")
    run = layernorm("apply", "x.npy", "-o", "https://127.0.0.1/y.npy")
    assert_refused(run, 2, "nothing is written to such addresses")
    assert names(system, "bucket") == []


@pytest.fixture
def inputs(system):
    """in/a.npy, in/sub/b.npy, in/sub/c.safetensors, here and in the bucket, with what is not taken."""
    os.makedirs("in/sub")
    np.save("in/a.npy", X)
    np.save("in/sub/b.npy", X[:7])
    save_file({"x": X[::-1].copy(), "w": X[0]}, "in/sub/c.safetensors")
    system.put("in", "bucket/in", recursive=True)
    system.pipe_file("bucket/in/.hidden/d.npy", b"no")
    system.pipe_file("bucket/in/notes.txt", b"no")
    return ["a.npy", "sub/b.npy", "sub/c.safetensors"]


@pytest.mark.parametrize("source", ["in#x", "s3://bucket/in#x"])
def test_batch_gives_the_same_bytes(layernorm, system, inputs, source):
    assert layernorm("batch", "in#x", "-o", "here", "-q").code == 5  # npy files have no names in them
    run = layernorm("batch", source, "-o", "s3://bucket/out")
    assert run.code == 5
    assert names(system, "bucket/out") == ["sub/c.safetensors"]
    plain = source.removesuffix("#x")
    assert layernorm("batch", plain, "--exclude", "*.safetensors", "-o", "here", "-q").code == 0
    run = layernorm("batch", plain, "--exclude", "*.safetensors", "-o", "s3://bucket/out", "--jobs", "3")
    assert (run.code, run.err) == (0, "")
    assert names(system, "bucket/out") == inputs
    for name in inputs:
        with open(f"here/{name}", "rb") as file:
            assert system.cat_file(f"bucket/out/{name}") == file.read()


def test_resume(layernorm, system, inputs):
    batch = ("batch", "s3://bucket/in", "--exclude", "*.safetensors", "-o", "s3://bucket/out")
    assert status(layernorm(*batch)) == {"a.npy": "done", "b.npy": "done"}
    assert_refused(layernorm(*batch), 2, "exists already")
    assert status(layernorm(*batch, "--resume")) == {"a.npy": "skipped", "b.npy": "skipped"}
    system.put_file("in/sub/b.npy", "bucket/in/a.npy")
    assert status(layernorm(*batch, "--resume")) == {"a.npy": "done", "b.npy": "skipped"}
    system.rm_file("bucket/out/sub/b.npy")
    assert status(layernorm(*batch, "--resume")) == {"a.npy": "skipped", "b.npy": "done"}
    assert status(layernorm(*batch, "--resume", "--eps", "1")) == {"a.npy": "done", "b.npy": "done"}
    system.pipe_file("bucket/out/a.npy", b"somebody else's")
    run = layernorm(*batch, "--resume", "--eps", "1", "--checksum")
    assert status(run) == {"a.npy": "done", "b.npy": "done"}  # no checksum was noted before
    run = layernorm(*batch, "--resume", "--eps", "1", "--checksum")
    assert status(run) == {"a.npy": "skipped", "b.npy": "skipped"}


def test_outputs_here_of_inputs_there_are_known_again(layernorm, system, inputs):
    batch = ("batch", "s3://bucket/in", "--exclude", "*.safetensors", "-o", "out")
    assert status(layernorm(*batch)) == {"a.npy": "done", "b.npy": "done"}
    system.put_file("in/sub/b.npy", "bucket/in/a.npy")
    assert status(layernorm(*batch, "--resume")) == {"a.npy": "done", "b.npy": "skipped"}


def test_killed_and_resumed(system, layernorm):
    os.mkdir("in")
    for number in range(40):
        np.save(f"in/{number}.npy", X + number)
    assert layernorm("batch", "in", "-o", "here", "-q").code == 0
    command = [COMMAND, "batch", "in", "-o", "s3://bucket/out"]
    with open("m1.jsonl", "wb") as manifest:
        process = subprocess.Popen(command, stdout=manifest, env=environment())
        wait_until(lambda: names(system, "bucket/out"), "an output", None)
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT)
    before = names(system, "bucket/out")
    run = layernorm("batch", "in", "-o", "s3://bucket/out", "--resume")
    assert run.code == 0
    skipped = sorted(name for name, what in status(run).items() if what == "skipped")
    assert skipped == before
    assert len(names(system, "bucket/out")) == 40
    for number in range(40):
        with open(f"here/{number}.npy", "rb") as file:
            assert system.cat_file(f"bucket/out/{number}.npy") == file.read()
