"""Many tasks over forked processes that each take the next one: the only place that forks.

What a worker loads and prepares, it keeps for all its tasks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import selectors
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import NamedTuple, TypeVar

from .errors import Interrupted, WorkerDied

__all__ = ["Worker", "work_through"]

Result = TypeVar("Result")
Worker = Callable[[int], Iterator[int | Result]]
"""worker(task) yields numbers that tell how far it is, and the task's result last."""

STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
NO_TASK = -1
QUICK = 0.05  # seconds; workers that are quicker get the next task while they are at one
PATIENCE = 10.0  # seconds for a worker to put away what it has begun
LENGTH = 4  # bytes of a task's number, and before each message


class _Process(NamedTuple):
    """A worker: the pipes to and from it, its tasks (first what it is at), and a part of a message."""

    pid: int
    tasks: int
    said: int
    at: deque[int]
    received: bytearray


def work_through(
    make_worker: Callable[[], Worker[Result]], tasks: int, workers: int
) -> Generator[tuple[int, int | Result | WorkerDied], None, None]:
    """Do the tasks 0 to tasks - 1; yield each with what its worker yields.

    They are begun in order, or nearly so, and end in any. The task of a worker that dies gets
    WorkerDied as its result, and another worker goes on. With one worker all is done here, and where
    processes cannot fork safely, by threads. Closing the iterator ends the workers, and what they have
    begun.

    Raises WorkerDied where a worker dies before its first task, and what make_worker raises.
    """
    if workers <= 1:
        worker = make_worker()
        for task in range(tasks):
            for said in worker(task):
                yield task, said
    elif not _may_fork():
        yield from _work_in_threads(make_worker, tasks, min(workers, tasks))
    else:
        yield from _work_in_processes(make_worker, tasks, min(workers, tasks))


def _may_fork() -> bool:
    """Whether this process can fork safely: on Linux, and without other Python threads."""
    return sys.platform == "linux" and threading.active_count() == 1


def _work_in_threads(
    make_worker: Callable[[], Worker[Result]], tasks: int, workers: int
) -> Generator[tuple[int, int | Result], None, None]:
    todo = deque(range(tasks))
    said: queue.SimpleQueue[tuple[int, int | Result | BaseException | None]] = queue.SimpleQueue()
    stopping = threading.Event()

    def serve() -> None:
        try:
            worker = make_worker()
            while todo and not stopping.is_set():
                task = todo.popleft()
                for what in worker(task):
                    said.put((task, what))
                    if stopping.is_set():
                        break
        except IndexError:  # another was quicker
            pass
        except BaseException as error:
            said.put((NO_TASK, error))
        finally:
            said.put((NO_TASK, None))

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    left = workers
    try:
        while left:
            task, what = said.get()
            if isinstance(what, BaseException):
                raise what
            if what is None:
                left -= 1
            else:
                yield task, what
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _work_in_processes(
    make_worker: Callable[[], Worker[Result]], tasks: int, workers: int
) -> Generator[tuple[int, int | Result | WorkerDied], None, None]:
    todo = deque(range(tasks))
    processes: dict[int, _Process] = {}
    began: dict[int, float] = {}

    def start() -> None:
        process = _fork(make_worker, [*processes.values()])
        processes[process.said] = process
        ready.register(process.said, selectors.EVENT_READ)

    def assign(process: _Process, count: int) -> None:
        while todo and len(process.at) < count:
            process.at.append(todo.popleft())
            with contextlib.suppress(BrokenPipeError):  # it has died, which is seen below
                os.write(process.tasks, process.at[-1].to_bytes(LENGTH, "little"))

    with selectors.DefaultSelector() as ready:
        try:
            for _ in range(workers):
                start()
            while todo or any(process.at for process in processes.values()):
                for key, _ in ready.select():
                    process = processes[key.fd]
                    if data := os.read(process.said, 1 << 16):
                        process.received.extend(data)
                        for task, said in _messages(process.received):
                            if isinstance(said, Exception):
                                raise said
                            now = time.monotonic()
                            if isinstance(said, int):
                                if task == NO_TASK:  # it is ready
                                    assign(process, 1)
                                    began[process.said] = now
                                else:
                                    yield task, said
                                continue
                            process.at.popleft()
                            quick = now - began[process.said] < QUICK
                            assign(process, 2 if quick else 1)
                            began[process.said] = now
                            yield task, said
                        continue
                    ready.unregister(process.said)
                    del processes[process.said]
                    _close(process)
                    os.waitpid(process.pid, 0)
                    if process.said not in began:
                        raise _died()
                    del began[process.said]
                    todo.extendleft([*process.at][:0:-1])
                    start()
                    if process.at:
                        yield process.at[0], _died()
        finally:
            _end([*processes.values()])


def _died() -> WorkerDied:
    return WorkerDied(
        "", "a worker process died", None, "fewer workers (--threads, --jobs), if memory ran out"
    )


def _messages(received: bytearray) -> Iterator[tuple[int, int | Result]]:
    """Take the whole messages out of what a worker has sent: this program's own pickles."""
    while len(received) >= LENGTH:
        end = LENGTH + int.from_bytes(received[:LENGTH], "little")
        if len(received) < end:
            return
        message = pickle.loads(received[LENGTH:end])
        del received[:end]
        yield message


def _close(process: _Process) -> None:
    os.close(process.tasks)
    os.close(process.said)


def _fork(make_worker: Callable[[], Worker[Result]], others: list[_Process]) -> _Process:
    """Start a worker process."""
    tasks_reading, tasks = os.pipe()
    said, said_writing = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # no worker may be unknown to us
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those of a BLAS, or of jax, are idle here
        pid = os.fork()
    process = _Process(pid, tasks, said, deque(), bytearray())
    if pid == 0:
        for other in (*others, process):  # so that the workers' pipes break once the parent is gone
            _close(other)
        _serve(make_worker, tasks_reading, said_writing)
    os.close(tasks_reading)
    os.close(said_writing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    return process


def _serve(make_worker: Callable[[], Worker[Result]], tasks: int, said: int) -> None:
    """The life of a worker process: do the tasks that come, say what there is to say, never return."""

    def send(task: int, what: object) -> None:
        message = pickle.dumps((task, what), pickle.HIGHEST_PROTOCOL)
        data = memoryview(len(message).to_bytes(LENGTH, "little") + message)
        while data:
            data = data[os.write(said, data) :]

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough, and must not end the cleaning up
        raise Interrupted(number)

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and tells us
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        try:
            worker = make_worker()
            send(NO_TASK, 0)
            while number := os.read(tasks, LENGTH):
                task = int.from_bytes(number, "little")
                for what in worker(task):
                    send(task, what)
        except Exception as error:
            send(NO_TASK, error)
    finally:
        os._exit(0)


def _end(processes: list[_Process]) -> None:
    """End the workers, and wait for them: they remove what they have not finished."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
            _close(process)
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            while os.waitpid(process.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.002)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
