"""Refs: taking them apart, and which tensor of a file they mean."""

import os

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import InputError, UsageError
from layernorm_cli.tensorfiles.reader import open_tensor
from layernorm_cli.tensorfiles.refs import Ref, find_name, find_names, is_address, parse_ref

from .conftest import X, assert_same, checked, quick, read, refused

NAMES = ["h.0.ln_1.weight", "h.0.ln_1.bias", "h.1.ln_1.weight", "ln_f.weight", "wte"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "path", "name"),
    [
        ("x.npy", "x.npy", None),
        ("-", "-", None),
        ("folder/x.npz", "folder/x.npz", None),
        ("x.npz#a", "x.npz", "a"),
        ("x.npz#a#b", "x.npz", "a#b"),
        ("x.npz##", "x.npz", "#"),
        ("-#a", "-", "a"),
        ("model.safetensors#h.0.ln_1.weight", "model.safetensors", "h.0.ln_1.weight"),
    ],
)
def test_parts(here, text, path, name):
    assert parse_ref(text) == Ref(text, path, name)


def test_literal_file_name_wins(here):
    np.save("a#b.npy", X)
    np.savez("a", **{"b.npy": -X})
    os.rename("a.npz", "a")
    assert parse_ref("a#b.npy") == Ref("a#b.npy", "a#b.npy")
    assert_same(read("a#b.npy"), X)
    os.remove("a#b.npy")
    assert_same(read("a#b.npy"), -X)


def test_longest_existing_file_wins(here):
    for path in ("a", "a#b", "a#b#c#d"):
        np.savez(path, **{"c": X, "b#c": -X, "e": 2 * X})
        os.rename(f"{path}.npz", path)
    assert_same(read("a#b#c"), X)
    assert_same(read("a#c"), X)
    assert_same(read("a#b#c#d#e"), 2 * X)
    os.remove("a#b")
    assert_same(read("a#b#c"), -X)


def test_missing_file_with_several_hashes(here):
    assert parse_ref("a#b#c") == Ref("a#b#c", "a", "b#c")
    refused("a#b#c", "a#b#c: no such file or directory", kind=InputError)


@pytest.mark.parametrize("text", ["", "#", "#a", "x.npz#"])
def test_empty_parts(here, text):
    with pytest.raises(UsageError, match="empty"):
        parse_ref(text)


ADDRESSES = [
    ("s3://bucket/x.npy", "s3://bucket/x.npy", None),
    ("https://host/x.npz#a", "https://host/x.npz", "a"),
    ("hf://org/repo@rev/m.safetensors#h.0.weight", "hf://org/repo@rev/m.safetensors", "h.0.weight"),
    ("https://host/x.npz?a=1&b=2#c#d", "https://host/x.npz?a=1&b=2", "c#d"),
    ("HTTP://host/x.npy", "HTTP://host/x.npy", None),
]


@pytest.mark.parametrize(("text", "path", "name"), ADDRESSES)
def test_addresses(text, path, name):
    ref = parse_ref(text)
    assert (ref.path, ref.name) == (path, name)


@pytest.mark.parametrize("text", ["https://", "s3://", "https://host/x#", "hf://#a"])
def test_incomplete_addresses(text):
    with pytest.raises(UsageError, match="empty"):
        parse_ref(text)


@pytest.mark.parametrize("text", ["a:/b", "://x", "1a://x", "a b://x", "x.npy#https://host/y", "-"])
def test_what_is_no_address(text):
    assert not is_address(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:secret@host/x.npy?sig=secret#a", "https://***@host/x.npy?...#a"),
        ("https://secret@host:8000/x.npy#a", "https://***@host:8000/x.npy#a"),
        ("http://host/x?sig=secret", "http://host/x?..."),
        ("https://host/x@y#a?b", "https://host/x@y#a?b"),
        ("https://host?sig=a@b", "https://host?..."),
        ("ftp://me:secret@host/x.npy", "ftp://***@host/x.npy"),
        ("s3://bucket/what?.npy", "s3://bucket/what?.npy"),
        ("hf://gpt2@main/x.npy", "hf://gpt2@main/x.npy"),
        ("me@host?x#a", "me@host?x#a"),
    ],
)
def test_no_secrets_in_messages(text, expected):
    ref = parse_ref(text)
    assert ref.text == expected
    assert ref.file == expected.partition("#")[0] if ref.name else expected
    assert "secret" not in ref.text + ref.file


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("wte", "wte"),
        ("h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("0.ln_1.weight", "h.0.ln_1.weight"),
        ("ln_f.weight", "ln_f.weight"),
        ("bias", "h.0.ln_1.bias"),
    ],
)
def test_exact_name_or_unique_ending(wanted, found):
    assert find_name(Ref("m#x", "m", wanted), NAMES) == found


def test_exact_name_wins_over_endings():
    assert find_name(Ref("m#x", "m", "b"), ["a.b", "b", "c.b"]) == "b"


def test_ending_behind_a_slash():
    assert find_name(Ref("m#x", "m", "b"), ["a/b", "c"]) == "a/b"


@pytest.mark.parametrize("wanted", ["te", "_1.bias", ".bias", "h.0", "WTE"])
def test_ending_must_begin_behind_a_dot(wanted):
    with pytest.raises(InputError, match="no tensor"):
        find_name(Ref(f"m#{wanted}", "m", wanted), NAMES)


