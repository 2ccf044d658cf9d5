"""The tensors of a checkpoint: of one file, of a directory, or of the shards that an index names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, InputError, UsageError
from ..norm.dtypes import DTYPES, numpy_dtype
from .bytes_at import Source, join, list_dir, open_source, parent, read_ranges, read_small, read_upto
from .exact_io import reason
from .reader import open_tensor, read_safetensors
from .refs import Ref, find_name, is_address, without_secrets
from .sniff import HEAD_SIZE, told_format

__all__ = [
    "Checkpoint",
    "StoredTensor",
    "find_shards",
    "open_checkpoint",
    "read_tensors",
    "ref_in_shard",
]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class StoredTensor(NamedTuple):
    """Where a tensor lies: its file, dtype (its name, or safetensors' code), shape, first byte.

    offset is None in an npz archive.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None


class Checkpoint(NamedTuple):
    """A checkpoint as typed, the folder of its files, and its tensors in the order of the files."""

    path: str
    folder: str
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    warnings: tuple[str, ...] = ()


class Shards(NamedTuple):
    """The files of a checkpoint; index_file, where there is one, says which tensors each must hold."""

    files: tuple[str, ...]
    index_file: str | None = None
    weight_map: dict[str, str] | None = None


def open_checkpoint(path: str) -> Checkpoint:
    """List the tensors of a .safetensors or .npz file, an index of shards, or a directory of either.

    Only headers are read. A directory of the Hugging Face cache is the revision that refs/main names.

    Raises InputError for a missing file, shard or tensor, or a shard outside the folder; FormatError
    for a malformed file, or a tensor in two shards.
    """
    shards = find_shards(path)
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    warnings: list[str] = []
    for file in shards.files:
        found, more, odd = _list_file(file)
        metadata |= more
        warnings += odd
        for name, tensor in found.items():
            if shards.weight_map is not None and name not in shards.weight_map:
                continue
            if name in tensors:
                raise FormatError(
                    f"{without_secrets(file)}#{name}",
                    f"is in {without_secrets(tensors[name].file)} too",
                    "one shard for it",
                )
            tensors[name] = tensor
    if shards.weight_map is not None:
        _check_index(shards, tensors)
    return Checkpoint(path, parent(shards.files[0]), tensors, metadata, tuple(warnings))


def find_shards(path: str) -> Shards:
    """Return the files of a checkpoint, those of an index after checking where they lie.

    Raises InputError where path, or a file that it names, is missing or may not be read.
    """
    if not path:
        raise UsageError("empty file name", "nothing to read", "a checkpoint")
    name = path.partition("?")[0] if is_address(path) else path
    if name.endswith(".index.json"):
        return _of_index(path)
    if is_address(path) and name.endswith((".safetensors", ".npz")):
        return Shards((path,))
    names = list_dir(path)
    if names is not None:
        return _in_directory(path, names)
    if is_address(path):  # a directory of a server that lists none
        has_index = read_small(join(path, INDEX)) is not None
        return _of_index(join(path, INDEX)) if has_index else Shards((join(path, SINGLE),))
    return Shards((path,))


def read_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, npt.NDArray[np.generic]]:
    """Read these tensors of a checkpoint, file by file and in the order of their bytes.

    Raises FormatError for a dtype that layernorm does not compute with.
    """
    tensors = checkpoint.tensors
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    wanted = sorted(set(names), key=lambda name: (tensors[name].file, tensors[name].offset or 0))
    for file, group in groupby(wanted, lambda name: tensors[name].file):
        in_file = list(group)
        where = without_secrets(file)
        for name in in_file:
            if tensors[name].dtype not in DTYPES:
                expected = ", ".join(dtype.code for dtype in DTYPES.values())
                found = f"dtype {tensors[name].dtype} has no layer norm here"
                raise FormatError(f"{where}#{name}", found, expected)
        if tensors[in_file[0]].offset is None:
            for name in in_file:
                with open_tensor(Ref(f"{where}#{name}", file, name)) as tensor:
                    arrays[name] = tensor.read()
            continue
        dtypes = [numpy_dtype(DTYPES[tensors[name].dtype]) for name in in_file]
        counts = [np.prod(tensors[name].shape, dtype=object) for name in in_file]
        ranges = [
            (tensors[name].offset or 0, count * dtype.itemsize)
            for name, count, dtype in zip(in_file, counts, dtypes, strict=True)
        ]
        with open_source(file) as source:
            blocks = read_ranges(source, ranges, where)
        for name, block, dtype in zip(in_file, blocks, dtypes, strict=True):
            arrays[name] = np.frombuffer(block, dtype).reshape(tensors[name].shape)
    return arrays


