"""A large file in ranges of rows, done by anyone in any order: the bytes of one go."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from layernorm_cli.tasks import file_parts
from layernorm_cli.tasks.apply import ApplyRequest, apply
from layernorm_cli.tasks.batch import BatchRequest, _prepare
from layernorm_cli.tasks.file_parts import begin, do_part, drop, finish
from layernorm_cli.tensorfiles.journal import open_journal, read_journals

X = np.random.default_rng(0).normal(3, 2, (1003, 24)).astype("<f4")
X[700, 3] = np.nan
X[900, 2] = np.inf


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(file_parts, "LEAST_BYTES", 1000)


def plan(*inputs, **options):
    os.makedirs("out", exist_ok=True)
    plan, settings, _ = _prepare(BatchRequest(inputs, "out", jobs=1, **options))
    return plan.jobs, settings


def whole(x, y, **options):
    apply(ApplyRequest(x, output=y, force=True, **options))
    return Path(y).read_bytes()


@pytest.mark.parametrize("form", ["x.npy", "fortran.npy", "x.safetensors"])
@pytest.mark.parametrize("most", [2, 3, 7, 500])
def test_any_order_gives_the_same_bytes(here, form, most):
    np.save("x.npy", X)
    np.save("fortran.npy", np.asfortranarray(X))
    save_file({"acts": X}, "x.safetensors")
    (job,), settings = plan(form)
    cut = begin(settings, job, most)
    assert 2 <= len(cut.parts) <= most
    assert (cut.parts[0][0], cut.parts[-1][1]) == (0, len(X))
    assert all(one[1] == other[0] for one, other in zip(cut.parts, cut.parts[1:], strict=False))
    seen = {}
    for number in (*range(len(cut.parts) - 1, -1, -1), 0):  # backwards, and one of them twice
        seen[number] = do_part(settings, cut, number)
        assert not os.path.exists(job.output)
    with open_journal("out") as journal:
        result = finish(settings, journal, cut, [seen[number] for number in range(len(cut.parts))])
    assert result.record[2:5] == ("done", len(X), X.nbytes)
    assert result.warnings == (
        f"{form}: 2 rows with NaN or inf, all NaN in the output; the first is row (700,)",
    )
    assert Path(job.output).read_bytes() == whole(form, f"whole{os.path.splitext(form)[1]}")
    (entry,) = read_journals("out")
    assert entry.made.size == os.path.getsize(job.output)
    assert plan(form, resume=True)[0] == []


def test_parts_need_not_end_with_a_block(here):
    wide = np.random.default_rng(1).normal(0, 1, (7, 5000)).astype("<f4")
    np.save("x.npy", wide)
    (job,), settings = plan("x.npy", axis=-1)
    cut = begin(settings, job, 100)
    assert len(cut.parts) == 7
    seen = [do_part(settings, cut, number) for number in range(7)]
    with open_journal("out") as journal:
        finish(settings, journal, cut, seen)
    assert Path(job.output).read_bytes() == whole("x.npy", "whole.npy")


def test_what_is_done_whole(here):
    np.save("x.npy", X)
    save_file({"a": X, "b": X}, "two.safetensors")
    Path("bad.npy").write_bytes(b"\x93NUMPY" + b"?" * 5000)
    np.savez_compressed("packed.npz", X)
    jobs, settings = plan("x.npy", "two.safetensors#*", "bad.npy")
    assert begin(settings, jobs[0], 4) is not None
    assert begin(settings, jobs[0], 1) is None
    assert begin(settings, jobs[0]._replace(size=1999), 4) is None
    assert begin(settings, jobs[0]._replace(output_dir="s3://bucket"), 4) is None
    assert begin(settings._replace(keep_others=True), jobs[0], 4) is None
    assert begin(settings, jobs[1], 4) is None
    assert begin(settings, jobs[2], 4) is None
    assert [name for name in os.listdir("out") if not name.startswith(".layernorm")] == []


def test_what_fails_leaves_nothing(here):
    np.save("x.npy", X)
    (job,), settings = plan("x.npy")
    cut = begin(settings, job, 3)
    seen = [do_part(settings, cut, number) for number in range(3)]
    assert os.path.exists(cut.temporary)
    os.unlink("x.npy")
    with open_journal("out") as journal:
        result = finish(settings, journal, cut, seen)
    assert result.record.status == "failed"
    assert "x.npy" in result.record.error
    cut = cut._replace(temporary="out/.x.npy.0123abcd.tmp")
    Path(cut.temporary).touch()
    assert drop(cut, "why").record.error == "why"
    assert [name for name in os.listdir("out") if not name.startswith(".layernorm")] == []


def test_an_input_that_changes_is_done_again_later(here):
    np.save("x.npy", X)
    (job,), settings = plan("x.npy")
    cut = begin(settings, job, 3)
    seen = [do_part(settings, cut, number) for number in range(3)]
    os.utime("x.npy", ns=(1, 1))
    with open_journal("out") as journal:
        assert finish(settings, journal, cut, seen).record.status == "done"
    assert len(plan("x.npy", resume=True)[0]) == 1
