"""apply with a site of a checkpoint, and with all of them: the same numbers as by hand."""

import csv
import io
import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints.families import write
from conftest import DATA, assert_refused
from safetensors.numpy import load_file, save_file
from test_real_input import SITES, Truth

from layernorm_cli import layer_norm

NORMS = str(DATA / "gpt2" / "norms.safetensors")
ACTS = str(DATA / "gpt2" / "activations.safetensors")
rng = np.random.default_rng(0)


@pytest.fixture
def gemma(here):
    """x.npy, and a folder with Gemma's gains: rms, stored less one."""
    np.save("x.npy", rng.normal(0, 1, (5, 32)).astype("f4"))
    return write("gemma", here / "gemma")[1]


def report(done):
    assert done.code == 0, done.err
    return done.json


@pytest.mark.parametrize("name", ["transformer.h.3.ln_2", "h.3.ln_2", "3.ln_2"])
def test_a_site_by_name(name, here, main):
    x = f"{ACTS}#h.3.ln_2.input"
    refs = [f"{NORMS}#transformer.h.3.ln_2.{part}" for part in ("weight", "bias")]
    done = main("apply", x, "--params", NORMS, "--site", name, "-o", "y.npy", "--format", "json")
    assert (report(done)["gamma"], report(done)["beta"]) == tuple(refs)
    assert report(done)["eps_source"] == "config.json: layer_norm_epsilon"
    main("apply", x, "--gamma", refs[0], "--beta", refs[1], "--eps", "1e-5", "-o", "z.npy")
    assert (here / "y.npy").read_bytes() == (here / "z.npy").read_bytes()


def test_gemma(gemma, here, main):
    done = main(
        *("apply", "x.npy", "--params", "gemma", "--site", "model.norm"),
        *("-o", "y.npy", "--format", "json"),
    )
    found = report(done)
    assert [found[k] for k in ("kind", "eps", "gamma_offset", "beta")] == ["rms", 1e-6, 1, None]
    truth = layer_norm(
        np.load("x.npy"), gemma["model.norm.weight"].astype("f8") + 1, eps=1e-6, kind="rms"
    )
    np.testing.assert_array_equal(np.load("y.npy"), truth.astype("f4"))


def test_what_the_user_says_wins(gemma, main):
    options = ("--eps", "0.5", "--kind", "layer", "--gamma-offset", "0", "--format", "json")
    found = report(main("apply", "x.npy", "--params", "gemma", "--site", "model.norm", *options))
    assert [found[k] for k in ("kind", "eps", "eps_source", "gamma_offset")] == [
        "layer",
        0.5,
        "--eps",
        0,
    ]


def test_eps_of_the_family_and_the_default(here, main):
    np.save("x.npy", np.ones((2, 4), "f4"))
    save_file({"ln.weight": np.ones(4, "f4"), "ln.bias": np.ones(4, "f4")}, "model.safetensors")
    arguments = ("apply", "x.npy", "--params", "model.safetensors", "--format", "json")
    assert report(main(*arguments))["eps_source"] == "default"
    (here / "config.json").write_text('{"model_type": "bert"}')
    assert [report(main(*arguments))[k] for k in ("eps", "eps_source")] == [1e-12, "family bert"]


def test_a_kind_that_is_not_known(here, main):
    np.save("x.npy", np.ones((2, 4), "f4"))
    save_file({"norm.weight": np.ones(4, "f4")}, "m.safetensors")
    arguments = ("apply", "x.npy", "--params", "m.safetensors")
    assert_refused(main(*arguments), 2, "norm", "--kind")
    assert report(main(*arguments, "--kind", "rms", "--format", "json"))["kind"] == "rms"


