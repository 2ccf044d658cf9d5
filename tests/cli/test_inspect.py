"""layernorm inspect: what it finds, in every form; comparisons, checks, pictures, errors."""

import csv
import importlib.util
import io
import json

import numpy as np
import pytest
from checkpoints.families import write
from conftest import DATA, assert_refused
from safetensors.numpy import load_file, save_file

GPT2 = str(DATA / "gpt2" / "norms.safetensors")
TOP = ["checkpoint", "family", "architecture", "placement", "tensors", "parameters", "norm_parameters"]
SITE = [
    *("site", "kind", "width", "eps", "eps_source", "gamma", "beta", "gamma_offset", "role", "dtype"),
    *("file", "gamma_stats", "beta_stats", "verdict"),
]
rng = np.random.default_rng(0)
plot = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


def norm(gamma, beta=None, name="ln"):
    pair = {f"{name}.weight": np.asarray(gamma, "f4")}
    return pair if beta is None else pair | {f"{name}.bias": np.asarray(beta, "f4")}


def test_json_of_gpt2(layernorm):
    done = layernorm("inspect", GPT2, "--format", "json")
    assert (done.code, done.err) == (0, "")
    report = done.json
    assert list(report) == [*TOP, "sites", "excluded"]
    assert [report[key] for key in TOP[1:]] == ["gpt2", "GPT2LMHeadModel", "pre", 50, 3200, 3200]
    assert (len(report["sites"]), report["excluded"]) == (25, [])
    site = report["sites"][0]
    assert list(site) == SITE
    assert [site[key] for key in SITE[:6]] == [
        *("transformer.h.0.ln_1", "layer", 64, 1e-5, "config.json: layer_norm_epsilon"),
        "transformer.h.0.ln_1.weight",
    ]
    gamma = load_file(GPT2)["transformer.h.0.ln_1.weight"].astype("f8")
    stats = site["gamma_stats"]
    truth = {
        "mean": gamma.mean(),
        "std": gamma.std(),
        "min": gamma.min(),
        "max": gamma.max(),
        "norm": np.linalg.norm(gamma),
    }
    for name, value in truth.items():
        assert stats[name] == pytest.approx(value, rel=1e-14)
    assert (stats["outliers"], site["verdict"], site["role"]) == ([], "trained", "before attention")


def test_marian_is_post_norm_with_30(here, main):
    write("marian", here / "marian")
    done = main("inspect", "marian")
    assert "30 layer norms, post-norm" in done.out.splitlines()[0]
    assert main("inspect", "marian", "--format", "json").json["placement"] == "post"


def test_table_of_gpt2(layernorm):
    lines = layernorm("inspect", GPT2).out.splitlines()
    assert lines[0].endswith("(GPT2LMHeadModel, gpt2): 25 layer norms, pre-norm")
    assert "3,200 of them in norms (100.00%)" in lines[1]
    assert [line.split()[0] for line in lines[4:29]][-1] == "transformer.ln_f"


