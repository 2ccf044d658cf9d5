"""Speed, start-up and memory of the commands, each as a ratio to something else in the same run.

    python tests/benchmark.py [--gib 1] [--runs 9] [--folder DIR] [--files 10000] [--only GROUP]

Every round runs all commands of a group once, in an order that changes with the round, so that a
machine whose speed drifts slows all of them; the ratio is the median over the rounds of one command's
time to the other's in that round.
Memory is the sum over a command's processes of what each has for itself plus its share of what they
have together (Linux's PSS), sampled, and beside it the largest single process. The sampling takes time
from the command, so it is done in a first round, which is not timed. The torch script is left out where
torch is not installed. It needs about three times the file's size on disk, and for batch some 12 GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

WIDTH = 768
TORCH_SCRIPT = """
import sys, numpy, torch
x, gamma, beta, out = sys.argv[1:]
y = torch.nn.functional.layer_norm(
    torch.from_numpy(numpy.load(x)), (768,), torch.from_numpy(numpy.load(gamma)),
    torch.from_numpy(numpy.load(beta)))
numpy.save(out, y.numpy())
"""
LOOP_SCRIPT = """
import os, sys, numpy as np
inputs, outputs = sys.argv[1:]
os.mkdir(outputs)
for name in sorted(os.listdir(inputs)):
    np.save(os.path.join(outputs, name), np.load(os.path.join(inputs, name)))
"""
SAFE_OPEN_SCRIPT = """
import pathlib, sys
from safetensors import safe_open
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, "np") as file:
        list(file.keys())
