"""Norms found among the tensors of checkpoints, against what the models themselves compute."""

import pytest

from layernorm_cli.checkpoints.sites import find_norms
from layernorm_cli.tensorfiles.sharded import StoredTensor

from .families import FAMILIES, found_in, norms_of, read

D = [8]
PAIR = {"weight": D, "bias": D}


def names(shapes, config=None):
    return [site.site for site in found_in(shapes, config)[0]]


def excluded(shapes, config=None):
    return {item.name: item.reason for item in found_in(shapes, config)[1]}


def module(name, parts=PAIR, separator="."):
    return {f"{name}{separator}{part}": shape for part, shape in parts.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_measured_truth(name):
    found = {site.site: site for site in norms_of(name)[0]}
    truth = {site["site"]: site for site in read(name)["sites"]}
    assert found.keys() == truth.keys()
    for site, expected in truth.items():
        got = {key: getattr(found[site], key) for key in expected}
        assert got == expected


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module._fsdp_wrapped_module."])
@pytest.mark.parametrize("name", ["gpt2", "gemma", "convnext", "wav2vec2_group"])
def test_wrapper_prefixes(name, prefix):
    found = norms_of(name, lambda tensor: prefix + tensor)[0]
    truth = read(name)["sites"]
    assert sorted(site.site for site in found) == sorted(prefix + site["site"] for site in truth)
    eps = {site.site: (site.kind, site.eps, site.gamma_offset) for site in found}
    assert eps == {prefix + s["site"]: (s["kind"], s["eps"], s["gamma_offset"]) for s in truth}


def test_wrapper_in_the_middle():
    def wrapped(tensor):
        return tensor.replace(".h.0.", ".h.0._fsdp_wrapped_module.")

    found = norms_of("gpt2", wrapped)[0]
    assert "transformer.h.0._fsdp_wrapped_module.ln_1" in [site.site for site in found]
    assert len(found) == len(read("gpt2")["sites"])


@pytest.mark.parametrize(
    ("parts", "separator"),
    [
        ({"weight": D, "bias": D}, "."),
        ({"gamma": D, "beta": D}, "."),
        ({"gamma": D, "beta": D}, "/"),
        ({"gamma:0": D, "beta:0": D}, "/"),
        ({"scale": D, "bias": D}, "/"),
        ({"scale": D, "offset": D}, "/"),
        ({"g": D, "b": D}, "."),
        ({"w": D, "b": D}, "."),
        ({"a_2": D, "b_2": D}, "."),
    ],
)
def test_spellings(parts, separator):
    name = separator.join(("encoder", "layer_0", "LayerNorm"))
    (site,), none = found_in(module(name, parts, separator))
    assert (site.site, site.kind, site.width, none) == (name, "layer", 8, [])
    assert (site.gamma, site.beta) == tuple(f"{name}{separator}{part}" for part in parts)


def test_fused_norm_of_transformer_engine():
    shapes = {
        "layers.0.self_attention.linear_qkv.layer_norm_weight": D,
        "layers.0.self_attention.linear_qkv.layer_norm_bias": D,
        "layers.0.self_attention.linear_qkv.weight": [24, 8],
        "layers.0.self_attention.linear_qkv.bias": [24],
    }
    (site,), none = found_in(shapes)
    assert (site.site, none) == ("layers.0.self_attention.linear_qkv.layer_norm", [])


@pytest.mark.parametrize(
    ("name", "parts", "reason"),
    [
        ("bn1", {**PAIR, "running_mean": D, "running_var": D}, "batch norm"),
        ("layer.norm2", {**PAIR, "running_mean": D}, "batch norm"),
        ("block.bn", {"gamma": D, "beta": D, "moving_mean": D}, "batch norm"),
        ("down.0.groupnorm", PAIR, "group norm"),
        ("down.0.norm_gn", PAIR, "group norm"),
        ("x.instance_norm", PAIR, "instance norm"),
        ("stages.0.blocks.0", {"gamma": D}, "layer scale"),
        ("blocks.0.ls1", {"gamma": D}, "layer scale"),
        ("blocks.1.grn", {"gamma": D, "beta": D}, "GRN"),
        ("decoder.act", {"weight": D}, "activation"),
        ("exp_avg.h.0.ln_1", PAIR, "optimizer"),
        ("optimizer.state.ln_f", PAIR, "optimizer"),
        ("scale", {"weight": D}, "not called a norm"),
        ("final_norm", {"bias": D}, "without a gain"),
        ("final_norm", {"weight": D, "bias": [4]}, "shape"),
    ],
)
def test_what_only_looks_like_a_norm(name, parts, reason):
    shapes = module(name, parts)
    assert names(shapes) == []
    assert reason in excluded(shapes)[name]


@pytest.mark.parametrize(
    "shapes",
    [
        module("fc", {"weight": [8, 8], "bias": D}),
        module("conv", {"weight": [8, 3, 3, 3], "bias": D}),
        module("conv1d", {"weight": [8, 1, 3]}),
        {"attn.bias": [1, 1, 4, 4], "attn.masked_bias": [1]},
        {"logit_scale": []},
        {"betas": D, "alphabeta.weight": [3, 8], "scheduler.gamma_table": D},
        {"bert/LayerNorm/gamma/adam_m": D, "bert/LayerNorm/gamma/adam_v": D},
    ],
)
def test_what_nobody_takes_for_a_norm(shapes):
    assert names(shapes) == []


def test_integers_are_no_gain():
    tensors = {f"norm.{part}": StoredTensor("f", "int8", (8,), 0) for part in PAIR}
    assert find_norms(tensors, None)[0] == []


def test_scale_of_float8_is_known():
    tensors = {
        "ln.weight": StoredTensor("f", "float8_e4m3fn", (4,), 0),
        "ln.weight_scale_inv": StoredTensor("f", "float32", (1,), 4),
        "ln.bias": StoredTensor("f", "float32", (4,), 8),
    }
    ((site,), _) = find_norms(tensors, None)
    assert site.gamma_scale == "ln.weight_scale_inv"


def test_natural_order():
    shapes = {k: v for i in (10, 2, 1) for k, v in module(f"h.{i}.ln_1").items()}
    assert names(shapes) == ["h.1.ln_1", "h.2.ln_1", "h.10.ln_1"]


def test_a_gain_alone_is_of_unknown_kind_until_something_says():
    shapes = module("layers.0.input_layernorm", {"weight": D})
    assert [s.kind for s in found_in(shapes)[0]] == ["unknown"]
    assert [s.kind for s in found_in(shapes, {"rms_norm_eps": 1e-6})[0]] == ["rms"]
    assert [s.kind for s in found_in(module("layers.0.rms_norm", {"weight": D}))[0]] == ["rms"]
    cohere = {"model_type": "cohere", "layer_norm_eps": 1e-5}
    assert [s.kind for s in found_in(shapes, cohere)[0]] == ["layer"]


@pytest.mark.parametrize(
    ("config", "eps", "source"),
    [
        (None, None, None),
        ({"model_type": "none"}, None, None),
        ({"model_type": "bert", "layer_norm_eps": 1e-12}, 1e-12, "config.json: layer_norm_eps"),
        ({"model_type": "gpt2", "layer_norm_epsilon": 1e-5}, 1e-5, "config.json: layer_norm_epsilon"),
        ({"model_type": "persimmon", "layernorm_epsilon": 1e-6}, 1e-6, "config.json: layernorm_epsilon"),
        ({"model_type": "dino", "norm_eps": 1e-6}, 1e-6, "config.json: norm_eps"),
        ({"model_type": "whisper"}, 1e-5, "family whisper"),
        ({"model_type": "bert"}, 1e-12, "family bert"),
    ],
)
def test_where_eps_is_from(config, eps, source):
    ((site,), _) = found_in(module("ln"), config)
    assert (site.eps, site.eps_source) == (eps, source)


def test_nested_configs():
    config = {
        "text_config": {"model_type": "llama", "rms_norm_eps": 1e-6},
        "vision_config": {"model_type": "siglip_vision_model", "layer_norm_eps": 1e-5},
    }
    shapes = module("vision_tower.encoder.layers.0.layer_norm1") | module(
        "language_model.model.norm", {"weight": D}
    )
    sites = {site.site: site for site in found_in(shapes, config)[0]}
    assert sites["language_model.model.norm"].kind == "rms"
    assert sites["language_model.model.norm"].eps_source == "config.json: text_config.rms_norm_eps"
    assert sites["vision_tower.encoder.layers.0.layer_norm1"].eps == 1e-5
