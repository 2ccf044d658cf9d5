"""What config.json says, and which part of it speaks of a module."""

import pytest

from layernorm_cli.checkpoints.config import eps_in, make_config, sections_for

VISION = {"model_type": "siglip_vision_model", "layer_norm_eps": 1e-6}
TEXT = {"model_type": "llama", "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("path", "places"),
    [
        ("vision_tower.encoder.layers.0.layer_norm1", ["vision_config.", ""]),
        ("model.visual.blocks.0.norm1", ["vision_config.", ""]),
        ("language_model.model.layers.0.input_layernorm", ["text_config.", ""]),
        ("model.layers.0.input_layernorm", ["text_config.", ""]),
    ],
)
def test_sections(path, places):
    config = make_config({"vision_config": VISION, "text_config": TEXT})
    assert [section.place for section in sections_for(config, path)] == places


def test_deeply_nested():
    config = make_config({"thinker_config": {"audio_config": {"norm_eps": 1e-3}}})
    found = sections_for(config, "thinker.audio_tower.layers.0.norm")
    assert [section.place for section in found] == [
        "thinker_config.audio_config.",
        "thinker_config.",
        "",
    ]


@pytest.mark.parametrize(
    ("fields", "kind", "eps"),
    [
        ({"layer_norm_eps": 1e-12}, "layer", 1e-12),
        ({"layer_norm_epsilon": 1e-6}, "rms", 1e-6),
        ({"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5}, "rms", 1e-6),
        ({"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5}, "layer", 1e-5),
        ({"eps": 1e-3, "norm_eps": 1e-5}, "layer", 1e-5),
        ({"batch_norm_eps": 1e-3}, "layer", None),
        ({"layer_norm_eps": "1e-5"}, "layer", None),
        ({"layer_norm_eps": float("nan")}, "layer", None),
        ({"layer_norm_eps": True}, "layer", None),
        ({}, "layer", None),
    ],
)
def test_eps(fields, kind, eps):
    found = eps_in(make_config(fields).whole, kind)
    assert (None if found is None else found[1]) == eps


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"rms_norm_eps": 1e-6}, "rms"),
        ({"norm_type": "rmsnorm"}, "rms"),
        ({"normalization": "RMSNorm"}, "rms"),
        ({"norm_type": "low_precision_layernorm"}, "layer"),
        ({"use_rmsnorm": True}, "rms"),
        ({"layer_norm_eps": 1e-5}, None),
        ({}, None),
    ],
)
def test_kind(fields, kind):
    assert make_config(fields).whole.kind == kind


def test_architecture_and_family():
    config = make_config({"architectures": ["GPT2Model"], "model_type": "gpt2"})
    assert (config.architecture, config.whole.family) == ("GPT2Model", "gpt2")
    assert make_config({"architectures": [1], "model_type": 3}).architecture is None
