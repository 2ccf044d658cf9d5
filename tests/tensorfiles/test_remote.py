"""Files on other machines: the same tensors, few bytes, and what is said of servers that misbehave."""

import contextlib
import datetime
import importlib.util
import io
import ipaddress
import json
import ssl
import sys

import numpy as np
import pytest
import servers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from layernorm_cli.errors import FormatError, InputError, MissingEngine, UsageError
from layernorm_cli.tensorfiles import remote
from layernorm_cli.tensorfiles.bytes_at import (
    list_dir,
    open_source,
    read_ranges,
    read_small,
    size_of,
)
from layernorm_cli.tensorfiles.reader import open_tensor
from layernorm_cli.tensorfiles.remote import RemoteFile

from .conftest import assert_same, checked, quick, read, read_blocks, refused, sample

needs_extra = [
    pytest.mark.remote,
    pytest.mark.skipif(importlib.util.find_spec("fsspec") is None, reason="no fsspec"),
]
needs = {
    "nginx": pytest.mark.skipif(servers.NGINX is None, reason="no nginx"),
    "s3": pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="no moto"),
}
X = sample("float32", (300, 97))
NAMES = {"a": X, "h.0.ln.weight": sample("bfloat16", (97,)), "zero": sample("float64", (0, 3))}


def remotely(*others):
    return lambda test: [mark(test) for mark in (*needs_extra, *others)][-1]


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(save_npz, **arrays):
    file = io.BytesIO()
    save_npz(file, **arrays)
    return file.getvalue()


FILES = {
    "c.npy": (npy(X), None),
    "fortran.npy": (npy(np.asfortranarray(X)), None),
    "fortran3.npy": (npy(np.asfortranarray(X.reshape(10, 30, 97))), None),
    "small.npy": (npy(X[:2]), None),
    "stored.npz": (npz(np.savez, a=X, b=X[:3]), "a"),
    "deflated.npz": (npz(np.savez_compressed, a=X, b=X[:3]), "a"),
    "m.safetensors": (save(NAMES), "a"),
}


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in servers.NO_PROXIES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    with servers.serving() as running:
        yield running


@pytest.fixture
def hurried(monkeypatch):
    """Short of patience, so that the tests are quick."""
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(remote, "SILENCE", 0.3)
    monkeypatch.setattr(remote, "CONNECT", 0.3)
    monkeypatch.setattr(remote, "SLOWEST", 1 << 30)


@pytest.fixture(scope="module")
def bucket():
    """Puts bytes into a bucket of S3; gives the address."""
    import fsspec

    with servers.s3() as variables, pytest.MonkeyPatch.context() as patch:
        for name in servers.NO_PROXIES:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        system.mkdir("bucket")

        def put(name, data):
            system.pipe_file(f"bucket/{name}", data)
            return f"s3://bucket/{name}"

        yield put


@pytest.fixture
def place(request, tmp_path, kind):
    """Puts bytes on a server of a kind; gives the address."""
    if kind == "memory":
        import fsspec

        system = fsspec.filesystem("memory")

        def put(name, data):
            system.pipe_file(f"/d/{name}", data)
            return f"memory://d/{name}"

        yield put
        system.store.clear()
    elif kind == "http":
        yield request.getfixturevalue("server").put
    elif kind == "s3":
        yield request.getfixturevalue("bucket")
    else:
        with servers.nginx(tmp_path) as (address, _):

            def put(name, data):
                (tmp_path / "www" / name).write_bytes(data)
                return f"{address}/{name}"

            yield put


kinds = pytest.mark.parametrize(
    "kind",
    [
        "memory",
        "http",
        pytest.param("s3", marks=needs["s3"]),
        pytest.param("nginx", marks=needs["nginx"]),
    ],
)


