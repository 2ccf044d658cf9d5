"""Outputs: whole or not there, under exactly the name given, and right in any order of the rows."""

import contextlib
import io
import itertools
import os
import resource
import stat
import threading

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import Interrupted, LayernormError, OutputError, PipeClosed, UsageError
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.tensorfiles.outputs import (
    check_output,
    name_of_temporary,
    open_output,
    open_text_output,
    temporary_name,
)
from layernorm_cli.tensorfiles.reader import open_tensor
from layernorm_cli.tensorfiles.safetensors import SafetensorsEntry

from .conftest import (
    NUMPY_NAMES,
    X,
    assert_same,
    checked,
    names_in,
    quick,
    read,
    sample,
    write,
)

pytestmark = pytest.mark.usefixtures("no_descriptor_left")
SUFFIXES = (".npy", ".safetensors")
F4 = DTYPES["float32"]
ONE = {"y": (F4, (3, 4))}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def never_replaced(monkeypatch):
    """No file may be renamed in this test; it would hit a device of the whole machine."""

    def refuse(*paths):
        raise AssertionError("renamed")

    monkeypatch.setattr(os, "replace", refuse)


def writing_fails(kind, path, *fragments, tensors=None, **options):
    """Both the check before the work and the writer refuse alike, and leave nothing."""
    before = names_in(".")
    with pytest.raises(kind) as caught, open_output(path, tensors or ONE, {}, **options):
        pass
    assert names_in(".") == before
    return checked(caught.value, path, *fragments)


def check_fails(kind, path, *fragments, force=False):
    with pytest.raises(kind) as caught:
        check_output(path, SUFFIXES, force)
    return checked(caught.value, path, *fragments)


@pytest.mark.parametrize("path", ["y.npy", "y.safetensors"])
def test_appears_only_when_it_is_whole(here, path):
    with open_output(path, ONE, {}) as output:
        output.write_rows("y", 0, X[:2])
        assert path not in os.listdir()
        output.write_rows("y", 2, X[2:])
        assert path not in os.listdir()
    assert names_in(".") == [path]
    assert_same(read(path), X)


@pytest.mark.parametrize("path", ["y.npy", "y.safetensors"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), Interrupted(15)])
@pytest.mark.parametrize("old", [None, b"old"])
def test_an_error_leaves_what_was_there(here, path, error, old):
    if old:
        (here / path).write_bytes(old)
    with pytest.raises(type(error)), open_output(path, ONE, {}, force=True) as output:
        output.write_rows("y", 0, X)
        raise error
    assert names_in(".") == ([path] if old else [])
    assert old is None or (here / path).read_bytes() == old


def test_existing_output_needs_force(here):
    (here / "y.npy").write_bytes(b"old")
    writing_fails(UsageError, "y.npy", "exists already", "--force")
    check_fails(UsageError, "y.npy", "exists already", "--force")
    assert (here / "y.npy").read_bytes() == b"old"
    check_output("y.npy", SUFFIXES, force=True)
    write("y.npy", {"y": X}, force=True)
    assert_same(np.load("y.npy"), X)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o027])
@pytest.mark.parametrize("path", ["y.npy", "y.safetensors", "y.csv"])
def test_mode_follows_the_umask(here, umask, path):
    (here / path).touch(mode=0o600)
    saved = os.umask(umask)
    try:
        if path == "y.csv":
            with open_text_output(path):
                pass
        else:
            write(path, {"y": X}, force=True)
    finally:
        os.umask(saved)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("target", ["target.npy", "folder/target.npy", "without a suffix"])
@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_link_stays_and_its_target_is_replaced(here, target, exists):
    os.mkdir("folder")
    if exists:
        (here / target).write_bytes(b"old")
    os.symlink(target, "y.npy")
    writing_fails(UsageError, "y.npy", "exists already")
    write("y.npy", {"y": X}, force=True)
    assert os.readlink("y.npy") == target
    assert_same(np.load(target), X)
    assert len(names_in(".")) == (2 if "/" in target else 3)