def test_ambiguous_ending_lists_candidates():
    with pytest.raises(InputError) as caught:
        find_name(Ref("m#weight", "m", "weight"), NAMES)
    message = checked(caught.value, "m#weight", "3 tensors end so")
    assert message.endswith("one of: h.0.ln_1.weight, h.1.ln_1.weight, ln_f.weight")


def test_missing_name_lists_what_looks_alike():
    with pytest.raises(InputError) as caught:
        find_name(Ref("m#LN_1", "m", "LN_1"), NAMES)
    message = checked(caught.value, "m#LN_1", "no tensor 'LN_1' in m")
    assert message.endswith("one of: h.0.ln_1.weight, h.0.ln_1.bias, h.1.ln_1.weight")


def test_missing_name_lists_all_if_none_is_alike():
    with pytest.raises(InputError) as caught:
        find_name(Ref("m#x", "m", "x"), NAMES)
    assert str(caught.value).endswith(f"one of: {', '.join(NAMES)}")


def test_long_lists_are_cut():
    names = [f"t{i}" for i in range(100)]
    with pytest.raises(InputError) as caught:
        find_name(Ref("m", "m"), names)
    message = checked(caught.value, "m", "100 tensors in the file", "m#NAME with one of: t0, t1")
    assert message.endswith("t11 and 88 more")


@pytest.mark.parametrize("name", [None, "x"])
def test_no_tensors(name):
    with pytest.raises(InputError, match="no tensor"):
        find_name(Ref("m", "m", name), [])


def test_single_tensor():
    assert find_name(Ref("m", "m"), ["a.b"]) == "a.b"


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\rb", "a\u202eb", "a\x7fb", "a\0b"])
def test_control_characters_in_tensor_names_are_escaped(tmp_path, name):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({name: X, "c": X}, path)
    message = refused(path, "2 tensors in the file", kind=InputError)
    assert name not in message
    assert name.encode("unicode_escape").decode() in message
    assert all(c.isprintable() for c in message.replace("\n", ""))
    assert_same(read(f"{path}#{name}"), X)


@pytest.mark.parametrize("name", ["[red]a[/red]", ":smile:", "größe", "a b"])
def test_markup_in_names_stays_as_it_is(tmp_path, name):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({name: X, "c": X}, path)
    refused(path, name, kind=InputError)


@pytest.mark.parametrize("name", ["a\x1b[31m.npy", "a\n.npy"])
def test_control_characters_in_file_names_are_escaped(here, name):
    with pytest.raises(InputError) as caught, open_tensor(name):
        pass
    shown = name.encode("unicode_escape").decode()
    assert str(caught.value) == f"{shown}: no such file or directory"


def test_file_names_that_are_not_utf_8(here):
    name = os.fsdecode(b"\xff\xfe.npy")
    with pytest.raises(InputError) as caught, open_tensor(name):
        pass
    assert str(caught.value) == "\\udcff\\udcfe.npy: no such file or directory"
    X.tofile(name)
    with pytest.raises(InputError) as caught, open_tensor(name):
        pass
    assert str(caught.value).startswith("\\udcff\\udcfe.npy: ")


def test_folder(here):
    os.mkdir("x.npy")
    refused("x.npy", "is a directory", kind=InputError)


def test_missing_file(here):
    refused("x.npy", "no such file or directory", kind=InputError)
    refused("missing/x.npy", "no such file or directory", kind=InputError)
    refused(f"{'x' * 300}.npy", "file name too long", kind=InputError)


def test_file_as_a_folder(here):
    np.save("x.npy", X)
    refused("x.npy/y.npy", "not a directory", kind=InputError)


def test_symbolic_link(here):
    np.save("x.npy", X)
    os.symlink("x.npy", "link.npy")
    assert_same(read("link.npy"), X)
    os.symlink("missing.npy", "broken.npy")
    refused("broken.npy", "no such file or directory", kind=InputError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(here):
    np.save("x.npy", X)
    os.chmod("x.npy", 0)
    refused("x.npy", "permission denied", kind=InputError)


@given(st.text(st.sampled_from("ab#./"), min_size=1, max_size=8))
@quick
def test_any_text_is_taken_apart_or_refused(text):
    try:
        ref = parse_ref(text)
    except UsageError as error:
        assert "#" in text and len(str(error).splitlines()) <= 3
    else:
        assert ref.text == text
        assert text == (ref.path if ref.name is None else f"{ref.path}#{ref.name}")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("*", NAMES),
        ("h.*.weight", ["h.0.ln_1.weight", "h.1.ln_1.weight"]),
        ("ln_1.*", ["h.0.ln_1.weight", "h.0.ln_1.bias", "h.1.ln_1.weight"]),
        ("wt?", ["wte"]),
        ("h.[1-9].ln_1.weight", ["h.1.ln_1.weight"]),
        ("wte", ["wte"]),
        ("ln_f.weight", ["ln_f.weight"]),
        ("1.ln_1.weight", ["h.1.ln_1.weight"]),
    ],
)
def test_globs(name, found):
    assert find_names(Ref(f"x#{name}", "x", name), iter(NAMES)) == found


def test_a_name_with_a_star_wins():
    assert find_names(Ref("x#a*", "x", "a*"), ["ab", "a*"]) == ["a*"]


def test_no_name():
    assert find_names(Ref("x", "x"), ["only"]) == ["only"]


@pytest.mark.parametrize("name", ["x*", "LN_*", "no"])
def test_globs_of_nothing(name):
    with pytest.raises(InputError, match="no tensor"):
        find_names(Ref(f"x#{name}", "x", name), NAMES)