@remotely(kinds)
def test_the_same_tensors(place, tmp_path):
    for file, (data, name) in FILES.items():
        (tmp_path / file).write_bytes(data)
        ending = f"#{name}" if name else ""
        address = place(file, data) + ending
        assert_same(read(address), read(f"{tmp_path / file}{ending}"))
        for axis in (-1, -2):
            found, tensor = read_blocks(address, 77, axis)
            expected, local = read_blocks(f"{tmp_path / file}{ending}", 77, axis)
            assert_same(found, expected)
            assert (tensor.name, tensor.shape, tensor.dtype) == (local.name, local.shape, local.dtype)


@remotely(kinds)
def test_every_tensor_of_a_file(place):
    address = place("m.safetensors", save(NAMES))
    for name, array in NAMES.items():
        assert_same(read(f"{address}#{name}"), array)
    refused(f"{address}#nosuch", "no tensor 'nosuch'", "h.0.ln.weight", kind=InputError)
    refused(address, "3 tensors in the file", f"{address}#NAME", kind=InputError)


@remotely(kinds)
def test_what_is_not_there(place):
    address = place("x.npy", npy(X))
    refused(f"{address}.gone", f"{address}.gone: no such file", kind=InputError)
    assert read_small(f"{address}.gone") is None


@remotely(kinds)
@pytest.mark.parametrize("size", [0, 1, remote.HEAD - 1, remote.HEAD, remote.HEAD + 1])
def test_sizes(place, size):
    data = np.random.default_rng(0).bytes(size)
    address = place(f"of-{size}", data)
    assert read_small(address) == data
    with open_source(address) as source:
        assert size_of(source) == size


@remotely(pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=needs["s3"])]))
def test_listing(place):
    address = place("folder/b", b"b")
    place("folder/a", b"a")
    folder = address.rpartition("/")[0]
    assert list_dir(folder) == ["a", "b"]
    assert list_dir(f"{folder}/") == ["a", "b"]
    assert list_dir(address) is None
    assert list_dir(f"{folder}/nosuch") is None
    refused(folder, "is a directory", kind=InputError)


@remotely()
def test_http_has_no_listing(server):
    assert list_dir(server.address) is None
    assert server.asked == []


# How much is fetched


def large_safetensors(layers, width):
    """A model of many layers; its matrices are zeros, and gamma of the last layer is 2 throughout."""
    header, end = {}, 0
    for layer in range(layers):
        for name, shape in (("mlp.weight", [width, 4 * width]), ("ln.weight", [width])):
            size = 4 * int(np.prod(shape))
            header[f"h.{layer}.{name}"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [end, end + size],
            }
            end += size
    text = json.dumps(header).encode()
    gamma = np.full(width, 2, "<f4").tobytes()
    return len(text).to_bytes(8, "little") + text + bytes(end - len(gamma)) + gamma


@remotely()
def test_gamma_of_a_large_checkpoint_takes_less_than_a_percent(server):
    data = large_safetensors(12, 600)
    assert len(data) > 60e6
    address = server.put("m.safetensors", data)
    assert_same(read(f"{address}#h.11.ln.weight"), np.full(600, 2, "<f4"))
    assert len(server.asked) == 2
    assert server.sent < len(data) / 100


@remotely(needs["nginx"])
def test_gamma_of_a_large_checkpoint_over_nginx(tmp_path):
    data = large_safetensors(12, 600)
    with servers.nginx(tmp_path) as (address, log):
        (tmp_path / "www/m.safetensors").write_bytes(data)
        assert_same(read(f"{address}/m.safetensors#h.11.ln.weight"), np.full(600, 2, "<f4"))
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    assert [status for status, *_ in lines] == ["206", "206"]
    assert sum(int(size) for _, size, _ in lines) < len(data) / 100


@remotely()
def test_ranges_are_exact(server):
    address = server.put("x", bytes(range(256)) * 1024)
    with open_source(address) as source:
        assert [asked.span for asked in server.asked] == [(0, remote.HEAD)]
        assert source.read(100_000, 3) == bytes([160, 161, 162])
        assert source.read(10, 5) == bytes(range(10, 15))
        assert len(source.read(remote.HEAD - 2, 5)) == 5
    assert [asked.span for asked in server.asked[1:]] == [
        (100_000, 100_003),
        (remote.HEAD, remote.HEAD + 3),
    ]