def test_forms(main):
    reports = main("inspect", GPT2, "--format", "json").json["sites"]
    lines = main("inspect", GPT2, "--format", "jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == reports
    rows = list(csv.DictReader(io.StringIO(main("inspect", GPT2, "--format", "csv").out)))
    assert [row["site"] for row in rows] == [site["site"] for site in reports]
    assert float(rows[3]["beta_std"]) == reports[3]["beta_stats"]["std"]
    markdown = main("inspect", GPT2, "--format", "markdown").out
    assert markdown.count("\n| transformer.") == 25
    assert main("inspect", GPT2, "--quiet").stdout == b""


@pytest.mark.parametrize(("pattern", "count"), [("*.ln_1", 12), ("ln_f", 1), ("h.1*.ln_2", 3)])
def test_site_narrows(pattern, count, main):
    report = main("inspect", GPT2, "--site", pattern, "--format", "json").json
    assert (len(report["sites"]), report["norm_parameters"]) == (count, 3200)


def test_site_that_nothing_matches(main):
    assert_refused(main("inspect", GPT2, "--site", "ln_9"), 3, "ln_9", "transformer.h.0.ln_1")


@pytest.mark.parametrize(
    ("tensors", "verdict", "code"),
    [
        (norm(np.ones(8), np.zeros(8)), "identity", 0),
        (norm(np.ones(8), np.zeros(8)) | norm(rng.normal(1, 1, 8), name="ln_2"), "folded", 0),
        (norm(rng.normal(1, 1, 8)), "trained", 0),
        (norm(np.full(8, 2.0), np.ones(8)), "constant", 0),
        (norm(np.zeros(8), np.ones(8)), "zero", 1),
        (norm([np.nan, *np.ones(7)]), "nonfinite", 1),
        (norm(np.ones(8), [np.inf, *np.zeros(7)]), "nonfinite", 1),
    ],
)
def test_verdicts_and_check(tensors, verdict, code, here, main):
    save_file(tensors, "m.safetensors")
    done = main("inspect", "m.safetensors", "--format", "json", "--check")
    assert (done.json["sites"][0]["verdict"], done.code, done.err) == (verdict, code, "")
    assert main("inspect", "m.safetensors").code == 0


def test_numbers_that_are_none_are_strict_json(here, main):
    save_file(norm([np.nan, np.inf, 1, 1]), "m.safetensors")
    stats = main("inspect", "m.safetensors", "--format", "json").json["sites"][0]["gamma_stats"]
    assert (stats["mean"], stats["max"]) == ("NaN", "NaN")


def test_outlier_features_are_named(here, main):
    gamma = rng.normal(1, 0.1, 256)
    gamma[17] = 9
    save_file(norm(gamma), "m.safetensors")
    report = main("inspect", "m.safetensors", "--format", "json").json
    assert report["sites"][0]["gamma_stats"]["outliers"] == [17]
    assert "outlier features of gamma at ln: 17" in main("inspect", "m.safetensors").out


def test_against_itself_and_another(here, main):
    gamma, beta = rng.normal(1, 0.1, (2, 8))
    save_file(norm(gamma, beta) | norm(gamma, name="mine.norm"), "a.safetensors")
    moved = norm(gamma * 2, beta, "module.ln") | norm(gamma, name="theirs.norm")
    save_file(moved, "b.safetensors")
    same = main("inspect", "a.safetensors", "--against", "a.safetensors", "--format", "json").json
    assert {c["gamma_change"] for c in same["against"]["sites"]} == {0}
    against = main("inspect", "a.safetensors", "--against", "b.safetensors", "--format", "json").json[
        "against"
    ]
    (change,) = against["sites"]
    assert change["site"] == "ln"
    assert change["gamma_change"] == pytest.approx(0.5, rel=1e-6)
    assert change["gamma_max_change"] == pytest.approx(np.abs(gamma).max(), rel=1e-6)
    assert (change["beta_change"], change["beta_max_change"]) == (0, 0)
    assert (against["missing"], against["extra"]) == (["theirs.norm"], ["mine.norm"])
    table = main("inspect", "a.safetensors", "--against", "b.safetensors").out
    assert "50.000%" in table
    assert "only there: theirs.norm" in table


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (None, "no such file"),
        (b"<html>", "HTML"),
        (b"\0" * 3, "truncated"),
        (b"\x93NUMPY", "one tensor"),
    ],
)
def test_errors(data, found, here, main):
    if data is not None:
        (here / "m.safetensors").write_bytes(data)
    assert_refused(main("inspect", "m.safetensors"), 3, "m.safetensors", found)


def test_gains_of_no_features_are_no_norms(here, main):
    header = json.dumps(
        {
            f"ln.{part}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            for part in ("weight", "bias")
        }
    ).encode()
    (here / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert main("inspect", "m.safetensors", "--format", "json").json["sites"] == []


def test_a_pipe_is_no_checkpoint(layernorm):
    done = layernorm("inspect", "/dev/stdin", stdin=b"\0" * 100)
    assert_refused(done, 3, "/dev/stdin", "expected: a file")


def test_names_are_shown_as_they_are(here, main):
    save_file(norm(np.ones(4), name="[red]\x1b[31m:smile:.ln"), "m.safetensors")
    out = main("inspect", "m.safetensors").out
    assert "[red]\\x1b[31m:smile:.ln" in out
    assert "\x1b" not in out


def test_ascii_output(layernorm):
    done = layernorm("inspect", GPT2, PYTHONIOENCODING="ascii")
    assert (done.code, done.err) == (0, "")
    assert done.stdout.isascii()


@pytest.mark.parametrize("columns", [200, 50])
def test_in_a_terminal(columns, in_terminal):
    code, out = in_terminal("inspect", GPT2, columns=columns)[:2]
    assert code == 0
    assert "█" in out
    assert "transformer.h.11.ln_2" in out


@plot
@pytest.mark.parametrize(("name", "magic"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_pictures_are_the_same_bytes_each_time(name, magic, here, main):
    drawn = []
    for _ in range(2):
        assert main("inspect", GPT2, "--plot", name, "--quiet", "--force").code == 0
        drawn.append((here / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(magic)
    assert len(drawn[0]) > 10_000


@plot
def test_pictures_that_cannot_be(here, main):
    assert_refused(main("inspect", GPT2, "--plot", "p.gif"), 2, "p.gif", ".png")
    (here / "p.png").write_bytes(b"mine")
    done = main("inspect", GPT2, "--plot", "p.png")
    assert_refused(done, 2, "p.png", "--force")
    assert (here / "p.png").read_bytes() == b"mine"
    save_file({"fc.weight": np.ones((2, 2), "f4")}, "m.safetensors")
    done = main("inspect", "m.safetensors", "--plot", "q.png")
    assert_refused(done._replace(created=done.created - {"m.safetensors"}), 2, "no norms")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is there")
def test_pictures_without_matplotlib(main):
    assert_refused(main("inspect", GPT2, "--plot", "p.png"), 4, "layernorm[plot]")
