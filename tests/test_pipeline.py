"""Source to sink: the same bits in the same order by every way, and what happens when a worker fails."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import TIMEOUT, environment, files_in, group_has_ended, sparse_npy
from hypothesis import given, settings
from hypothesis import strategies as st

from layernorm_cli import layer_norm, pipeline, row_stats, workers
from layernorm_cli.errors import InputError, WorkerDied
from layernorm_cli.norm import backward
from layernorm_cli.norm.backward import backward_kernel
from layernorm_cli.norm.forward import row_kernel
from layernorm_cli.norm.spec import Norm
from layernorm_cli.pipeline import BackwardJob, Job, Sink, Summary, differentiate, merged, normalize

ROWS, WIDTH = 103, 24
X = np.random.default_rng(0).normal(3, 2, (ROWS, WIDTH)).astype(np.float32)
WAYS = ("one worker", "threads", "processes", "source in order", "sink in order")


class Source:
    """Rows of an array; knows who read what."""

    forkable = True

    def __init__(self, array, sequential=False, least_rows=1, fail_at=None, fail=None):
        self.array, self.sequential, self.least_rows = array, sequential, least_rows
        self.rows, self.width = array.shape
        self.storage = array.dtype
        self.reads, self.readers = [], set()
        self.fail_at, self.fail = fail_at, fail

    def read_rows(self, start, stop, block=None):
        if self.fail_at is not None and start <= self.fail_at < stop:
            self.fail()
        self.reads.append((start, stop))
        self.readers.add(threading.get_ident())
        if block is None:
            return self.array[start:stop].copy()
        block[...] = self.array[start:stop]
        return block


class Output:
    """Rows in memory that processes share; knows who wrote what."""

    def __init__(self, shape, dtype=np.float32, sequential=False):
        size = int(np.prod(shape))
        memory = mmap.mmap(-1, (size + 1) * np.dtype(dtype).itemsize)
        self.array = np.frombuffer(memory, dtype)[:size].reshape(shape)
        self.sequential = sequential
        self.writes, self.writers = [], set()

    def write_rows(self, name, start, rows):
        assert name == "y"
        self.writes.append(start)
        self.writers.add(threading.get_ident())
        self.array[start : start + len(rows)] = rows

    def sink(self):
        return Sink(self, "y", self.array.dtype)


def every(start, stop):
    return np.arange(stop - start)


def no_row(start, stop):
    return np.arange(0)


def make_job(source, y=None, norm=None, **changes):
    norm = norm or Norm()
    job = Job(
        x=source,
        residual=None,
        prepare=lambda: row_kernel(norm, source.width),
        prepare_stats=lambda: row_kernel(Norm(norm.kind, norm.eps), source.width),
        y_dtype=np.dtype(np.float32),
        y=y and y.sink(),
        total=None,
        shown=every,
        processes=True,
    )
    return job._replace(**changes)


@pytest.fixture(params=[1, 7, 40, 1000], ids=lambda rows: f"{rows} rows a block")
def block_rows(request, monkeypatch):
    monkeypatch.setattr(pipeline, "BLOCK_ELEMENTS", request.param * WIDTH)
    return request.param


@pytest.fixture
def small_blocks(monkeypatch):
    """Seven rows a block, and work enough for processes."""
    monkeypatch.setattr(pipeline, "BLOCK_ELEMENTS", 7 * WIDTH)
    monkeypatch.setattr(pipeline, "FORK_ELEMENTS", 0)


@pytest.fixture
def forks(monkeypatch):
    """Lets the pipeline fork, whatever threads pytest has, and lists the processes; none may be left."""
    pids = []

    def fork(real=os.fork):
        pid = real()
        if pid:
            pids.append(pid)
        return pid

    monkeypatch.setattr(workers, "_may_fork", lambda: True)
    monkeypatch.setattr(pipeline, "FORK_ELEMENTS", 0)
    monkeypatch.setattr(os, "fork", fork)
    yield pids
    for pid in pids:
        assert has_ended(pid)


def has_ended(pid, patience=20):
    """Whether a child has ended; if not, it is ended here."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def run(way, workers=3, x=X, source=None, **changes):
    """All blocks, and y, done in one of the ways."""
    source = source or Source(x, sequential=way == "source in order")
    y = Output(source.array.shape, sequential=way == "sink in order")
    job = make_job(source, y, processes=way == "processes", **changes)
    blocks = list(normalize(job, 1 if way == "one worker" else workers))
    return blocks, y


def joined(blocks, pick):
    return np.concatenate([pick(block) for block in blocks])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_same_bits_by_every_way(way, workers, block_rows, forks):
    blocks, y = run(way, workers)
    np.testing.assert_array_equal(y.array, layer_norm(X).astype(np.float32))
    assert [block.start for block in blocks] == list(range(0, ROWS, block_rows))
    assert sum(block.rows for block in blocks) == ROWS
    np.testing.assert_array_equal(joined(blocks, lambda b: b.places), np.arange(ROWS))
    truth, after = row_stats(X), row_stats(y.array)
    columns = (truth.mean, truth.var, truth.rstd, after.mean, after.var)
    np.testing.assert_array_equal(np.concatenate([b.columns for b in blocks], axis=1), columns)
    several = len(blocks) > 1
    assert len(forks) == (min(workers, len(blocks)) if way == "processes" and several else 0)