@remotely()
def test_neighbours_are_fetched_together(server):
    data = np.random.default_rng(0).bytes(1 << 20)
    address = server.put("x", data)
    ranges = [(900_000, 10), (500_000, 8), (500_100, 8), (500_000 + remote.GAP, 9), (5, 6), (500_004, 8)]
    with open_source(address) as source:
        server.forget()
        blocks = read_ranges(source, ranges, "x")
    assert blocks == [data[at : at + size] for at, size in ranges]
    spans = sorted(asked.span for asked in server.asked)
    assert spans == [(500_000, 500_009 + remote.GAP), (900_000, 900_010)]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 290), st.integers(0, 10)), max_size=12),
    gap=st.integers(0, 40),
    head=st.integers(0, 300),
)
@quick
def test_ranges_of_any_kind(ranges, gap, head):
    data = np.random.default_rng(0).bytes(300)
    fetched = []

    def fetch(offset, size):
        fetched.append((offset, size))
        assert size > 0
        return data[offset : offset + size]

    source = RemoteFile(300, data[:head], fetch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "GAP", gap)
        assert source.read_ranges(ranges) == [data[at : at + size] for at, size in ranges]
    for (_, size), (other, _) in zip(sorted(fetched), sorted(fetched)[1:], strict=False):
        assert other > size  # no two requests that should have been one


@remotely()
def test_rows_come_in_large_requests(server):
    array = np.zeros((3000, 768), "<f4")
    address = server.put("x.npy", npy(array))
    with open_tensor(address) as tensor:
        source = tensor.rows(1)
        assert not source.forkable
        assert not source.sequential
        least = source.least_rows * 768 * 4
        assert least == pytest.approx(1 << 22, rel=0.01)
        server.forget()
        source.read_rows(1000, 1000 + source.least_rows)
    assert len(server.asked) == 1
    assert server.sent == least


@remotely()
def test_columns_are_not_a_request_each(server):
    array = np.asfortranarray(np.random.default_rng(0).standard_normal((2000, 300)))
    address = server.put("x.npy", npy(array))
    found, _ = read_blocks(address, 500)
    assert_same(found, array)
    assert len(server.asked) <= 3
    assert server.sent <= array.nbytes + remote.HEAD


# Servers that misbehave

LARGE = npy(np.zeros((300, 97)))
ALWAYS = {
    "no ranges": (servers.without_ranges, 1, FormatError, "ignores range requests", "curl"),
    "login page": (servers.login_page, 1, FormatError, "an HTML page"),
    "no Content-Range": (servers.without_content_range, 1, FormatError, "another range: none"),
    "size not told": (servers.without_length, 1, FormatError, "another range: bytes 0-65535/*"),
    "another range": (servers.other(shift=1), 1, FormatError, "another range: bytes 1-"),
    "too short a range": (servers.other(less=1), 1, FormatError, "another range: bytes 0-65534/"),
    "breaks off": (servers.breaks_off, 3, InputError, "the connection broke off, 3 times"),
    "hangs up": (servers.hangs_up, 6, InputError, "the connection broke off, 3 times"),  # aiohttp's own
    "silent": (servers.silent, 3, InputError, "no answer", "3 tries"),
    "drips": (servers.drips, 3, InputError, "too slow", "3 tries"),
    "400": (servers.status(400), 1, InputError, "the server says 400 Bad Request"),
    "401": (servers.status(401), 1, InputError, "access denied: 401 Unauthorized", "credentials"),
    "403": (servers.status(403), 1, InputError, "access denied: 403 Forbidden", "credentials"),
    "404": (servers.status(404), 1, InputError, "no such file"),
    "410": (servers.status(410), 1, InputError, "no such file"),
    "416": (servers.status(416), 1, InputError, "the server says 416"),
    "429": (servers.status(429), 3, InputError, "429 Too Many Requests, 3 times"),
    "500": (servers.status(500), 3, InputError, "500 Internal Server Error, 3 times"),
    "503": (servers.status(503), 3, InputError, "503 Service Unavailable, 3 times"),
}


