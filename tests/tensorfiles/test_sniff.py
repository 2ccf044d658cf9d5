"""What a file is, told by its first bytes, under right and wrong names."""

import gzip
import io
import json
import pickle

import numpy as np
import pytest
import safetensors.numpy

from layernorm_cli.errors import FormatError
from layernorm_cli.tensorfiles.sniff import HEAD_SIZE, told_format

from .conftest import X, assert_same, checked, piped, read, refused
from .test_npz import zip_bytes

SUFFIXES = [".npy", ".npz", ".safetensors", ".bin", ""]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 548105171\n"
GGUF = b"GGUF\x03\0\0\0" + (291).to_bytes(8, "little") + bytes(100)
GGUF_123 = b"GGUF\x03\0\0\0" + (123).to_bytes(8, "little") + bytes(100)  # 123 is '{'
FOREIGN = {
    "git lfs": (LFS, ("Git LFS pointer", "548105171 bytes", "git lfs pull")),
    "git lfs, cut": (LFS[:45], ("Git LFS pointer", "git lfs pull")),
    "html": (b"<!DOCTYPE html>\n<html>", ("HTML",)),
    "html, lower case": (b"\n  <html lang='en'>", ("HTML",)),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", ("XML",)),
    "pickle 2": (pickle.dumps({"a": [1]}, 2), ("a pickle, which layernorm never loads",)),
    "pickle 4": (pickle.dumps({"a": [1]}, 4), ("a pickle, which layernorm never loads",)),
    "pickle 5": (pickle.dumps(X, 5), ("a pickle, which layernorm never loads",)),
    "pickle with a brace": (b"\x80\x02cabcd {\n.", ("a pickle, which layernorm never loads",)),
    "pytorch": (zip_bytes({"m/data.pkl": b"\x80\x02.", "m/version": b"3"}), ("PyTorch checkpoint",)),
    "zip": (zip_bytes({"hello.txt": b"hello"}), ("zip archive without .npy members",)),
    "empty zip": (zip_bytes({}), ("zip archive without .npy members",)),
    "gguf": (GGUF, ("GGUF",)),
    "gguf of 123 tensors": (GGUF_123, ("GGUF",)),
    "gzip": (gzip.compress(b"data"), ("gzip-compressed", "gunzip")),
    "zstandard": (b"\x28\xb5\x2f\xfd" + bytes(20), ("zstd-compressed",)),
    "bzip2": (b"BZh91AY&SY" + bytes(20), ("bzip2-compressed",)),
    "xz": (b"\xfd7zXZ\x00" + bytes(20), ("xz-compressed",)),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), ("HDF5",)),
    "parquet": (b"PAR1" + bytes(20), ("Parquet",)),
    "damaged npy": (b"\x93NUMPX\x01\x00" + bytes(100), ("damaged npy",)),
    "empty": (b"", ("the file is empty",)),
}
UNKNOWN = {
    "csv": (b"1.0,2.0\n3.0,4.0\n", "text, beginning b'1.0,2.0\\n3.0,4.0\\n'"),
    "umlauts": ("größe\n".encode() * 100, "text, beginning"),
    "umlaut cut at the end": (b"a" * (HEAD_SIZE - 1) + "ö".encode(), "text, beginning"),
    "json": (b'{"a": [1, 2]}', "text, beginning"),
    "one letter": (b"a", "text, beginning b'a'"),
    "bytes": (bytes(range(128, 200)), "not in a format that layernorm reads, beginning b'\\x80\\x81"),
    "latin-1": ("größe".encode("latin1") * 10, "not in a format that layernorm reads"),
    "zeros": (bytes(100), "not in a format that layernorm reads"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_files_are_named(put, what, suffix):
    data, shown = FOREIGN[what]
    refused(put(f"x{suffix}", data), *shown)


@pytest.mark.parametrize("what", [*FOREIGN])
def test_foreign_data_in_a_pipe_is_named(what):
    data, shown = FOREIGN[what]
    with piped(data):
        refused("-", *shown)


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix != ".safetensors"])
@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_files(put, what, suffix):
    data, shown = UNKNOWN[what]
    refused(put(f"x{suffix}", data), shown, "a .npy, .npz or .safetensors file")


@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_files_called_safetensors(put, what):
    refused(put("x.safetensors", UNKNOWN[what][0]))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_content_decides(put, suffix):
    npy = io.BytesIO()
    np.save(npy, X)
    npz = io.BytesIO()
    np.savez(npz, x=X)
    for data in (npy.getvalue(), npz.getvalue(), safetensors.numpy.save({"x": X})):
        assert_same(read(put(f"x{suffix}", data)), X)


@pytest.mark.parametrize("length", [0x8B1F, 0x0280, 0x0580, 0x5D])
def test_safetensors_whose_header_length_looks_like_another_magic(put, length):
    """The first bytes are those of gzip, of pickles, and a bracket."""
    entry = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
    header = json.dumps({"x": entry}).encode().ljust(length)
    assert len(header) == length
    data = length.to_bytes(8, "little") + header + X.tobytes()
    assert_same(read(put("x", data)), X)


@pytest.mark.parametrize("code", range(256))
def test_every_first_byte_is_told_or_refused(code):
    head = bytes((code,)) + bytes(20)
    with pytest.raises(FormatError) as caught:
        told_format("x.npy", "x.npy", head)
    checked(caught.value, "x.npy")
    assert told_format("x", "x.safetensors", head) == "safetensors"
