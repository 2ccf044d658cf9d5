"""What the tests share: the installed command, the same in this process, files, and how errors look."""

import contextlib
import fcntl
import io
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import ml_dtypes  # noqa: F401  # numpy's bfloat16, for load_file
import numpy as np
import pytest
from safetensors.numpy import load_file

DATA = Path(__file__).parent / "data"
COMMAND = str(Path(sys.executable).with_name("layernorm"))
BASH = shutil.which("bash")
TIMEOUT = 60


class Run(NamedTuple):
    """How a run ended: exit code, the bytes of both streams, the files it left in its folder."""

    code: int
    stdout: bytes
    stderr: bytes
    created: set[str]

    @property
    def out(self):
        return self.stdout.decode()

    @property
    def err(self):
        return self.stderr.decode()

    @property
    def json(self):
        return json.loads(self.stdout, parse_constant=pytest.fail)


def environment(**variables):
    """This environment less all that changes the program's ways, plus variables; warnings are errors."""
    ours = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "PYTHONIOENCODING", "PYTHONUTF8"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("LAYERNORM_", "_LAYERNORM_", "LC_", "PYTEST_"))
    }
    return {**kept, "LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "error", **variables}


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def layernorm(here):
    """Runs the installed command in the current folder."""

    def run(*arguments, command=(COMMAND,), stdin=b"", stdout=subprocess.PIPE, **variables):
        before = files_in(here)
        done = subprocess.run(
            [*command, *map(os.fspath, arguments)],
            input=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment(**variables),
            timeout=TIMEOUT,
            check=False,
        )
        return Run(done.returncode, done.stdout or b"", done.stderr, files_in(here) - before)

    return run


@pytest.fixture
def shell(layernorm):
    """Runs a line of bash, in which $LAYERNORM is the installed command; with pipefail."""
    if BASH is None:
        pytest.skip("no bash")

    def run(line, **variables):
        return layernorm(command=(BASH, "-o", "pipefail", "-c", line), LAYERNORM=COMMAND, **variables)

    return run


@pytest.fixture
def main(here, capfdbinary):
    """Runs the command line in this process: faster, where the process itself is not what is tested."""
    from layernorm_cli.cli.main import main as program

    def run(*arguments, **variables):
        before = files_in(here)
        handlers = {
            number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        capfdbinary.readouterr()
        arguments = ["layernorm", *map(os.fspath, arguments)]
        with patch.dict(os.environ, environment(**variables), clear=True), patch("sys.argv", arguments):
            try:
                with pytest.raises(SystemExit) as ended:
                    program()
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        out, err = capfdbinary.readouterr()
        return Run(ended.value.code, out, err, files_in(here) - before)

    return run


@pytest.fixture
def x(here):
    """x.npy, float32 (3, 4), and the array in it."""
    array = np.arange(12, dtype="<f4").reshape(3, 4) ** 2
    np.save("x.npy", array)
    return array


def assert_refused(run, code, *mentions):
    """The run ended with this code, at most three lines that mention all of these, and nothing else."""
    assert run.code == code, run.err
    lines = run.err.splitlines()
    assert lines, "no message"
    assert lines[0].startswith("layernorm: ")
    assert len(lines) <= 3, run.err
    assert "Traceback" not in run.err
    for mention in mentions:
        assert mention in run.err
    assert run.stdout == b""
    assert run.created == set()


def load(path):
    """The one tensor of an .npy or .safetensors file, as libraries other than ours read it."""
    if os.fspath(path).endswith(".npy"):
        return np.load(path)
    (array,) = load_file(path).values()
    return array


def sparse_npy(path, shape, dtype="<f4"):
    """Write an npy of zeros that takes no room."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + int(np.prod(shape)) * np.dtype(dtype).itemsize)


def wait_until(true, what, process=None):
    for _ in range(TIMEOUT * 50):
        if true():
            return
        if process is not None and process.poll() is not None:
            pytest.fail(f"ended with {process.returncode} before {what}: {process.stderr.read()}")
        time.sleep(0.02)
    pytest.fail(f"waited in vain for {what}")


def group_has_ended(group, patience=20):
    """Whether no process of a group runs any more; if not, they are ended here."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    os.killpg(group, signal.SIGKILL)
    return False


@contextlib.contextmanager
def terminal(columns):
    """A pseudo-terminal so wide; gives our end and the program's."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    try:
        yield ours, theirs
    finally:
        for fd in (ours, theirs):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def in_terminal(here):
    """Runs the installed command in a pseudo-terminal; gives the exit code and what was shown."""

    def run(*arguments, columns=80, stdin=None, stdout=None, **variables):
        with terminal(columns) as (ours, theirs):
            process = subprocess.Popen(
                [COMMAND, *arguments],
                stdin=theirs if stdin is None else stdin,
                stdout=theirs if stdout is None else stdout,
                stderr=theirs,
                env=environment(**{"TERM": "xterm-256color", **variables}),
                start_new_session=True,
            )
            os.close(theirs)
            shown = io.BytesIO()
            with contextlib.suppress(OSError):  # how Linux says that the other end is closed
                while data := os.read(ours, 1 << 16):
                    shown.write(data)
            return process.wait(TIMEOUT), shown.getvalue().decode()

    return run
