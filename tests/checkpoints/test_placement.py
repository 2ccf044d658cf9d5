"""Pre-norm or post-norm, and the role of each norm in words."""

import pytest

from layernorm_cli.checkpoints.config import make_config
from layernorm_cli.checkpoints.placement import placement_of, roles_of

from .families import found_in, norms_of, read

PLACEMENTS = {
    "pre": "gpt2 gptj bloom opt llama gemma qwen3 mpt clip whisper t5 mbart vit mamba falcon cohere "
    "megatron-bert roberta-prelayernorm swin wav2vec2_layer pegasus",
    "post": "bert albert deberta-v2 bart marian distilbert openai-gpt xlm xlnet opt350 electra "
    "wav2vec2_group mpnet prophetnet",
    "sandwich": "gemma2 gemma3_text glm4",
    "output": "olmo2",
    "mixed": "blip",
}
ROLES = {
    ("gpt2", "transformer.h.0.ln_1"): "before attention",
    ("gpt2", "transformer.h.0.ln_2"): "before the feed-forward",
    ("gpt2", "transformer.ln_f"): "final",
    ("gptj", "h.0.ln_1"): "before attention and the feed-forward",
    ("marian", "decoder.layers.0.self_attn_layer_norm"): "after the attention residual",
    ("marian", "decoder.layers.0.encoder_attn_layer_norm"): "after the cross-attention residual",
    ("marian", "decoder.layers.0.final_layer_norm"): "after the feed-forward residual",
    ("whisper", "decoder.layers.0.final_layer_norm"): "before the feed-forward",
    ("whisper", "decoder.layer_norm"): "final",
    ("bert", "encoder.layer.0.attention.output.LayerNorm"): "after the attention residual",
    ("bert", "embeddings.LayerNorm"): "on the embeddings",
    ("llama", "model.layers.0.post_attention_layernorm"): "before the feed-forward",
    ("gemma2", "layers.0.post_attention_layernorm"): "on the output of attention",
    ("olmo2", "layers.0.post_attention_layernorm"): "on the output of attention",
    ("qwen3", "model.layers.0.self_attn.q_norm"): "on queries",
    ("qwen3", "model.layers.0.self_attn.k_norm"): "on keys",
    ("t5", "decoder.block.0.layer.1.layer_norm"): "before cross-attention",
    ("t5", "encoder.block.0.layer.1.layer_norm"): "before the feed-forward",
    ("mamba", "backbone.layers.0.norm"): "before the mixer",
    ("clip", "vision_model.post_layernorm"): "final",
}


def config_of(name):
    return make_config(read(name)["config"])


@pytest.mark.parametrize(
    ("name", "placement"), [(n, p) for p, names in PLACEMENTS.items() for n in names.split()]
)
def test_placement(name, placement):
    assert placement_of(norms_of(name)[0], config_of(name)) == placement


@pytest.mark.parametrize(("name", "site"), ROLES)
def test_roles(name, site):
    assert roles_of(norms_of(name)[0], config_of(name))[site] == ROLES[name, site]


def test_gpt2_without_a_config():
    assert placement_of(norms_of("gpt2")[0], None) == "pre"


def test_nothing_is_said_of_too_little():
    sites, _ = found_in({"blocks.0.norm1.weight": [8], "blocks.0.norm1.bias": [8]})
    assert placement_of(sites, None) is None
    assert placement_of([], None) is None