def test_link_to_a_missing_folder(here):
    os.symlink("missing/y.npy", "y.npy")
    writing_fails(OutputError, "y.npy", "directory does not exist", force=True)


def test_link_in_a_circle(here):
    os.symlink("y.npy", "y.npy")
    writing_fails(UsageError, "y.npy", "exists already")
    write("y.npy", {"y": X}, force=True)
    assert_same(np.load("y.npy"), X)


@pytest.mark.parametrize("alias", ["x.npy", "./x.npy", "link.npy", "hard.npy", "../{}/x.npy"])
def test_output_may_be_the_input(here, alias):
    np.save("x.npy", X)
    os.symlink("x.npy", "link.npy")
    os.link("x.npy", "hard.npy")
    path = alias.format(here.name)
    with open_tensor("x.npy") as tensor, open_output(path, ONE, {}, force=True) as output:
        source = tensor.rows(1)
        for at in range(3):
            output.write_rows("y", at, -source.read_rows(at, at + 1))
    assert_same(np.load(path), -X)
    assert_same(np.load("x.npy"), X if alias == "hard.npy" else -X)


def test_missing_folder(here):
    writing_fails(OutputError, "missing/y.npy", "its directory does not exist", "mkdir -p")
    check_fails(OutputError, "missing/y.npy", "its directory does not exist")
    (here / "file").touch()
    writing_fails(OutputError, "file/y.npy", "its directory does not exist")


@pytest.mark.parametrize("force", [False, True])
def test_folder_given(here, force):
    os.mkdir("y.npy")
    writing_fails(OutputError, "y.npy", "is a directory", "a file name", force=force)
    check_fails(OutputError, "y.npy", "is a directory", force=force)


@pytest.mark.parametrize("path", ["y", "y.npz", "y.txt", "y.npy.gz", "y.NPY", ".", "npy", "y.pt"])
def test_unknown_suffix(here, path):
    writing_fails(UsageError, path, "unknown output format", ".npy or .safetensors", force=True)
    check_fails(UsageError, path, "unknown output format", ".npy or .safetensors")


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in NUMPY_NAMES])
@pytest.mark.parametrize("path", ["y.npy", "-"])
def test_npy_cannot_hold_what_numpy_lacks(here, name, path):
    tensors = {"y": (DTYPES[name], (3, 4))}
    writing_fails(
        UsageError, path, f"cannot hold {name}", ".safetensors", "--dtype float32", tensors=tensors
    )


@pytest.mark.parametrize(
    "path",
    ["größe.npy", "a b#c.npy", "[red].safetensors", "\U0001f600.npy", "a\nb.npy", "-.npy", ".npy"],
)
def test_name_given_is_the_name_written(here, path):
    write(path, {"y": X})
    assert names_in(".") == [path]
    assert_same(read(path), X)


