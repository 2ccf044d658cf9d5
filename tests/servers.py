"""Servers on the loopback: HTTP that can misbehave in many ways, nginx, S3, a Hugging Face hub."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

PROXIES = [f"{name}_proxy" for name in ("http", "https", "all", "no")]
NO_PROXIES = [*PROXIES, *map(str.upper, PROXIES)]
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PATIENCE = 30


class Asked(NamedTuple):
    """A request as the server saw it."""

    method: str
    target: str
    headers: dict

    @property
    def span(self):
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return match and (int(match[1]), int(match[2]) + 1)


class Server(ThreadingHTTPServer):
    """Serves files by their path in ranges; troubles has what to do instead, request by request.

    asked has the requests, sent the bytes of bodies.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.asked, self.sent = {}, [], 0
        self.stopping = threading.Event()
        self.always(None)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name, data):
        self.files[f"/{name}"] = data
        return f"{self.address}/{name}"

    def always(self, trouble):
        self.troubles = itertools.repeat(trouble)

    def once(self, *troubles):
        self.troubles = itertools.chain(troubles, itertools.repeat(None))

    def forget(self):
        self.asked, self.sent = [], 0

    def handle_error(self, request, client_address):
        pass  # a client that has gone


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        asked = Asked(self.command, self.path, dict(self.headers))
        self.server.asked.append(asked)
        trouble = next(self.server.troubles)
        (trouble or good)(self, asked)

    def answer(self, status, data=b"", declared=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data) if declared is None else declared))
        self.end_headers()
        self.body(data)

    def body(self, data):
        for at in range(0, len(data), 1 << 16):
            part = data[at : at + (1 << 16)]
            self.server.sent += len(part)  # before it arrives, and a test looks
            self.wfile.write(part)

    def file(self):
        return self.server.files.get(urlsplit(self.path).path)

    def hang_up(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def good(handler, asked, shift=0, size=None, version=None, less=0):
    """A range, as it should be; or with another start, size, version or end than true."""
    data = handler.file()
    if data is None:
        handler.answer(404, b"<html>not here</html>", Content_Type="text/html")
        return
    start, stop = asked.span
    stop = min(stop, len(data)) - less
    if start >= len(data):
        handler.answer(416, Content_Range=f"bytes */{len(data)}")
        return
    tag = hashlib.sha256(data[: 1 << 16]).hexdigest()[:8] if version is None else version
    handler.answer(
        206,
        bytes(data[start:stop]),
        Content_Range=f"bytes {start + shift}-{stop + shift - 1}/{size or len(data)}",
        ETag=f'"{tag}"',
    )


def other(**changes):
    return lambda handler, asked: good(handler, asked, **changes)


def without_ranges(handler, asked):
    handler.answer(200, bytes(handler.file()))


def without_length(handler, asked):
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {asked.span[0]}-{asked.span[1] - 1}/*")
    handler.end_headers()
    handler.hang_up()


def without_content_range(handler, asked):
    handler.answer(206, bytes(handler.file()[slice(*asked.span)]))


def breaks_off(handler, asked):
    """In the middle of the body."""
    data = bytes(handler.file()[slice(*asked.span)])
    start, size = asked.span[0], len(handler.file())
    handler.answer(
        206,
        data[: len(data) // 2],
        len(data),
        Content_Range=f"bytes {start}-{start + len(data) - 1}/{size}",
    )
    handler.hang_up()


def hangs_up(handler, asked):
    handler.hang_up()


def silent(handler, asked):
    handler.server.stopping.wait(PATIENCE)
    handler.hang_up()


def drips(handler, asked):
    """A byte now and then, for ever."""
    start, size = asked.span[0], len(handler.file())
    stop = min(asked.span[1], size)
    with contextlib.suppress(OSError):
        handler.answer(206, b"", stop - start, Content_Range=f"bytes {start}-{stop - 1}/{size}")
        while not handler.server.stopping.wait(0.05):
            handler.wfile.write(b"a")
            handler.wfile.flush()


def status(number):
    return lambda handler, asked: handler.answer(number, b"<html>no</html>", Content_Type="text/html")


def login_page(handler, asked):
    page = b"<!DOCTYPE html><html>log in</html>" * 5000
    handler.answer(200, page, Content_Type="text/html; charset=utf-8")


def redirect(target):
    return lambda handler, asked: handler.answer(302, Location=target)


@contextlib.contextmanager
def serving(wrap=None):
    """A Server that runs; wrap makes its socket one of TLS."""
    server = Server()
    if wrap is not None:
        server.socket = wrap(server.socket)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()


def hub(handler, asked):
    """What a Hugging Face hub says of the repository org/repo, its revision v1, and the files in it."""
    path = urlsplit(asked.target).path
    found = re.fullmatch(r"/org/repo/resolve/v1(/.*)", path)
    if path == "/api/models/org/repo/revision/v1":
        said = {"id": "org/repo", "sha": "1" * 40, "siblings": []}
    elif path.startswith("/api/models/org/repo/tree/v1"):
        folder = path.removeprefix("/api/models/org/repo/tree/v1").strip("/")
        said = [
            {"type": "file", "path": name[1:], "size": len(data), "oid": "0" * 40}
            for name, data in handler.server.files.items()
            if os.path.dirname(name).strip("/") == folder
        ]
    elif found:
        handler.path = found[1]
        span = handler.headers["range"].removeprefix("bytes=")
        good(handler, asked._replace(headers={"Range": f"bytes={span}"}))
        return
    else:
        handler.answer(404, X_Error_Code="RepoNotFound")
        return
    handler.answer(200, json.dumps(said).encode(), Content_Type="application/json")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def process_on(port, *command, **options):
    """A server in a process of its own, from when it takes connections on."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, f"{command[0]} has ended"
            assert time.monotonic() < deadline, f"{command[0]} does not start"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


@contextlib.contextmanager
def nginx(folder):
    """nginx with the files of folder/www; ranges are off under /whole/. Gives its address and log."""
    port, www = free_port(), folder / "www"
    www.mkdir()
    places = " ".join(
        f"{name}_temp_path {folder}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; daemon off; master_process off; error_log {folder}/errors; events {{}}\n"
        f"http {{ {places} log_format sent '$status $body_bytes_sent $http_range';"
        f" access_log {folder}/log sent;\n"
        f" server {{ listen 127.0.0.1:{port}; root {www};"
        f" location /whole/ {{ alias {www}/; max_ranges 0; }} }} }}\n"
    )
    with process_on(port, NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")):
        yield f"http://127.0.0.1:{port}", folder / "log"


@contextlib.contextmanager
def s3():
    """moto's S3; gives the variables that lead there."""
    port = free_port()
    command = Path(sys.executable).with_name("moto_server")
    with process_on(port, str(command), "-H", "127.0.0.1", "-p", str(port)):
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