def ref_in_shard(ref: Ref) -> Ref:
    """Return the ref of the shard that holds a tensor of a checkpoint; Raises as open_checkpoint."""
    tensors = open_checkpoint(ref.path).tensors
    name = find_name(ref, tensors)
    return Ref(ref.text, tensors[name].file, name)


def _in_directory(path: str, names: list[str]) -> Shards:
    if "snapshots" in names and "refs" in names:
        path = _snapshot(path)
        names = list_dir(path) or []
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    if indices:
        return _of_index(join(path, INDEX if INDEX in indices else indices[0]))
    if SINGLE in files:
        return Shards((join(path, SINGLE),))
    if not files:
        pickles = [name for name in names if name.endswith(PICKLES)]
        but = f", but {pickles[0]}" if pickles else ""
        hint = "saving the model as safetensors where you trust it" if pickles else None
        raise InputError(
            without_secrets(path), f"no .safetensors file in it{but}", f"{SINGLE} or {INDEX}", hint
        )
    for stem, width, count in {
        (match[1], len(match[2]), match[3]) for name in files if (match := SHARD.fullmatch(name))
    }:
        for number in range(1, min(int(count), len(files) + 1) + 1):
            missing = f"{stem}-{number:0{width}}-of-{count}.safetensors"
            if missing not in files:
                expected = f"all {int(count)} shards"
                raise InputError(
                    without_secrets(join(path, missing)), "no such shard", expected, "fetching it"
                )
    return Shards(tuple(join(path, name) for name in files))


def _snapshot(path: str) -> str:
    """The folder of the revision in a model's directory of the Hugging Face cache."""
    snapshots = join(path, "snapshots")
    revisions = list_dir(snapshots) or []
    main = (read_small(join(join(path, "refs"), "main")) or b"").decode(errors="replace").strip()
    if main in revisions:
        return join(snapshots, main)
    if len(revisions) != 1:
        found = f"{len(revisions)} snapshots, none of them in refs/main"
        raise InputError(without_secrets(path), found, None, f"{without_secrets(snapshots)}/REVISION")
    return join(snapshots, revisions[0])


def _of_index(index: str) -> Shards:
    where, expected = without_secrets(index), '{"weight_map": {TENSOR: FILE}}'
    data = read_small(index)
    if data is None:
        raise InputError(where, "no such file or directory")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        if data.startswith(b"version https://git-lfs"):
            told_format(where, where, data[:HEAD_SIZE])
        raise FormatError(where, f"not JSON: {error}"[:200], expected) from None
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(where, "no weight_map", expected)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or "\0" in file:
            raise FormatError(where, f"tensor {name!r} has the file {file!r}", expected)
        if file.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", file) or is_address(file):
            found = f"shard {file!r} lies outside the checkpoint's folder"
            raise InputError(where, found, "a file in that folder")
    files = (join(parent(index), file) for file in dict.fromkeys(weight_map.values()))
    return Shards(tuple(files), index, weight_map)


def _check_index(shards: Shards, tensors: dict[str, StoredTensor]) -> None:
    assert shards.weight_map is not None and shards.index_file is not None
    for name, file in shards.weight_map.items():
        shard = join(parent(shards.index_file), file)
        if name not in tensors or tensors[name].file != shard:
            expected = f"what {without_secrets(shards.index_file)} says"
            raise InputError(
                f"{without_secrets(shard)}#{name}", "no such tensor", expected, "fetching it again"
            )


def _list_file(path: str) -> tuple[dict[str, StoredTensor], dict[str, str], tuple[str, ...]]:
    where = without_secrets(path)
    with open_source(path) as source:
        try:
            head = read_upto(source, HEAD_SIZE, 0)
        except OSError as error:  # a pipe
            raise InputError(where, reason(error), "a file, or the address of one") from None
        match told_format(where, where, head):
            case "safetensors":
                header = read_safetensors(source, where)
                names = {dtype.code: dtype.name for dtype in DTYPES.values()}
                tensors = {
                    name: StoredTensor(
                        path, names.get(entry.code, entry.code), entry.shape, entry.offset
                    )
                    for name, entry in header.entries.items()
                }
                return tensors, header.metadata, header.warnings
            case "npz":
                return _list_npz(source, path), {}, ()
            case "npy":
                raise InputError(where, "an npy file holds one tensor", "a checkpoint of named tensors")


def _list_npz(source: Source, path: str) -> dict[str, StoredTensor]:
    from .npz import member_names  # zipfile is slow to import

    tensors = {}
    for name in member_names(source, without_secrets(path)):
        with open_tensor(Ref(f"{without_secrets(path)}#{name}", path, name)) as tensor:
            tensors[name] = StoredTensor(path, tensor.dtype.name, tensor.shape, None)
    return tensors