def test_statistics_after_are_the_same_without_an_output(small_blocks):
    with_output, _ = run("one worker")
    without = list(normalize(make_job(Source(X)), 1))
    for one, other in zip(with_output, without, strict=True):
        np.testing.assert_array_equal(one.columns, other.columns)


def test_only_rows_shown_are_reported(small_blocks):
    def odd(start, stop):
        return np.flatnonzero(np.arange(start, stop) % 2)

    blocks, _ = run("threads", shown=odd)
    np.testing.assert_array_equal(joined(blocks, lambda b: b.places), np.arange(1, ROWS, 2))
    np.testing.assert_array_equal(
        np.concatenate([b.columns[0] for b in blocks]), row_stats(X).mean[1::2]
    )
    blocks, _ = run("threads", shown=no_row)
    assert all(block.columns.shape == (5, len(block.places)) == (5, 0) for block in blocks)
    assert sum(block.rows for block in blocks) == ROWS


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(way, forks):
    blocks, _ = run(way, x=X[:0])
    assert blocks == []
    assert forks == []


def test_rows_wider_than_a_block(monkeypatch):
    monkeypatch.setattr(pipeline, "BLOCK_ELEMENTS", WIDTH // 3)
    blocks, _ = run("one worker")
    assert [block.rows for block in blocks] == [1] * ROWS


def test_a_source_says_how_many_rows_at_least(small_blocks):
    source = Source(X, least_rows=50)
    run("threads", source=source)
    assert sorted(source.reads) == [(0, 50), (50, 100), (100, ROWS)]
    residual = Source(X, least_rows=60)
    run("threads", residual=residual)
    assert sorted(residual.reads) == [(0, 60), (60, ROWS)]


def test_pipes_are_read_and_written_in_order_by_the_caller(small_blocks):
    source, y = Source(X, sequential=True), Output(X.shape, sequential=True)
    list(normalize(make_job(source, y), 3))
    assert source.reads == [(at, min(at + 7, ROWS)) for at in range(0, ROWS, 7)]
    assert y.writes == list(range(0, ROWS, 7))
    assert source.readers == y.writers == {threading.get_ident()}


def test_a_pipe_is_not_read_far_ahead(small_blocks):
    source = Source(X, sequential=True)
    blocks = normalize(make_job(source), 3)
    next(blocks)
    assert len(source.reads) <= 5
    next(blocks)
    assert len(source.reads) <= 6
    blocks.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_residual(way, dtype, small_blocks, forks):
    other = (X[::-1] * 10).astype(dtype)
    total = Output(X.shape, np.float16)
    _, y = run(way, residual=Source(other), total=total.sink())
    wide = X.astype(np.float64) + other
    np.testing.assert_array_equal(y.array, layer_norm(wide).astype(np.float32))
    np.testing.assert_array_equal(total.array, wide.astype(np.float16))


def refuse():
    raise InputError("x.npy", "gone", "still there", "again")


@pytest.mark.parametrize("at", [0, 50, ROWS - 1])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_a_worker_comes_through(way, at, small_blocks, forks):
    source = Source(X, sequential=way == "source in order", fail_at=at, fail=refuse)
    with pytest.raises(InputError) as caught:
        run(way, source=source)
    assert str(caught.value) == "x.npy: gone\n  expected: still there\n  try: again"
    assert caught.value.exit_code == 3
    assert bool(forks) == (way == "processes")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("at", [0, 50, ROWS - 1])
def test_a_worker_that_is_killed(at, small_blocks, forks):
    with pytest.raises(WorkerDied) as caught:
        run("processes", source=Source(X, fail_at=at, fail=die))
    assert caught.value.exit_code == 3
    assert "--threads" in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_nobody_is_left_when_the_caller_stops(way, small_blocks, forks):
    before = threading.active_count()
    source = Source(X, sequential=way == "source in order")
    y = Output(X.shape, sequential=way == "sink in order")
    blocks = normalize(make_job(source, y, processes=way == "processes"), 3)
    next(blocks)
    blocks.close()
    assert threading.active_count() == before
    for pid in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


FORK_AND_SIGNAL = """
import os, signal, sys
from layernorm_cli.cli.main import main

def fork(real=os.fork):
    pid = real()
    if pid:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = fork
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are processes on Linux only")
def test_a_signal_right_after_a_fork_leaves_no_worker(here):
    sparse_npy("x.npy", (1 << 22, 8))
    command = [sys.executable, "-c", FORK_AND_SIGNAL, "apply", "x.npy", "--save-stats", "s.csv"]
    process = subprocess.Popen(
        [*command, "--threads", "2", "--backend", "numpy"], start_new_session=True, env=environment()
    )
    assert process.wait(TIMEOUT) == 143
    assert files_in(here) == {"x.npy"}
    assert group_has_ended(process.pid)


def test_no_fork_beside_other_threads(small_blocks, monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        _, y = run("processes")
    finally:
        stop.set()
        other.join()
    np.testing.assert_array_equal(y.array, layer_norm(X).astype(np.float32))


def test_no_fork_for_little_work(monkeypatch):
    monkeypatch.setattr(pipeline, "BLOCK_ELEMENTS", 7 * WIDTH)
    monkeypatch.setattr(workers, "_may_fork", lambda: True)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    _, y = run("processes")
    np.testing.assert_array_equal(y.array, layer_norm(X).astype(np.float32))


def test_each_worker_has_its_own_kernel(small_blocks):
    made = []

    def prepare():
        made.append(1)
        return row_kernel(Norm(), WIDTH)

    run("threads", workers=3, prepare=prepare)
    assert len(made) == 3


ROW_KINDS = {
    "plain": [1.0, 2.0, 4.0],
    "low": [-9.0, -8.0, -9.0],
    "constant": [5.0, 5.0, 5.0],
    "nan": [1.0, np.nan, 2.0],
    "inf": [1.0, np.inf, 2.0],
}


def summary_of(kinds):
    """The summary of rows of these kinds, told without numpy."""
    usable = [ROW_KINDS[kind] for kind in kinds if kind not in ("nan", "inf")]
    means = [sum(row) / 3 for row in usable]
    variances = [sum((v - sum(row) / 3) ** 2 for v in row) / 3 for row in usable]
    bad = [place for place, kind in enumerate(kinds) if kind in ("nan", "inf")]
    constant = [place for place, kind in enumerate(kinds) if kind == "constant"]
    nan = float("nan")
    return Summary(
        min(means, default=nan),
        max(means, default=nan),
        min(variances, default=nan),
        max(variances, default=nan),
        len(constant),
        len(bad),
        0,
        constant[0] if constant else None,
        bad[0] if bad else None,
    )


@given(st.lists(st.sampled_from(sorted(ROW_KINDS)), min_size=1, max_size=30), st.integers(1, 7))
@settings(max_examples=100, deadline=None, database=None, derandomize=True)
def test_summary(kinds, size):
    x = np.array([ROW_KINDS[kind] for kind in kinds])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "BLOCK_ELEMENTS", size * 3)
        blocks = list(normalize(make_job(Source(x), shown=no_row), 1))
    total = blocks[0].summary
    for block in blocks[1:]:
        total = merged(total, block.summary)
    truth = summary_of(kinds)
    assert total[4:] == truth[4:]
    np.testing.assert_allclose(total[:4], truth[:4], 1e-14)


def test_results_too_large_are_counted(small_blocks):
    gamma = np.ones(WIDTH)
    gamma[3] = 1e6
    norm = Norm("layer", 1e-5, gamma)
    y = Output(X.shape, np.float16)
    job = make_job(Source(X), y, norm, y_dtype=np.dtype(np.float16))
    blocks = list(normalize(job, 2))
    infinite = np.isinf(y.array).sum()
    assert infinite > 20
    assert sum(block.summary.overflow for block in blocks) == infinite


@pytest.mark.parametrize("place", [None, "x", "residual"])
def test_no_processes_where_a_source_cannot_be_forked(forks, small_blocks, place):
    sources = {"x": Source(X), "residual": Source(X)}
    if place is not None:
        sources[place].forkable = False
    blocks = list(normalize(make_job(sources["x"], None)._replace(residual=sources["residual"]), 2))
    assert sum(block.rows for block in blocks) == ROWS
    assert bool(forks) == (place is None)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_have_the_same_bits_by_every_way(way, block_rows, forks, monkeypatch):
    monkeypatch.setattr(backward, "SEGMENT_ELEMENTS", 10 * WIDTH)
    dy = X[::-1].copy()
    source = Source(X, sequential=way == "source in order")
    dx = Output(X.shape, sequential=way == "sink in order")
    job = BackwardJob(
        x=source,
        dy=Source(dy),
        prepare=lambda: backward_kernel(Norm(), WIDTH),
        prepare_stats=lambda: row_kernel(Norm(), WIDTH),
        dx_dtype=np.dtype(np.float32),
        dx=dx.sink(),
        shown=every,
        processes=way == "processes",
    )
    blocks = list(differentiate(job, 1 if way == "one worker" else 3))
    expected = np.empty_like(X)
    found = backward_kernel(Norm(), WIDTH)(X, dy, expected)
    np.testing.assert_array_equal(dx.array, expected)
    np.testing.assert_array_equal(np.concatenate([part.dgamma for part in blocks]), found.dgamma)
    np.testing.assert_array_equal(np.concatenate([part.dbeta for part in blocks]), found.dbeta)
    assert len(found.dgamma) == -(-ROWS // 10)
    assert sum(part.block.rows for part in blocks) == ROWS
    without = list(differentiate(job._replace(dx=None), 1))
    for one, other in zip(blocks, without, strict=True):
        np.testing.assert_array_equal(one.block.columns, other.block.columns)
    assert (len(forks) > 0) == (way == "processes" and len(blocks) > 1)