"""


@dataclass(frozen=True)
class Run:
    """How long a command took; if watched, its memory in MB, all of it and its largest process."""

    seconds: float
    memory: float = math.nan
    largest: float = math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--only", choices=("files", "startup", "sparse", "checkpoint", "batch"))
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        groups = {
            "files": lambda: files(folder, options.gib, options.runs),
            "startup": lambda: startup(folder, options.runs),
            "sparse": lambda: sparse(folder),
            "checkpoint": lambda: checkpoint(folder, options.runs),
            "batch": lambda: batch(folder, options.files, options.runs),
        }
        for group, run in groups.items():
            if options.only in (None, group):
                run()


def machine() -> str:
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if "model name" in line), model)
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {platform.system()} {platform.release()}, numpy {np.__version__}"


def files(folder: Path, gib: float, runs: int) -> None:
    rows = round(gib * 2**30 / (4 * WIDTH))
    print(f"\nfile to file, float32 ({rows}, {WIDTH}), {gib:g} GiB, page cache warm")
    x, y, gamma, beta = (folder / f"{name}.npy" for name in ("x", "y", "gamma", "beta"))
    rng = np.random.default_rng(0)
    data = np.lib.format.open_memmap(x, "w+", np.dtype("<f4"), (rows, WIDTH))
    for start in range(0, rows, 8192):
        data[start : start + 8192] = rng.standard_normal(data[start : start + 8192].shape, "f4")
    del data
    np.save(gamma, rng.standard_normal(WIDTH, "f4"))
    np.save(beta, rng.standard_normal(WIDTH, "f4"))
    apply = [
        layernorm(),
        "apply",
        str(x),
        "--gamma",
        str(gamma),
        "--beta",
        str(beta),
        "-q",
        "-o",
        str(y),
    ]
    commands = {
        "cp": ["cp", str(x), str(y)],
        "apply, numpy": [*apply, "--backend", "numpy"],
        **(
            {"apply, numba": [*apply, "--backend", "numba"]} if importlib.util.find_spec("numba") else {}
        ),
        "apply, numpy, 1 thread": [*apply, "--backend", "numpy", "--threads", "1"],
    }
    if importlib.util.find_spec("torch") is not None:
        script = folder / "torch_script.py"
        script.write_text(TORCH_SCRIPT)
        commands["numpy.load, torch, numpy.save"] = [
            sys.executable, *map(str, (script, x, gamma, beta, y))
        ]  # fmt: skip
    else:
        print("torch is not installed: its script is left out")
    report(commands, runs, y)


def startup(folder: Path, runs: int) -> None:
    print("\nstart-up")
    small = folder / "small.npy"
    np.save(small, np.arange(12, dtype="f4").reshape(3, 4))
    report(
        {
            "python -c 'import typer'": [sys.executable, "-c", "import typer"],
            "layernorm --version": [layernorm(), "--version"],
        },
        3 * runs,
    )
    report(
        {
            "python -c 'import numpy, typer, rich.table'": [
                sys.executable, "-c", "import numpy, typer, rich.table"
            ],
            "apply of a 3 x 4 file": [layernorm(), "apply", str(small)],
        },
        3 * runs,
    )  # fmt: skip


def sparse(folder: Path) -> None:
    """16 GiB of float32 that take no disk, read only."""
    path = folder / "sparse.npy"
    shape = (2**34 // (4 * WIDTH), WIDTH)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )
        file.truncate(file.tell() + shape[0] * shape[1] * 4)
    run = timed([layernorm(), "apply", str(path), "--backend", "numpy", "-q"], watched=True)
    memory = f"{run.memory:.0f} MB, largest process {run.largest:.0f} MB"
    print(f"\n16 GiB sparse, read only, numpy: {run.seconds:.1f} s, {memory}")


def checkpoint(folder: Path, runs: int) -> None:
    """810 GB in 191 shards that take no disk: 126 layers of width 16,384, as Llama 3.1 405B."""
    model = folder / "model"
    model.mkdir()
    size = sparse_checkpoint(model, layers=126, width=16384, shards=191)
    print(f"\ncheckpoint of 191 shards, {size / 1e9:.0f} GB, sparse")
    script = folder / "safe_open_script.py"
    script.write_text(SAFE_OPEN_SCRIPT)
    report(
        {
            "safe_open of every shard": [sys.executable, str(script), str(model)],
            "layernorm inspect": [layernorm(), "inspect", str(model), "--format", "json"],
        },
        runs,
    )


def batch(folder: Path, count: int, runs: int) -> None:
    """Many small files against numpy's loop over them, and 50 large ones against cp."""
    rng = np.random.default_rng(0)
    for name, number, rows, base in (
        (f"{count} files", count, 64, "loop of np.save(np.load())"),
        ("50 large files", 50, 1 << 14, "cp -r"),
    ):
        inputs = folder / name.replace(" ", "-")
        inputs.mkdir()
        x = rng.standard_normal((rows, WIDTH), "f4")
        for index in range(number):
            x[0] = index
            np.save(inputs / f"{index}.npy", x)
        print(f"\nbatch, {name} of float32 ({rows}, {WIDTH}), page cache warm")
        commands = {
            base: ["cp", "-r", str(inputs), "{}"]
            if base == "cp -r"
            else [sys.executable, "-c", LOOP_SCRIPT, str(inputs), "{}"],
            **{
                f"batch, {what}": [layernorm(), "batch", str(inputs), "-o", "{}", "-q", *more]
                for what, more in {
                    "1 job": ["--jobs", "1", "--threads", "1"],
                    "2 jobs": ["--jobs", "2", "--threads", "1"],
                    "2 jobs, numba": ["--jobs", "2", "--threads", "1", "--backend", "numba"],
                    "1 job of 2 threads": ["--jobs", "1", "--threads", "2"],
                }.items()
                if "numba" not in more or importlib.util.find_spec("numba")
            },
        }
        report(commands, runs, folder / f"out-{number}-")


