"""Tasks over processes: each once, in any order, whatever becomes of the workers."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from layernorm_cli import workers
from layernorm_cli.errors import WorkerDied
from layernorm_cli.workers import work_through


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """Processes fork, even if a plugin of pytest has started a thread."""
    monkeypatch.setattr(workers, "_may_fork", lambda: True)


def squares():
    def work(task):
        yield task * task, os.getpid()

    return work


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 3, 200])
def test_each_task_once(tasks, count):
    results = dict(work_through(squares, tasks, count))
    assert {task: square for task, (square, _) in results.items()} == {n: n * n for n in range(tasks)}
    pids = {pid for _, pid in results.values()}
    assert len(pids) <= max(count, 1)
    assert (os.getpid() in pids) == (count == 1 and tasks > 0)


def test_one_worker_does_them_in_order():
    assert [task for task, _ in work_through(squares, 9, 1)] == list(range(9))


def test_what_is_said_on_the_way():
    def make():
        def work(task):
            yield 1
            yield 2
            yield f"result {task}"

        return work

    for count in (1, 2):
        said = list(work_through(make, 2, count))
        assert [what for task, what in said if task == 1] == [1, 2, "result 1"]


def test_results_of_any_size():
    def make():
        def work(task):
            yield b"x" * (task * 100_000)

        return work

    assert {task: len(data) for task, data in work_through(make, 8, 2)} == {
        n: n * 100_000 for n in range(8)
    }


def test_a_long_task_does_not_hold_up_others():
    def make():
        def work(task):
            time.sleep(0.5 if task == 0 else 0)
            yield str(os.getpid())

        return work

    results = list(work_through(make, 30, 2))
    assert results[-1][0] in (0, 2)  # 2 had perhaps been given to the worker of 0 as its next
    assert sorted(task for task, _ in results) == list(range(30))


@pytest.mark.parametrize("count", [2, 3])
def test_workers_that_die(count):
    def make():
        def work(task):
            if task % 5 == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield str(task)

        return work

    results = list(work_through(make, 23, count))
    assert sorted(task for task, _ in results) == list(range(23))
    for task, result in results:
        assert isinstance(result, WorkerDied) == (task % 5 == 2)


def test_a_worker_that_dies_with_its_last_words():
    """Killed behind a result, it takes nothing with it but the task that it may have begun."""

    def make():
        def work(task):
            yield str(task)
            if task == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        return work

    results = list(work_through(make, 10, 2))
    assert sorted(task for task, _ in results) == list(range(10))
    assert sum(isinstance(result, WorkerDied) for _, result in results) <= 1


def test_workers_that_cannot_begin():
    def dies():
        os.kill(os.getpid(), signal.SIGKILL)

    def fails():
        raise ValueError("no luck")

    with pytest.raises(WorkerDied):
        list(work_through(dies, 3, 2))
    with pytest.raises(ValueError, match="no luck"):
        list(work_through(fails, 3, 2))


def test_closing_ends_what_was_begun(tmp_path):
    def make():
        def work(task):
            place = tmp_path / str(task)
            place.touch()
            try:
                yield 0
                time.sleep(60)
            finally:
                place.unlink()
            yield "never"

        return work

    begun = time.monotonic()
    with contextlib.closing(work_through(make, 9, 2)) as results:
        next(results)
    assert time.monotonic() < begun + 10
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_no_pipe_is_left_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    list(work_through(squares, 5, 3))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.fixture
def no_forks(monkeypatch):
    monkeypatch.setattr(workers, "_may_fork", lambda: False)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 3, 200])
def test_threads_where_nothingmay_fork(tasks, count, no_forks):
    seen = set()

    def make():
        def work(task):
            seen.add(threading.get_ident())
            yield 1
            yield str(task * task)

        return work

    said = list(work_through(make, tasks, count))
    assert sorted(task for task, what in said if what == 1) == list(range(tasks))
    results = {task: what for task, what in said if what != 1}
    assert results == {task: str(task * task) for task in range(tasks)}
    assert threading.get_ident() not in seen
    assert threading.active_count() == 1


def test_threads_work_at_the_same_time(no_forks):
    both = threading.Barrier(2, timeout=20)

    def make():
        def work(task):
            both.wait()
            yield str(task)

        return work

    assert len(list(work_through(make, 2, 2))) == 2


def test_errors_of_threads_come_through(no_forks):
    def fails():
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        list(work_through(fails, 3, 2))
    assert threading.active_count() == 1


def test_closing_ends_what_threads_have_begun(tmp_path, no_forks):
    def make():
        def work(task):
            place = tmp_path / str(task)
            place.touch()
            try:
                while True:
                    time.sleep(0.01)
                    yield 0
            finally:
                place.unlink()

        return work

    with contextlib.closing(work_through(make, 9, 2)) as results:
        next(results)
    assert threading.active_count() == 1
    assert list(tmp_path.iterdir()) == []
