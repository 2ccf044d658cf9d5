"""Files on other machines, read in exact ranges and written whole; the only import of fsspec, and late.

Over HTTP the ranges are asked for here, through fsspec's session: its own reading takes the whole body
of a server that ignores ranges.

Source: RFC 9110, section 14 (range requests).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import (
    FormatError,
    InputError,
    LayernormError,
    MissingEngine,
    OutputError,
    UsageError,
)
from .refs import without_secrets

__all__ = [
    "RemoteFile",
    "Version",
    "check_upload",
    "find_remote",
    "label_of",
    "list_remote",
    "open_remote",
    "upload",
    "version_of",
]

HEAD = 1 << 16  # the first request: the headers of most files, and all of small ones
GAP = 1 << 16  # what lies between two ranges costs less than a request of its own
AT_ONCE = 8
PAUSES = (0.25, 1.0)  # before the second and the third try
CONNECT = 10.0  # seconds
SILENCE = 20.0
SLOWEST = 1 << 14  # bytes per second
PART = 8 << 20  # bytes of an upload that are held in memory
MOST_PARTS = 9000  # S3 allows 10,000
PARTS_AT_ONCE = 2
LABEL = "layernorm"
NETWORK = "checking the address and the network"
PRIVATE = "checking the name; for a private repository, hf auth login first"
INSTALL = "pip install 'layernorm[remote]'"

Result = TypeVar("Result")


class RemoteFile(NamedTuple):
    """A file elsewhere: its size, its first bytes, and fetch(offset, size) for the others."""

    size: int
    head: bytes
    fetch: Callable[[int, int], bytes]

    def read(self, offset: int, size: int) -> bytes:
        """Return size bytes at offset, which must lie in the file."""
        known = self.head[offset : offset + size]
        rest = size - len(known)
        return known + self.fetch(offset + len(known), rest) if rest else known

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many (offset, size): neighbours together, and several at once."""
        from concurrent.futures import ThreadPoolExecutor

        spans = _merged(ranges)
        with ThreadPoolExecutor(min(AT_ONCE, max(1, len(spans)))) as pool:
            blocks = list(pool.map(lambda span: self.read(span[0], span[1] - span[0]), spans))
        found: dict[tuple[int, int], bytes] = {}
        at = 0
        for offset, size in sorted(ranges):
            while spans[at][1] < offset + size:
                at += 1
            start = offset - spans[at][0]
            found[offset, size] = blocks[at][start : start + size]
        return [found[offset, size] for offset, size in ranges]


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (start, stop) that cover these (offset, size), less gaps that are worth a request."""
    spans: list[tuple[int, int]] = []
    for offset, size in sorted(ranges):
        if spans and offset <= spans[-1][1] + GAP:
            spans[-1] = spans[-1][0], max(spans[-1][1], offset + size)
        else:
            spans.append((offset, offset + size))
    return spans


def open_remote(path: str, where: str) -> RemoteFile:
    """Ask for a file's size and first bytes.

    Raises InputError in the name of where (caused by a FileNotFoundError where there is no such file,
    by a PermissionError where it is kept from us), FormatError where the server cannot do ranges or
    the file changes while it is read, MissingEngine without the extra, UsageError for a protocol that
    does not exist.
    """
    system, inner = _file_system(path, where)
    return _http_file(system, path, where) if _is_http(path) else _other_file(system, inner, where)


def list_remote(path: str) -> list[str] | None:
    """Return the sorted names in a remote directory, None where it is none; HTTP has none."""
    if _is_http(path):
        return None
    where = without_secrets(path)
    system, inner = _file_system(path, where)

    def names() -> list[str] | None:
        if not system.isdir(inner):
            return None
        return sorted(name.rstrip("/").rpartition("/")[2] for name in system.ls(inner, detail=False))

    return _retried(names, where)


class Version(NamedTuple):
    """A remote file at a moment: its size in bytes, and what changes with it; "" if nothing tells."""

    size: int
    token: str


def version_of(path: str) -> Version | None:
    """Return the version of a remote file, None where there is none; Raises InputError."""
    where = without_secrets(path)
    system, inner = _file_system(path, where)

    def look() -> Version | None:
        try:
            return _version(system.info(inner))
        except FileNotFoundError:
            return None

    return _retried(look, where)


def find_remote(path: str) -> dict[str, Version] | None:
    """Return all files below a remote directory, by their path there; None where there is none."""
    if _is_http(path):
        return None
    where = without_secrets(path)
    system, inner = _file_system(path, where)

    def look() -> dict[str, Version] | None:
        root = str(system._strip_protocol(inner)).rstrip("/")
        found = system.find(root, detail=True)
        files = {
            name[len(root) + 1 :]: _version(info)
            for name, info in found.items()
            if name.startswith(f"{root}/") and not name.endswith("/")
        }
        return files or None

    return _retried(look, where)


def _version(info: dict[str, Any]) -> Version:
    told = next((info[key] for key in ("ETag", "etag", "LastModified", "mtime") if info.get(key)), "")
    return Version(int(info.get("size") or 0), str(told).strip('"'))


def check_upload(path: str, force: bool) -> None:
    """Raise UsageError for what is there already, and where nothing can be written."""
    where = without_secrets(path)
    if _is_http(path) or path.startswith("hf://"):
        raise UsageError(where, "nothing is written to such addresses", "a file, or s3://BUCKET/NAME")
    if not force and version_of(path) is not None:
        raise UsageError(where, "exists already", "a new name", "--force to replace it")


def upload(path: str, file: str, size: int, label: str | None = None) -> None:
    """Put a file of this machine there; it is seen when it is whole, in place of what was there.

    label is kept beside an object of S3. Raises OutputError.
    """
    where = without_secrets(path)
    system, inner = _file_system(path, where)
    options: dict[str, Any] = {}
    if _is_s3(path):
        options = {"chunksize": max(PART, -(-size // MOST_PARTS)), "max_concurrency": PARTS_AT_ONCE}
        options |= {} if label is None else {"Metadata": {LABEL: label}}
    try:
        _retried(lambda: system.put_file(file, inner, **options), where)
    except InputError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        found = "its bucket or directory does not exist" if missing else error.found
        raise OutputError(error.where, found, error.expected, error.hint) from error


def label_of(path: str) -> str | None:
    """Return the label of an object of S3; None without one, and elsewhere."""
    if not _is_s3(path):
        return None
    where = without_secrets(path)
    system, inner = _file_system(path, where)

    def look() -> str | None:
        try:
            label = system.metadata(inner, refresh=True).get(LABEL)
        except FileNotFoundError:
            return None
        return None if label is None else str(label)

    return _retried(look, where)


def _is_s3(path: str) -> bool:
    return path.lower().startswith(("s3://", "s3a://"))


def _is_http(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def _file_system(path: str, where: str) -> tuple[Any, str]:
    """The file system for an address, and the path in it."""
    try:
        import fsspec

        if _is_http(path):  # the environment's proxies and ~/.netrc hold, as for curl
            return fsspec.filesystem("http", client_kwargs={"trust_env": True}), path
        protocol = path.partition("://")[0]
        limits = {"connect_timeout": CONNECT, "read_timeout": SILENCE}
        options = {"config_kwargs": limits} if protocol in ("s3", "s3a") else {}
        system, inner = fsspec.core.url_to_fs(path, **options)
    except ImportError as error:
        ours = _is_http(path) or path.startswith(("s3:", "s3a:", "hf:")) or error.name == "fsspec"
        what = "what reads such addresses is not installed" if ours else _first_line(error)
        raise MissingEngine(where, what, None, INSTALL if ours else None) from error
    except ValueError as error:
        what = str(error).splitlines()[0]
        raise UsageError(where, what, "https://, s3://, hf:// or another of fsspec's") from error
    return system, inner


def _retried(attempt: Callable[[], Result], where: str) -> Result:
    """Try up to three times, as long as what fails may pass; Raises InputError that says what failed."""
    for pause in (*PAUSES, None):
        try:
            return attempt()
        except LayernormError:
            raise
        except Exception as error:  # whatever the libraries of many protocols raise
            if pause is None or not _may_pass(error):
                raise _explained(error, where) from error
            time.sleep(pause)
    raise AssertionError


class _ServerError(Exception):
    """A status that says: not now."""


def _may_pass(error: Exception) -> bool:
    import aiohttp

    lasting = (aiohttp.ClientConnectorDNSError, aiohttp.ClientSSLError)
    passing = (
        _ServerError,
        ConnectionError,
        TimeoutError,
        EOFError,
        aiohttp.ClientConnectionError,
        aiohttp.ClientPayloadError,
    )
    return isinstance(error, passing) and not isinstance(error, lasting)


def _explained(error: Exception, where: str) -> InputError:
    import aiohttp

    tries = len(PAUSES) + 1
    expected, hint = None, None
    match error:
        case FileNotFoundError():
            found, hint = "no such file", PRIVATE if where.startswith("hf:") else None
        case IsADirectoryError():
            found, expected = "is a directory", "a file"
        case TimeoutError():
            found, hint = f"no answer, or too slow a one, in {tries} tries", NETWORK
        case aiohttp.ClientConnectorDNSError():
            found, hint = "there is no host of this name", NETWORK
        case aiohttp.ClientConnectorCertificateError():
            found = f"the server's certificate is not trusted: {error.certificate_error}"
        case aiohttp.ClientSSLError():
            found, hint = f"no TLS connection: {error.os_error.strerror or error.os_error}", NETWORK
        case aiohttp.ClientConnectorError():
            why = os.strerror(error.errno) if error.errno else str(error.os_error)
            found, hint = f"no connection: {why.lower()}", NETWORK
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | EOFError():
            found, hint = f"the connection broke off, {tries} times", "again later"
        case aiohttp.InvalidURL():
            found, expected = "not a valid address", "https://HOST/PATH"
        case _ if _is_denial(error):
            found, hint = f"access denied: {_first_line(error)}", _credentials(where)
        case _:
            found = _first_line(error)
    return InputError(where, found, expected, hint)


def _is_denial(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    denied = isinstance(error, PermissionError) or status in (401, 403)
    return denied or "Credentials" in type(error).__name__


def _first_line(error: Exception) -> str:
    """What an exception says, without the secrets of addresses in it."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"\w+://\S+", lambda match: without_secrets(match[0]), text)[:300]