def sparse_checkpoint(folder: Path, layers: int, width: int, shards: int) -> int:
    """Write a LLaMA-like checkpoint whose matrices are holes; return its bytes."""
    shapes = {"model.embed_tokens.weight": (128256, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (width // 16, width),
            "self_attn.v_proj": (width // 16, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (53248, width),
            "mlp.up_proj": (53248, width),
            "mlp.down_proj": (width, 53248),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    shapes["lm_head.weight"] = (128256, width)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    weight_map: dict[str, str] = {}
    shard: dict[str, tuple[int, ...]] = {}
    number, done = 1, 0
    for name, shape in shapes.items():
        shard[name] = shape
        done += 2 * math.prod(shape)
        if done >= total * number / shards or name == "lm_head.weight":
            file = f"model-{number:05}-of-{shards:05}.safetensors"
            sparse_shard(folder / file, shard)
            weight_map |= dict.fromkeys(shard, file)
            number, shard = number + 1, {}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def sparse_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for entry in entries.values():
            if len(entry["shape"]) == 1:  # gains of 1, the one thing that is not a hole
                file.seek(8 + len(header) + entry["data_offsets"][0])
                file.write(b"\x80\x3f" * entry["shape"][0])
        file.truncate(8 + len(header) + end)


def layernorm() -> str:
    return str(Path(sys.executable).with_name("layernorm"))


def report(commands: dict[str, list[str]], runs: int, output: Path | None = None) -> None:
    """Time the commands in turn, and print a table of each beside the first.

    Each writes output anew; {} in a command stands for a folder of its own. Its files are cut to nothing
    and stay: a file system may be slow for minutes where files have been removed.
    """
    memory: dict[str, Run] = {}
    rounds: dict[str, list[float]] = {name: [] for name in commands}
    names = [*commands]
    for number in range(runs + 1):
        for place, name in enumerate(names):
            if output is not None:
                output.unlink(missing_ok=True)
            os.sync()  # else a command waits for what the one before has left to be written
            command = [part.replace("{}", f"{output}{number}-{place}") for part in commands[name]]
            if number:
                rounds[name].append(timed(command).seconds)
            else:
                memory[name] = timed(command, watched=True)
        if output is not None:
            for path in output.parent.glob(f"{output.name}{number}-*/**/*"):
                if path.is_file():
                    os.truncate(path, 0)
        names.append(names.pop(0))
    first = next(iter(commands))
    print(f"| command | seconds | least | ratio to {first} | least | MB | largest process |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, seconds in rounds.items():
        ratios = [one / base for one, base in zip(seconds, rounds[first], strict=True)]
        cells = [f"{f(values):.3f}" for values in (seconds, ratios) for f in (statistics.median, min)]
        cells += [f"{memory[name].memory:.0f}", f"{memory[name].largest:.0f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def timed(command: list[str], watched: bool = False) -> Run:
    """Run a command with numpy's BLAS as it chooses itself, and perhaps watch its processes' memory.

    Python may keep the bytecode of an editable install, as pip keeps that of another: else every
    start would compile the package.
    """
    unwanted = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if name not in unwanted}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peak = np.full(2, math.nan)
    watcher = threading.Thread(target=watch, args=(process.pid, peak))
    if watched:
        watcher.start()
    _, status = os.waitpid(process.pid, 0)
    seconds = time.perf_counter() - start
    if watched:
        watcher.join()
    assert process.stderr is not None
    errors = process.stderr.read()
    if status:
        raise SystemExit(f"{shlex.join(command)} failed:\n{errors}")
    return Run(seconds, *peak)


def watch(pid: int, peak: npt.NDArray[np.float64]) -> None:
    """Sample the PSS of a process and its children, and the largest one's peak, until it is gone."""
    while Path(f"/proc/{pid}").exists():
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            members = (str(pid), *children)
            shares = sum(kilobytes(f"/proc/{member}/smaps_rollup", "Pss:") for member in members)
            largest = max(kilobytes(f"/proc/{member}/status", "VmHWM:") for member in members)
        except (OSError, IndexError):
            return
        peak[:] = np.fmax(peak, [shares / 1024, largest / 1024])
        time.sleep(0.02)


def kilobytes(path: str, field: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


if __name__ == "__main__":
    main()
