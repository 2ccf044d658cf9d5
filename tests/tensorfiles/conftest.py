"""Helpers of the tensor file tests: sample arrays, raw file bytes, pipes, and how errors must look."""

import contextlib
import json
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from layernorm_cli.errors import FormatError
from layernorm_cli.norm.dtypes import DTYPES, numpy_dtype
from layernorm_cli.tensorfiles.outputs import open_output
from layernorm_cli.tensorfiles.reader import open_tensor

NUMPY_NAMES = [name for name, dtype in DTYPES.items() if dtype.in_numpy]
X = np.arange(12, dtype="<f4").reshape(3, 4) / 8

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def sample(name, shape=(3, 5), seed=0):
    """An array of random bits, so with NaN, inf and subnormals where the dtype has them."""
    dtype = numpy_dtype(DTYPES[name])
    rng = np.random.default_rng(seed)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(count), dtype).reshape(shape)


def assert_same(found, expected):
    """Same shape, same dtype up to the byte order, same bits."""
    assert found.shape == expected.shape
    assert found.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")
    native = [np.ascontiguousarray(a.astype(a.dtype.newbyteorder("="))) for a in (found, expected)]
    assert native[0].tobytes() == native[1].tobytes()


def read(ref, assume=None):
    with open_tensor(str(ref), assume and DTYPES[assume]) as tensor:
        array = tensor.read()
        assert tensor.warnings == []
        return array


def read_blocks(ref, size, axis=-1):
    """The rows along axis, read size at a time, and their tensor (closed)."""
    with open_tensor(str(ref)) as tensor:
        source = tensor.rows(axis % len(tensor.shape))
        blocks = [np.empty((0, source.width), source.storage)]
        for at in range(0, source.rows, size):
            blocks.append(source.read_rows(at, min(at + size, source.rows)))
        return np.concatenate(blocks), tensor


def write(path, tensors, metadata=None, **options):
    """Write arrays by name with our writer, in one go each."""
    described = {name: (DTYPES[a.dtype.name], a.shape) for name, a in tensors.items()}
    with open_output(str(path), described, metadata or {}, **options) as output:
        for name, array in tensors.items():
            output.write_rows(name, 0, np.atleast_1d(array))


def refused(ref, *fragments, kind=FormatError, assume=None):
    """Open ref, which must fail in at most three lines that name it and hold fragments."""
    ref = str(ref)
    with pytest.raises(kind) as caught, open_tensor(ref, assume and DTYPES[assume]):
        pass
    return checked(caught.value, ref, *fragments)


def checked(error, ref, *fragments):
    message = str(error)
    lines = message.splitlines()
    assert 1 <= len(lines) <= 3
    path = ref if os.path.exists(ref) else ref.partition("#")[0]
    assert path in lines[0]
    for fragment in fragments:
        assert str(fragment) in message
    return message


def raw_npy(header, data=b"", version=1, magic=b"\x93NUMPY"):
    """An npy with this header (text, bytes, or fields as a dict) as it stands."""
    header = repr(header) if isinstance(header, dict) else header
    header = header.encode("latin1") if isinstance(header, str) else header
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return magic + bytes((version, 0)) + length + header + data


def fields(descr="<f4", shape=(3, 4), fortran_order=False):
    return {"descr": descr, "fortran_order": fortran_order, "shape": shape}


def raw_safetensors(header, data=b"", length=None):
    """A safetensors file with this header (bytes, or fields as a dict) as it stands."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(header) if length is None else length
    return length.to_bytes(8, "little") + header + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def put(tmp_path):
    """A function that writes bytes to a file in the test's folder and returns its path."""

    def write_file(name, data):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write_file


@contextlib.contextmanager
def stdin_from(fd):
    """Take fd's file as standard input."""
    saved = os.dup(0)
    os.dup2(fd, 0)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)


@contextlib.contextmanager
def pipe_of(data):
    """The reading end of a pipe, and a thread that writes data into it."""
    reading, writing = os.pipe()

    def feed():
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb", 0) as pipe:
            rest = memoryview(data)
            while rest:
                rest = rest[pipe.write(rest) :]

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield reading
    finally:
        os.close(reading)
        thread.join()


@contextlib.contextmanager
def piped(data):
    """Standard input is a pipe with data in it."""
    with pipe_of(data) as reading, stdin_from(reading):
        yield


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """Where spools go in this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def no_descriptor_left():
    """After the test, no more descriptors are open than before."""
    before = len(os.listdir("/dev/fd"))
    yield
    assert len(os.listdir("/dev/fd")) <= before


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())