@pytest.mark.parametrize("letter", ["x", "ö", "€", "\U0001f600"])
def test_longest_names(here, letter):
    path = letter * (251 // len(letter.encode())) + ".npy"
    assert len(path.encode()) > 250
    write(path, {"y": X})
    assert names_in(".") == [path]


def test_name_too_long(here):
    writing_fails(OutputError, "x" * 252 + ".npy", "file name too long")


def test_name_that_is_not_utf_8(here):
    path = os.fsdecode(b"\xff.npy")
    write(path, {"y": X})
    assert names_in(".") == [path]


def test_failing_rename_leaves_nothing(here):
    with pytest.raises(OutputError) as caught, open_output("y.npy", ONE, {}) as output:
        output.write_rows("y", 0, X)
        os.mkdir("y.npy")
    checked(caught.value, "y.npy", "is a directory")
    assert names_in(".") == ["y.npy"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(here):
    os.mkdir("folder", 0o500)
    writing_fails(OutputError, "folder/y.npy", "permission denied")


@contextlib.contextmanager
def file_size_limit(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_is_found_before_the_work(here):
    with file_size_limit(1 << 16):
        writing_fails(OutputError, "y.npy", "file too large", tensors={"y": (F4, (1 << 14, 4))})
    assert names_in(".") == []


def test_no_room_while_writing(here, monkeypatch):
    monkeypatch.setattr("layernorm_cli.tensorfiles.outputs.reserve", lambda fd, size: None)
    with file_size_limit(1 << 16), pytest.raises(OutputError) as caught:
        write("y.npy", {"y": np.zeros((1 << 14, 4), "<f4")})
    checked(caught.value, "y.npy", "file too large")
    assert names_in(".") == []


@pytest.mark.parametrize("path", ["y.npy", "y.safetensors"])
def test_space_is_reserved(here, path):
    with open_output(path, {"y": (F4, (1000, 100))}, {}):
        (temporary,) = here.iterdir()
        assert temporary.stat().st_size > 400_000


@pytest.mark.parametrize("path", ["y.npy", "y.safetensors"])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_rows_in_any_order(here, path, order):
    with open_output(path, ONE, {}) as output:
        assert not output.sequential
        for at in order:
            output.write_rows("y", at, X[at : at + 1])
    assert_same(read(path), X)


@pytest.mark.parametrize("path", ["y.npy", "y.safetensors"])
def test_rows_from_threads(here, path):
    array = sample("float32", (64, 1000))
    with open_output(path, {"y": (F4, array.shape)}, {}) as output:
        threads = [
            threading.Thread(target=output.write_rows, args=("y", at, array[at : at + 8]))
            for at in range(0, 64, 8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_same(read(path), array)


LAYOUTS = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "every second column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "every second row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "backwards": lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["y.npy", "y.safetensors"])
def test_rows_of_any_layout(here, path, layout):
    rows = LAYOUTS[layout](X)
    assert np.array_equal(rows, X)
    write(path, {"y": rows})
    found = np.load(path) if path == "y.npy" else safetensors.numpy.load_file(path)["y"]
    assert_same(found, X)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("width", [1, 3])
def test_columns_of_a_table(here, name, width):
    """One-dimensional rows, strided as a column of a table is."""
    table = sample(name, (7, width))
    with open_output("y.safetensors", {"c": (DTYPES[name], (7,))}, {}) as output:
        output.write_rows("c", 4, table[4:, 0])
        output.write_rows("c", 0, table[:4, 0])
    assert_same(read("y.safetensors"), np.ascontiguousarray(table[:, 0]))


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 4)),
    cuts=st.sets(st.integers(1, 8)),
    layout=st.sampled_from([*LAYOUTS]),
    name=st.sampled_from(NUMPY_NAMES),
    suffix=st.sampled_from(SUFFIXES),
    random=st.randoms(use_true_random=False),
)
@quick
def test_any_blocks_in_any_order(tmp_path_factory, shape, cuts, layout, name, suffix, random):
    array = LAYOUTS[layout](sample(name, shape))
    path = str(tmp_path_factory.getbasetemp() / f"blocks{suffix}")
    ends = [0, *sorted(cut for cut in cuts if cut < shape[0]), shape[0]]
    spans = [*itertools.pairwise(ends)]
    random.shuffle(spans)
    with open_output(path, {"y": (DTYPES[name], shape)}, {}, force=True) as output:
        for start, stop in spans:
            output.write_rows("y", start, array[start:stop])
    assert_same(read(path), np.ascontiguousarray(array))


def test_several_tensors_with_metadata(here):
    arrays = {name: sample(name, (3, i)) for i, name in enumerate(DTYPES)} | {"scalar": X[0, 0]}
    arrays = {name: np.asarray(a) for name, a in arrays.items()}
    described = {name: (DTYPES[a.dtype.name], a.shape) for name, a in arrays.items()}
    metadata = {"tool": "layernorm 0", "eps": "1e-05", "kind": "rms", "ö": '"\n\U0001f600'}
    with open_output("y.safetensors", described, metadata) as output:
        for name in reversed(arrays):
            array = np.atleast_1d(arrays[name])
            for at in reversed(range(len(array))):
                output.write_rows(name, at, array[at : at + 1])
    with safetensors.safe_open("y.safetensors", "numpy") as file:
        assert file.metadata() == metadata
        assert set(file.keys()) == arrays.keys()
        for name, array in arrays.items():
            if not name.startswith("float8"):
                assert_same(file.get_tensor(name), array)
    for name, array in arrays.items():
        assert_same(read(f"y.safetensors#{name}"), array)


@pytest.mark.parametrize("path", ["y.npy", "-", "fifo", "/dev/null"])
def test_several_tensors_need_safetensors(here, path, never_replaced):
    os.mkfifo("fifo")
    tensors = {"a": (F4, (2,)), "b": (F4, (2,))}
    writing_fails(LayernormError, path, "several tensors", ".safetensors", tensors=tensors)


def test_several_tensors_in_a_special_file(here, never_replaced):
    os.mkfifo("fifo.safetensors")
    tensors = {"a": (F4, (2,)), "b": (F4, (2,))}
    writing_fails(OutputError, "fifo.safetensors", "is not a regular file", tensors=tensors)


@contextlib.contextmanager
def collected(path):
    """What is written into the named pipe, as a list of one bytes in the end."""
    data = []

    def collect():
        with open(path, "rb") as pipe:
            data.append(pipe.read())

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    yield data
    thread.join()


@pytest.mark.parametrize("path", ["fifo", "fifo.npy", "fifo.txt"])
@pytest.mark.parametrize("force", [False, True])
def test_named_pipe_gets_npy(here, never_replaced, path, force):
    os.mkfifo(path)
    check_output(path, SUFFIXES, force)
    with collected(path) as data, open_output(path, ONE, {}, force=force) as output:
        assert output.sequential
        for at in range(3):
            output.write_rows("y", at, X[at : at + 1])
    assert_same(np.load(io.BytesIO(data[0])), X)
    assert stat.S_ISFIFO(os.stat(path).st_mode)


def test_named_pipe_called_safetensors(here, never_replaced):
    os.mkfifo("fifo.safetensors")
    with collected("fifo.safetensors") as data:
        write("fifo.safetensors", {"y": X}, {"kind": "layer"})
    assert_same(safetensors.numpy.load(data[0])["y"], X)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_into_a_pipe(here, layout):
    os.mkfifo("fifo")
    with collected("fifo") as data:
        write("fifo", {"y": LAYOUTS[layout](X)})
    assert_same(np.load(io.BytesIO(data[0])), X)


@pytest.mark.parametrize("path", ["/dev/null", "null.npy", "null.safetensors"])
def test_devices_are_not_replaced(here, never_replaced, path):
    os.symlink("/dev/null", "null.npy")
    os.symlink("/dev/null", "null.safetensors")
    before = os.stat("/dev/null")
    check_output(path, SUFFIXES, force=True)
    write(path, {"y": X}, force=True)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert os.path.samestat(os.stat("/dev/null"), before)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_device(here, never_replaced):
    writing_fails(OutputError, "/dev/full", "no space left on device")


@contextlib.contextmanager
def stdout_to(fd):
    saved = os.dup(1)
    os.dup2(fd, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def test_standard_output(here):
    check_output("-", SUFFIXES, force=False)
    with open("out", "wb") as file, stdout_to(file.fileno()):
        write("-", {"y": X})
        os.write(1, b"still open")
    data = (here / "out").read_bytes()
    assert data.endswith(b"still open")
    assert_same(np.load(io.BytesIO(data)), X)
    assert names_in(".") == ["out"]


def test_reader_of_standard_output_has_gone(here):
    reading, writing = os.pipe()
    os.close(reading)
    with stdout_to(writing), pytest.raises(PipeClosed):
        write("-", {"y": X})
    os.close(writing)


def test_reader_goes_in_the_middle(here):
    reading, writing = os.pipe()
    with stdout_to(writing), pytest.raises(PipeClosed), open_output("-", ONE, {}) as output:
        output.write_rows("y", 0, X[:1])
        os.close(reading)
        output.write_rows("y", 1, X[1:])
    os.close(writing)


@pytest.mark.parametrize("old", [None, "old"])
def test_text(here, old):
    if old:
        (here / "y.csv").write_text(old)
    with open_text_output("y.csv") as write_text:
        write_text("größe\n")
        write_text("")
        assert (here / "y.csv").exists() == bool(old)
        write_text("1\n")
    assert (here / "y.csv").read_text("utf-8") == "größe\n1\n"
    with pytest.raises(ValueError, match="no"), open_text_output("y.csv") as write_text:
        write_text("lost")
        raise ValueError("no")
    assert (here / "y.csv").read_text("utf-8") == "größe\n1\n"
    assert names_in(".") == ["y.csv"]


def test_text_into_special_files(here, never_replaced):
    os.symlink("/dev/null", "null.csv")
    with open_text_output("null.csv") as write_text:
        write_text("lost")
    os.mkfifo("fifo.csv")
    with collected("fifo.csv") as data, open_text_output("fifo.csv") as write_text:
        write_text("a,b\n")
    assert data == [b"a,b\n"]
    assert names_in(".") == ["fifo.csv", "null.csv"]


@pytest.mark.parametrize("suffixes", [(".csv",), (".safetensors", ".csv")])
def test_check_names_the_suffixes_asked_for(here, suffixes):
    check_output("y.csv", suffixes, force=False)
    with pytest.raises(UsageError, match=" or ".join(suffixes)):
        check_output("y.npy", suffixes, force=False)


@pytest.mark.parametrize("name", ["x.npy", "a b.npy", "ü.npy", ".x.npy", "two\nlines.npy", "x.tmp"])
def test_temporary_names(name):
    temporary = temporary_name(f"folder/{name}")
    assert temporary.startswith("folder/.")
    assert name_of_temporary(os.path.basename(temporary)) == name
    assert temporary_name(name) != temporary_name(name)
    assert name_of_temporary(name) is None


@pytest.mark.parametrize("name", ["x" * 251 + ".npy", "ü" * 125 + ".npy"])
def test_long_names(here, name):
    write(name, {"y": X})
    assert names_in(".") == [name]


def test_a_file_is_whole_before_it_has_its_name(here):
    seen = []

    def on_whole(fd, temporary):
        assert names_in(".") == [temporary]
        seen.append((os.fstat(fd), os.path.getsize(temporary)))

    with open_output("y.npy", ONE, {}, on_whole=on_whole) as output:
        output.write_rows("y", 0, X)
        assert seen == []
    ((status, size),) = seen
    final = os.stat("y.npy")
    assert (final.st_ino, final.st_size, final.st_mtime_ns) == (
        status.st_ino, size, status.st_mtime_ns
    )  # fmt: skip


def test_what_fails_when_it_is_whole_leaves_nothing(here):
    def on_whole(fd, temporary):
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(OutputError, match="no space"),
        open_output("y.npy", ONE, {}, on_whole=on_whole) as output,
    ):
        output.write_rows("y", 0, X)
    assert names_in(".") == []


COPY = {"strange": SafetensorsEntry("X_4", (3,), 99, 5)}


def test_copies(here):
    with open_output("y.safetensors", ONE, {}, copies=COPY) as output:
        output.write_rows("strange", 2, np.frombuffer(b"cde", "u1"))
        output.write_rows("y", 0, X)
        output.write_rows("strange", 0, np.frombuffer(b"ab", "u1"))
    with open_tensor("y.safetensors#y") as tensor:
        assert_same(tensor.read(), X)
    assert (here / "y.safetensors").read_bytes().endswith(b"abcde")


@pytest.mark.parametrize("path", ["y.npy", "pipe.safetensors"])
def test_copies_need_a_safetensors_file(here, path):
    os.mkfifo("pipe.safetensors")
    with pytest.raises(LayernormError), open_output(path, ONE, {}, copies=COPY):
        pass


def test_a_signal_at_the_moment_a_file_is_made(here, monkeypatch):
    """A handler runs when the system call has returned, and before its result is known."""

    def interrupted(*arguments, make=os.open):
        os.close(make(*arguments))
        raise Interrupted(15)

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(Interrupted), open_output("y.npy", ONE, {}):
        pass
    assert names_in(".") == []
