"""The format of a file, told by its first bytes: ours, or one that often lies under a wrong name."""

from __future__ import annotations

import re
from typing import Literal

from ..errors import FormatError

__all__ = ["HEAD_SIZE", "Format", "told_format"]

Format = Literal["npy", "npz", "safetensors"]
HEAD_SIZE = 512
EXPECTED = "a .npy, .npz or .safetensors file"

_FOREIGN = (
    (b"GGUF", "a GGUF file", "the model's safetensors files"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "exporting the tensor with numpy.save"),
    (b"\x1f\x8b", "gzip-compressed data", "gunzip first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data", "unzstd first"),
    (b"BZh", "bzip2-compressed data", "bunzip2 first"),
    (b"\xfd7zXZ\x00", "xz-compressed data", "unxz first"),
    (b"PAR1", "a Parquet file", "exporting the tensor with numpy.save"),
    (b"\x93NUMP", "a damaged npy file (its magic is not \\x93NUMPY)", "fetching the file again"),
)


def told_format(where: str, path: str, head: bytes) -> Format:
    """Return the format of a file with these first bytes; the suffix of path only decides in doubt.

    Raises FormatError that names what the file is instead, if it is none of ours.
    """
    if not head:
        raise FormatError(where, "truncated or incomplete: the file is empty", EXPECTED)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "npz"
    if head[4:9] == b"\0\0\0\0{":  # a header length may look like the magics below
        return "safetensors"
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
        whole = f" (the data has {size[1].decode()} bytes)" if size else ""
        raise FormatError(where, f"a Git LFS pointer, not the data{whole}", EXPECTED, "git lfs pull")
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, re.IGNORECASE):
        raise FormatError(where, "an HTML or XML page", EXPECTED, "fetching the file itself")
    for magic, what, hint in _FOREIGN:
        if head.startswith(magic):
            raise FormatError(where, what, EXPECTED, hint)
    if re.match(rb"\x80[\x02-\x05]", head):
        raise FormatError(
            where,
            "a pickle, which layernorm never loads: it could run code",
            EXPECTED,
            "saving it with safetensors or numpy.save where you trust it",
        )
    if path.endswith(".safetensors"):
        return "safetensors"
    what = "text" if _is_text(head) else "not in a format that layernorm reads"
    raise FormatError(where, f"{what}, beginning {head[:16]!r}", EXPECTED)


def _is_text(head: bytes) -> bool:
    text = head.decode("utf-8", errors="ignore")
    return len(text.encode()) > len(head) - 4 and all(c.isprintable() or c.isspace() for c in text)
