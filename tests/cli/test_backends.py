"""layernorm backends"""

import pytest

from layernorm_cli.backends import ENGINES


def test_table_lists_every_engine(layernorm):
    run = layernorm("backends")
    assert run.code == 0
    names = [line.split()[0] for line in run.out.splitlines()[1:]]
    assert names == list(ENGINES)


def test_json(layernorm):
    infos = {
        info["backend"]: info for info in layernorm("backends", "--format", "json").json["backends"]
    }
    assert set(infos) == set(ENGINES)
    numpy = infos["numpy"]
    assert numpy["version"].split(".")[0] >= "2"
    assert numpy["exactness"] == "correctly rounded"
    assert infos["torch"]["install"] == "pip install 'layernorm[torch]'"
    assert infos["torch"]["devices"] == ["cpu", "cuda"]


def test_markdown(layernorm):
    lines = layernorm("backends", "--format", "markdown").out.splitlines()
    assert lines[1] == "| --- | --- | --- | --- | --- | --- |"
    assert len(lines) == 2 + len(ENGINES)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_other_formats_are_refused(layernorm, form):
    run = layernorm("backends", "--format", form)
    assert (run.code, run.stdout) == (2, b"")
    assert form in run.err
