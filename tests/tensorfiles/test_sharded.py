"""Checkpoints of one file and of many, and what can be wrong with them."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from layernorm_cli import open_tensor
from layernorm_cli.errors import FormatError, InputError, LayernormError, UsageError
from layernorm_cli.tensorfiles.sharded import open_checkpoint, read_tensors

rng = np.random.default_rng(0)
TENSORS = {
    f"h.{i}.ln.{part}": rng.normal(size=(4, 3) if part == "w" else 4).astype("f4")
    for i in (0, 1, 10)
    for part in ("weight", "bias", "w")
}
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def halves():
    names = list(TENSORS)
    return names[:4], names[4:]


@pytest.fixture
def sharded(here):
    """A folder m with two shards and their index."""
    (here / "m").mkdir()
    for file, names in zip(FILES, halves(), strict=True):
        save_file({name: TENSORS[name] for name in names}, f"m/{file}")
    write_index({name: file for file, names in zip(FILES, halves(), strict=True) for name in names})
    return here / "m"


def write_index(weight_map):
    with open("m/model.safetensors.index.json", "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)


def weight_map():
    with open("m/model.safetensors.index.json", encoding="utf-8") as file:
        return json.load(file)["weight_map"]


def assert_whole(path):
    checkpoint = open_checkpoint(path)
    arrays = read_tensors(checkpoint, checkpoint.tensors)
    assert arrays.keys() == TENSORS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, TENSORS[name])


@pytest.mark.parametrize("path", ["m", "m/", "m/model.safetensors.index.json"])
def test_shards(path, sharded):
    assert_whole(path)


def test_shards_without_an_index(sharded):
    os.unlink("m/model.safetensors.index.json")
    assert_whole("m")


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_one_file(form, here):
    if form == "npz":
        np.savez("model.npz", **TENSORS)
    else:
        save_file(TENSORS, "model.safetensors")
    assert_whole(f"model.{form}")


def test_a_stray_file_does_not_win_over_the_index(sharded):
    save_file({"other.weight": np.ones(3, "f4")}, "m/model.safetensors")
    assert_whole("m")


def test_hugging_face_cache(sharded):
    """Snapshots are links into blobs, and refs/main names the one meant."""
    os.makedirs("cache/refs")
    os.makedirs("cache/blobs")
    for revision in ("old", "new"):
        os.makedirs(f"cache/snapshots/{revision}")
    for number, name in enumerate(os.listdir("m")):
        os.rename(f"m/{name}", f"cache/blobs/{number}")
        os.symlink(f"../../blobs/{number}", f"cache/snapshots/new/{name}")
    with open("cache/refs/main", "w", encoding="utf-8") as file:
        file.write("new\n")
    for path in ("cache", "cache/snapshots/new", "cache/snapshots/new/model.safetensors.index.json"):
        assert_whole(path)
    os.unlink("cache/refs/main")
    with pytest.raises(InputError, match="2 snapshots"):
        open_checkpoint("cache")


@pytest.mark.parametrize("path", ["m#h.10.ln.weight", "m/model.safetensors.index.json#10.ln.weight"])
def test_refs_into_shards(path, sharded):
    with open_tensor(path) as tensor:
        np.testing.assert_array_equal(tensor.read(), TENSORS["h.10.ln.weight"])


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(with_index, sharded):
    os.unlink(f"m/{FILES[1]}")
    if not with_index:
        os.unlink("m/model.safetensors.index.json")
    with pytest.raises(InputError, match=FILES[1]):
        open_checkpoint("m")


def test_a_missing_tensor_is_named_with_its_shard(sharded):
    save_file({"h.0.ln.weight": TENSORS["h.0.ln.weight"]}, f"m/{FILES[0]}")
    with pytest.raises(InputError, match=rf"{FILES[0]}#h.0.ln.bias"):
        open_checkpoint("m")


def test_a_tensor_in_another_shard_than_the_index_says(sharded):
    names = weight_map()
    names["h.0.ln.weight"] = FILES[1]
    write_index(names)
    with pytest.raises(InputError, match="no such tensor"):
        open_checkpoint("m")


def test_a_tensor_in_two_shards(sharded):
    os.unlink("m/model.safetensors.index.json")
    save_file({"h.0.ln.weight": np.ones(4, "f4")}, f"m/{FILES[1]}")
    with pytest.raises(FormatError, match="too"):
        open_checkpoint("m")


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/hostname", "a/../../x", "..\\x", "https://h/x"]
)
def test_shards_outside_the_folder_are_never_opened(file, sharded):
    write_index({**weight_map(), "x.weight": file})
    with pytest.raises(InputError, match="outside"):
        open_checkpoint("m")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{" * 5000],
)
def test_malformed_indices(text, sharded):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match=r"index\.json"):
        open_checkpoint("m")


def test_lfs_pointers(sharded):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n"
    (sharded / FILES[1]).write_text(pointer)
    with pytest.raises(FormatError, match=rf"{FILES[1]}.*LFS"):
        open_checkpoint("m")
    (sharded / "model.safetensors.index.json").write_text(pointer)
    with pytest.raises(FormatError, match=r"index\.json.*LFS"):
        open_checkpoint("m")


@pytest.mark.parametrize(
    "path", ["", "missing", "missing.safetensors", "missing/model.safetensors.index.json"]
)
def test_missing(path, here):
    with pytest.raises(UsageError if not path else InputError):
        open_checkpoint(path)


def test_folders_without_safetensors(here):
    with pytest.raises(InputError, match=r"no \.safetensors"):
        open_checkpoint(".")
    (here / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        open_checkpoint(".")


def test_npy_is_no_checkpoint(here):
    np.save("x.npy", np.ones(3))
    with pytest.raises(InputError, match="one tensor"):
        open_checkpoint("x.npy")


def test_other_dtypes_open_but_are_not_read(here):
    header = b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (here / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    checkpoint = open_checkpoint("m.safetensors")
    assert checkpoint.tensors["x"].dtype == "F4"
    with pytest.raises(LayernormError, match="F4"):
        read_tensors(checkpoint, ["x"])