@remotely(pytest.mark.parametrize("trouble", ALWAYS))
def test_trouble_from_the_start(server, hurried, trouble):
    behave, tries, kind, *said = ALWAYS[trouble]
    address = server.put("x.npy", LARGE)
    server.always(behave)
    refused(address, *said, kind=kind)
    assert len(server.asked) == tries
    assert server.sent < 1 << 20


@remotely(pytest.mark.parametrize("trouble", ALWAYS))
def test_trouble_later(server, hurried, trouble):
    behave, tries, kind, *said = ALWAYS[trouble]
    address = server.put("x.npy", LARGE)
    with open_tensor(address) as tensor:
        server.always(behave)
        server.forget()
        with pytest.raises(kind) as caught:
            tensor.read()
    message = checked(caught.value, address)
    assert len(server.asked) == tries
    if "another range" not in message:
        checked(caught.value, address, *said)


PASSING = [trouble for trouble, (_, tries, *_) in ALWAYS.items() if tries > 1]


@remotely(pytest.mark.parametrize("trouble", PASSING))
def test_trouble_that_passes(server, hurried, trouble):
    behave = ALWAYS[trouble][0]
    address = server.put("x.npy", npy(X))
    server.once(behave, None, behave, behave)
    assert_same(read(address), X)
    assert len(server.asked) == 5


@remotely(pytest.mark.parametrize("change", [{"version": "new"}, {"size": 10**9}]))
def test_file_that_changes_while_it_is_read(server, change):
    address = server.put("x.npy", LARGE)
    server.once(None, servers.other(**change))
    with open_tensor(address) as tensor, pytest.raises(FormatError) as caught:
        tensor.read()
    checked(caught.value, address, "has changed while it was read")


@remotely()
def test_small_files_need_no_ranges(server):
    address = server.put("x.npy", npy(X[:3]))
    server.always(servers.without_ranges)
    assert_same(read(address), X[:3])


@remotely()
def test_truncated_file(server):
    address = server.put("x.npy", LARGE[:-8])
    refused(address, "truncated", f"{300 * 97 * 8} bytes")
    address = server.put("m.safetensors", save({"a": X})[:-1])
    refused(address, "truncated or incomplete")


@remotely()
def test_page_under_the_name_of_a_tensor(server):
    refused(server.put("x.npy", b"<!DOCTYPE html><html>log in</html>"), "an HTML or XML page")
    refused(server.put("x.npy", b"version https://git-lfs.github.com/spec/v1\nsize 5\n"), "git lfs pull")


@remotely()
def test_redirects(server):
    address = server.put("x.npy", npy(X))
    server.once(servers.redirect("/x.npy?token=secret"), None, servers.redirect("/x.npy"))
    assert_same(read(f"{server.address}/elsewhere"), X)
    assert address.endswith("/x.npy")
    server.always(servers.redirect("/round"))
    refused(f"{server.address}/round", kind=InputError)


def test_nobody_there(hurried):
    pytest.importorskip("aiohttp")
    address = f"http://127.0.0.1:{servers.free_port()}/x.npy"
    refused(address, "no connection: connection refused", "the network", kind=InputError)


@remotely(
    pytest.mark.parametrize(
        ("address", "said"),
        [
            ("https://nosuch.invalid/x.npy", "there is no host of this name"),
            ("https://127.0.0.1:99999/x.npy", "not a valid address"),
            ("https://[::1/x.npy", "not a valid address"),
            ("https:///x.npy", "not a valid address"),
        ],
    )
)
def test_addresses_of_nobody(address, said, hurried):
    refused(address, said, kind=InputError)