@pytest.mark.parametrize(
    ("options", "code", "mentions"),
    [
        (["--site", "h.0.ln_1"], 2, ["--params"]),
        (["--params", NORMS], 2, ["25 sites", "--site"]),
        (["--params", NORMS, "--site", "ln_1"], 3, ["12 sites", "transformer.h.0.ln_1"]),
        (["--params", NORMS, "--site", "ln_9"], 3, ["no such site"]),
        (["--params", NORMS, "--site", "h.0.ln_1"], 2, ["(64,)", "(4,)"]),
        (["--params", NORMS, "--site", "ln_f", "--gamma", "x.npy"], 2, ["--gamma", "--params"]),
        (["--params", NORMS, "--site", "ln_f", "--beta", "x.npy"], 2, ["--beta", "--params"]),
        (["--params", "missing.safetensors", "--site", "ln_f"], 3, ["missing.safetensors"]),
        (["--all-sites"], 2, ["--params"]),
        (["--all-sites", "--params", NORMS, "--site", "ln_f"], 2, ["--site"]),
        (["--all-sites", "--params", NORMS, "--residual", "x.npy"], 2, ["--residual"]),
        (["--all-sites", "--params", NORMS, "--save-stats", "s.csv"], 2, ["--save-stats"]),
        (["--all-sites", "--params", NORMS, "--match", "input"], 2, ["{site}"]),
        (["--all-sites", "--params", NORMS, "-o", "y.npy"], 2, [".safetensors"]),
        (["--all-sites", "--params", NORMS], 3, ["x.npy"]),
    ],
)
def test_refused(options, code, mentions, here, main):
    np.save("x.npy", np.ones((2, 4), "f4"))
    assert_refused(main("apply", "x.npy", *options), code, *mentions)


def test_all_sites(here, layernorm, main):
    done = layernorm("apply", ACTS, "--params", NORMS, "--all-sites", "-o", "y.safetensors")
    assert (done.code, done.err) == (0, "")
    outputs = load_file("y.safetensors")
    assert sorted(outputs) == sorted(f"{site}.output" for site in SITES)
    for site in SITES:
        truth = Truth(site)
        y = outputs[f"{site}.output"]
        assert (np.abs(y.astype(np.longdouble) - truth.torch) <= truth.error_of_torch()).all()
    main("apply", f"{ACTS}#h.0.ln_1.input", "--params", NORMS, "--site", "h.0.ln_1", "-o", "one.npy")
    np.testing.assert_array_equal(np.load("one.npy"), outputs["h.0.ln_1.output"])


def test_one_line_a_site(here, main):
    arguments = ("apply", ACTS, "--params", NORMS, "--all-sites")
    found = report(main(*arguments, "--format", "json"))
    names = [site["site"] for site in found["sites"]]
    assert names[:3] + names[-1:] == [
        f"transformer.{name}" for name in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "ln_f")
    ]
    x = load_file(ACTS)["h.7.ln_2.input"].astype("f8").reshape(48, 64)
    site = found["sites"][names.index("transformer.h.7.ln_2")]
    assert site["rows"] == 48
    assert site["mean_before"] == pytest.approx(x.mean(1).mean(), rel=1e-12)
    assert site["var_before"] == pytest.approx(x.var(1).mean(), rel=1e-12)
    lines = [json.loads(line) for line in main(*arguments, "--format", "jsonl").out.splitlines()]
    assert lines == found["sites"]
    rows = list(csv.DictReader(io.StringIO(main(*arguments, "--format", "csv").out)))
    assert [float(row["var_after"]) for row in rows] == [site["var_after"] for site in lines]
    assert main(*arguments, "--format", "markdown").out.count("\n| transformer") == 25
    assert sum(line.startswith("transformer.") for line in main(*arguments).out.splitlines()) == 25
    assert main(*arguments, "--quiet").stdout == b""


def test_sites_without_a_tensor_are_warned_of(here, main):
    x = load_file(ACTS)["h.0.ln_1.input"]
    save_file({"acts/transformer.h.0.ln_1": x}, "acts.safetensors")
    done = main(
        *("apply", "acts.safetensors", "--params", NORMS, "--all-sites", "--match", "acts/{site}"),
        *("-o", "y.safetensors", "--dtype", "bfloat16"),
    )
    assert done.code == 0
    assert "no tensor for 24 sites" in done.err
    ((name, y),) = load_file("y.safetensors").items()
    assert (name, y.dtype) == ("acts/transformer.h.0.ln_1", ml_dtypes.bfloat16)


def test_from_shards(here, main):
    tensors = load_file(NORMS)
    names = list(tensors)
    (here / "m").mkdir()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({n: tensors[n] for n in part}, f"m/model-{number:05}-of-00002.safetensors")
    one = main("apply", ACTS, "--params", "m", "--all-sites", "--eps", "1e-5", "--format", "json")
    other = main("apply", ACTS, "--params", NORMS, "--all-sites", "--eps", "1e-5", "--format", "json")
    for a, b in zip(report(one)["sites"], report(other)["sites"], strict=True):
        assert a == b