def _credentials(where: str) -> str:
    if where.startswith("s3"):
        return "credentials as for the aws command; FSSPEC_S3_ANON=true for a public bucket"
    if where.startswith("hf"):
        return "hf auth login, or a token in HF_TOKEN"
    return "credentials in ~/.netrc, a fresh signed address, or checking its spelling"


def _other_file(system: Any, path: str, where: str) -> RemoteFile:
    """A file of one of fsspec's file systems."""
    from fsspec.spec import AbstractFileSystem

    own = system.async_impl or type(system).cat_file is not AbstractFileSystem.cat_file
    options = {} if own else {"cache_type": "none"}  # or it reads megabytes ahead

    def size() -> int:
        info = system.info(path)
        if info.get("type") == "directory":
            raise IsADirectoryError(path)
        return int(info["size"])

    def fetch(offset: int, count: int) -> bytes:
        def attempt() -> bytes:
            data = system.cat_file(path, start=offset, end=offset + count, **options)
            if len(data) > count:
                raise FormatError(where, "more bytes came than were asked for", f"{count} bytes")
            if len(data) < count:
                raise EOFError(f"{len(data)} bytes of {count}")
            return bytes(data)

        return _retried(attempt, where)

    whole = _retried(size, where)
    return RemoteFile(whole, fetch(0, min(HEAD, whole)) if whole else b"", fetch)