@remotely()
def test_protocols_that_nobody_speaks():
    with pytest.raises(UsageError) as caught, open_tensor("zzz://host/x.npy"):
        pass
    checked(caught.value, "zzz://host/x.npy", "zzz", "https://, s3://, hf://")


def self_signed(folder):
    """A certificate for 127.0.0.1 that nobody has reason to trust."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


@remotely()
def test_tls(tmp_path, hurried, server):
    pytest.importorskip("cryptography")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path))
    with servers.serving(lambda plain: context.wrap_socket(plain, server_side=True)) as secure:
        address = secure.put("x.npy", npy(X)).replace("http:", "https:")
        refused(address, "certificate is not trusted", "self-signed certificate", kind=InputError)
        assert secure.asked == []
    plain = server.put("x.npy", npy(X)).replace("http:", "https:")
    refused(plain, "no TLS connection", kind=InputError)


# Addresses


@remotely()
def test_signed_addresses_stay_as_they_are(server):
    server.put("a%20b/x.npy", npy(X))
    query = "sig=a%2Fb%3D&path=x%20y+z&empty="
    assert_same(read(f"{server.address}/a%20b/x.npy?{query}"), X)
    assert {asked.target for asked in server.asked} == {f"/a%20b/x.npy?{query}"}


@remotely()
def test_names_with_spaces_are_quoted(server):
    server.put("a%20b.npy", npy(X))
    assert_same(read(f"{server.address}/a b.npy"), X)


@remotely()
def test_password_goes_to_the_server_and_nowhere_else(server):
    server.put("x.npy", npy(X))
    address = f"{server.address}/x.npy?sig=hush".replace("//", "//me:secret@")
    with open_tensor(address) as tensor:
        assert_same(tensor.read(), X)
        assert "secret" not in tensor.ref
        assert "hush" not in tensor.ref
    assert all(asked.headers["Authorization"].startswith("Basic ") for asked in server.asked)
    for trouble in (servers.status(403), servers.status(400), servers.without_ranges):
        server.always(trouble)
        with pytest.raises(InputError) as caught, open_tensor(f"{address}#name"):
            pass
        message = str(caught.value)
        assert "secret" not in message
        assert "hush" not in message
        assert message.startswith(f"{server.address}/x.npy?...#name: ".replace("//", "//***@"))


@remotely()
def test_proxies_of_the_environment(server, monkeypatch):
    server.files["/x.npy"] = npy(X)
    monkeypatch.setenv("HTTP_PROXY", server.address)
    assert_same(read("http://host.invalid/x.npy"), X)
    assert {asked.target for asked in server.asked} == {"http://host.invalid/x.npy"}
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{servers.free_port()}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert_same(read(f"{server.address}/x.npy"), X)


@remotely()
def test_nothing_is_compressed_on_the_way(server):
    read(server.put("x.npy", npy(X)))
    assert {asked.headers["Accept-Encoding"] for asked in server.asked} == {"identity"}


@pytest.mark.parametrize("address", ["https://host/x.npy", "s3://bucket/x.npy", "hf://org/repo/x.npy"])
def test_without_the_extra(monkeypatch, address):
    for module in [name for name in sys.modules if name.partition(".")[0] in ("fsspec", "aiohttp")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingEngine) as caught, open_tensor(address):
        pass
    checked(caught.value, address, "not installed", "pip install 'layernorm[remote]'")
    assert caught.value.exit_code == 4


@remotely(needs["s3"])
def test_s3_without_credentials_or_bucket(bucket, monkeypatch, tmp_path, hurried):
    import fsspec

    address = bucket("x.npy", npy(X))
    refused("s3://nosuchbucket/x.npy", "no such file", kind=InputError)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(fsspec.get_filesystem_class("s3").clear_instance_cache)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        refused(address, "access denied", "FSSPEC_S3_ANON=true", kind=InputError)
