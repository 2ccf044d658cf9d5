"""Members of an npz archive: stored ones are read where they lie, deflated ones unpacked whole."""

from __future__ import annotations

import contextlib
import lzma
import zipfile
import zlib

from ..errors import FormatError
from .bytes_at import Source, as_file, read_upto, size_of
from .exact_io import CHUNK, open_spool, write_next
from .refs import Ref, find_name

__all__ = ["member_names", "open_member"]

LOCAL_HEADER = 30
DAMAGED = (  # what zipfile raises for a broken archive, some of it not on purpose
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    OverflowError,
    ValueError,
)


def open_member(source: Source, ref: Ref, files: contextlib.ExitStack) -> tuple[Source, int, int, str]:
    """Return where the npy of a member is: source, first byte, size in bytes, and the name.

    Deflated members go through an unnamed file, so that memory does not depend on their size.

    Raises FormatError for an archive without npy members (a PyTorch checkpoint, say) or a broken one.
    """
    try:
        archive, members = _open_archive(source, ref.file, files)
        name = find_name(ref, members)
        info = members[name]
        if info.flag_bits & 1:
            raise FormatError(ref.text, "an encrypted zip member", "a plain one")
        if info.compress_type == zipfile.ZIP_STORED:
            return source, _data_offset(source, info, ref), info.file_size, name
        spool = open_spool(files)
        with archive.open(info) as member:
            while data := member.read(CHUNK):
                write_next(spool, memoryview(data))
        return spool, 0, size_of(spool), name
    except DAMAGED as error:
        raise _damaged(ref.text, error) from None


def member_names(source: Source, where: str) -> list[str]:
    """Return the names of the arrays in an archive; Raises FormatError as open_member does."""
    with contextlib.ExitStack() as files:
        try:
            return list(_open_archive(source, where, files)[1])
        except DAMAGED as error:
            raise _damaged(where, error) from None


def _open_archive(
    source: Source, where: str, files: contextlib.ExitStack
) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
    file = files.enter_context(as_file(source))
    archive = files.enter_context(zipfile.ZipFile(file))
    members = {
        info.filename.removesuffix(".npy"): info
        for info in archive.infolist()
        if info.filename.endswith(".npy")
    }
    if not members:
        raise FormatError(where, _what(archive), "an npz archive of .npy members")
    return archive, members


def _damaged(where: str, error: Exception) -> FormatError:
    return FormatError(where, f"a damaged npz archive: {error}", None, "fetching the file again")


def _what(archive: zipfile.ZipFile) -> str:
    if any(name.endswith("data.pkl") for name in archive.namelist()):
        return "a PyTorch checkpoint: a zip archive with pickles, which layernorm never loads"
    return "a zip archive without .npy members"


def _data_offset(source: Source, info: zipfile.ZipInfo, ref: Ref) -> int:
    """The first byte of a stored member, behind its local header and the names in that."""
    header = read_upto(source, LOCAL_HEADER, info.header_offset)
    if len(header) < LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise FormatError(ref.text, "a damaged npz archive: no local header", "PK\\x03\\x04")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    offset = info.header_offset + LOCAL_HEADER + names
    if offset + info.file_size > size_of(source):
        raise FormatError(
            ref.text, "a damaged npz archive: the member ends behind the file", "a whole one"
        )
    return offset