class _Answer(NamedTuple):
    data: bytes
    size: int
    version: str | None


def _http_file(system: Any, url: str, where: str) -> RemoteFile:
    """A file behind an http address; each answer must be of the same version as the first."""
    from fsspec.asyn import sync
    from yarl import URL

    try:
        address = URL(url, encoded="%" in url)  # another spelling would break a signature
    except ValueError as error:
        raise InputError(where, f"not a valid address: {error}", "https://HOST/PATH") from error

    def ask(offset: int, count: int) -> _Answer:
        def attempt() -> _Answer:
            answer: _Answer = sync(system.loop, _ask, system, address, offset, count, where)
            return answer

        return _retried(attempt, where)

    first = ask(0, HEAD)

    def fetch(offset: int, count: int) -> bytes:
        answer = ask(offset, count)
        if (answer.size, answer.version) != (first.size, first.version):
            raise FormatError(
                where, "has changed while it was read", "the same file", "reading it again"
            )
        return answer.data

    return RemoteFile(first.size, first.data, fetch)


async def _ask(system: Any, address: Any, offset: int, count: int, where: str) -> _Answer:
    """One range request; Raises what _retried knows."""
    import aiohttp

    session = await system.set_session()
    headers = {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)
    async with (
        asyncio.timeout(SILENCE + count / SLOWEST),
        session.get(address, headers=headers, timeout=limits) as answer,
    ):
        size, expected = _sizes(answer, offset, count, where)
        data = await answer.content.readexactly(expected) if expected else b""
    etag = answer.headers.get("ETag", "")
    return _Answer(data, size, etag if etag.startswith('"') else None)


def _sizes(answer: Any, offset: int, count: int, where: str) -> tuple[int, int]:
    """The size of the whole file, and how many bytes of it are coming."""
    status, what = answer.status, f"{answer.status} {answer.reason or ''}".rstrip()
    length = answer.headers.get("Content-Length", "")
    if status in (404, 410):
        raise FileNotFoundError(what)
    if status in (401, 403, 407):
        raise PermissionError(what)
    if status in (408, 425, 429) or status >= 500:
        raise _ServerError(f"the server says {what}, {len(PAUSES) + 1} times")
    if status == 200:
        if offset == 0 and length.isdecimal() and int(length) <= count:
            return int(length), int(length)  # small, and whole
        if answer.content_type == "text/html":
            raise FormatError(where, "an HTML page", "a tensor file", "the address of the file itself")
        raise FormatError(
            where,
            "the server ignores range requests and sends the whole file",
            "a server with range requests (206 Partial Content)",
            "downloading the file first, with curl for instance",
        )
    given = answer.headers.get("Content-Range", "")
    if status == 416 and offset == 0 and re.fullmatch(r"bytes \*/0", given):
        return 0, 0
    if status != 206:
        raise InputError(where, f"the server says {what}", "206 Partial Content")
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", given)
    if match:
        start, end, size = int(match[1]), int(match[2]) + 1, int(match[3])
        if start == offset and end == min(offset + count, size):
            return size, end - start
    wanted = f"bytes {offset}-{offset + count - 1}/SIZE"
    raise FormatError(where, f"the server sent another range: {given or 'none'}"[:120], wanted)
