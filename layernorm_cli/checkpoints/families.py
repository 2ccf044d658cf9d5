"""What each family of models does with its norms, as data.

A row says what neither the tensors nor config.json can: which kind a gain without a bias is, the eps
that the code of the family sets itself, gains stored less one, and modules that look like norms.
Source: the modules of each family, run on random rows.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

__all__ = ["FAMILIES", "Family", "Rule", "family_row", "rule_for"]


class Rule(NamedTuple):
    """Norms of a family that are unlike its others: those whose path the pattern matches to its end.

    eps and kind, where set, hold whatever config.json says; not_a is what the module is, if no layer
    norm. when is a key and a value of the config that must hold.
    """

    pattern: str
    kind: str | None = None
    eps: float | None = None
    offset: int | None = None
    not_a: str | None = None
    when: tuple[str, object] | None = None


class Family(NamedTuple):
    """A family: the kind of its norms without bias, the eps that holds where config.json has none.

    offset is in the gains of norms of that kind. placement is pre or post, unless config.json says it.
    """

    kind: str | None = None
    eps: float | None = None
    offset: int = 0
    rules: tuple[Rule, ...] = ()
    placement: str | None = None


def _rows(names: str, row: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), row)


_BART_LIKE = """
    bart mbart pegasus pegasus_x bigbird_pegasus blenderbot blenderbot_small marian m2m_100 nllb_moe
    plbart mvp led fsmt xglm speech_to_text trocr opt whisper voxtral voxtral_encoder qwen2_audio
    qwen2_audio_encoder audioflamingo3 audioflamingo3_encoder musicflamingo musicgen_decoder
    musicgen_melody_decoder moss_transcribe_diarize moss_transcribe_diarize_audio bark glmasr
    glmasr_encoder qwen3_asr qwen3_asr_encoder qwen3_omni_moe qwen2_5_omni autoformer informer
    time_series_transformer
"""
_BERT_LIKE = """
    bert roberta xlm_roberta camembert electra albert mpnet ernie layoutlm lilt longformer luke
    big_bird roc_bert roformer rembert splinter squeezebert megatron_bert convbert data2vec_text
    fnet ibert xmod yoso esm tapas markuplm visual_bert vilt bros canine dpr bert_generation
    flaubert xlm xlnet reformer roberta_prelayernorm lxmert distilbert chinese_clip_text blip_text
    clap_text blip_2_qformer instructblip_qformer instructblipvideo_qformer git gte nomic_bert vit
    deit beit data2vec_vision dpt flava flava_image flava_multimodal vit_mae videomae yolos
    audio_spectrogram_transformer ijepa tvp
"""
_LLAMA_LIKE_6 = """
    llama mistral ministral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text granite
    granitemoe granitemoeshared jamba jetmoe smollm3 seed_oss olmo_hybrid minimax_m2
"""
_LLAMA_LIKE_5 = """
    mixtral phi3 phimoe olmo2 olmo3 olmoe gpt_oss exaone4 glm4_moe bamba zamba zamba2 arcee apertus
    diffllama ernie4_5 falcon_h1 internlm3 mllama_text llama4_text bitnet dots1 hunyuan_v1_dense
    hunyuan_v1_moe emu3_text
"""
_T5_LIKE = "t5 mt5 umt5 longt5 switch_transformers udop pop2piano pix2struct_text pix2struct"
_SPEECH_CONV = """
    wav2vec2 hubert wavlm unispeech unispeech_sat sew data2vec_audio wav2vec2_conformer speecht5
    seamless_m4t wav2vec2_bert
"""
_CONFORMERS = """
    parakeet_encoder parakeet_ctc parakeet_rnnt parakeet_tdt canary cohere_asr granite_speech
    granite_speech_encoder granite_speech_plus granite_speech5_ctc granite_speech5_encoder
    nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron3_5_asr fastspeech2_conformer
    fastspeech2_conformer_with_hifigan
"""
_QWEN_VISION = """
    qwen2_vl qwen2_vl_vision qwen3_vl qwen3_vl_vision qwen3_vl_moe qwen3_vl_moe_vision
    qwen3_5_vision qwen3_5_moe_vision cosmos3_omni cohere_compass_vision
"""
_GEMMA = """
    gemma gemma2 gemma3 gemma3_text paligemma recurrent_gemma t5gemma t5gemma2 t5gemma2_text
    t5gemma2_decoder t5_gemma_module vaultgemma pi0
"""

# Layer norms of code that passes no eps to torch, whose own is 1e-5.
_TORCH_EPS = 1e-5
_GROUP_NORM = "a group norm"

FAMILIES: dict[str, Family] = {
    # Families whose own code sets eps, or whose config leaves it out where it is the usual one.
    **_rows(_BART_LIKE, Family(eps=_TORCH_EPS)),
    **_rows(_BERT_LIKE, Family(eps=1e-12)),
    **_rows(
        "detr table_transformer conditional_detr deformable_detr",
        Family(
            eps=_TORCH_EPS,
            rules=(Rule(r"input_proj\.\d+\.\d+", not_a=_GROUP_NORM),),
            placement="post",
        ),
    ),
    **_rows(_CONFORMERS, Family(eps=_TORCH_EPS)),
    **_rows(_LLAMA_LIKE_6, Family("rms", 1e-6)),
    **_rows(_LLAMA_LIKE_5, Family("rms", 1e-5)),
    **_rows(
        "gpt2 gpt_sw3 gpt_neo gptj gpt_bigcode codegen openai_gpt bloom falcon rwkv", Family(eps=1e-5)
    ),
    **_rows(
        "decision_transformer clvp_decoder gpt_neox gpt_neox_japanese persimmon phi", Family(eps=1e-5)
    ),
    **_rows(
        "clip clip_text clip_vision clipseg owlvit owlv2 groupvit altclip metaclip_2", Family(eps=1e-5)
    ),
    **_rows("siglip siglip_text siglip_vision siglip2 dinov2 dinov2_with_registers", Family(eps=1e-6)),
    **_rows(
        "idefics2_vision idefics3_vision smolvlm_vision vjepa2 vit_msn sam_vision", Family(eps=1e-6)
    ),
    **_rows("deberta deberta_v2", Family(eps=1e-7)),
    **_rows(
        "sew_d",
        Family(
            eps=1e-7,
            rules=(
                Rule(
                    r"conv_layers\.0\.layer_norm", not_a=_GROUP_NORM, when=("feat_extract_norm", "group")
                ),
                Rule("layer_norm", eps=_TORCH_EPS),
            ),
        ),
    ),
    **_rows("ctrl", Family(eps=1e-6)),
    **_rows("swin swinv2 swin2sr donut_swin maskformer_swin", Family(eps=1e-5)),
    **_rows("funnel", Family(eps=1e-9)),
    # Gains without bias: which kind of norm they belong to.
    **_rows(_T5_LIKE, Family("rms", 1e-6)),
    **_rows(
        "mamba mamba2 falcon_mamba nemotron_h lfm2 lfm2_moe lfm3 lfm3_vl_vision", Family("rms", 1e-5)
    ),
    **_rows("xlstm cpmant timesfm", Family("rms", 1e-6)),
    **_rows("pixtral dia dia_encoder dia_decoder", Family("rms", 1e-5)),
    **_rows("imagegpt", Family("rms", 1e-5)),
    **_rows("cohere cohere2 cohere2_moe cohere2_vision dbrx mpt olmo", Family("layer", 1e-5)),
    **_rows("modernbert modernbert_decoder lasr_encoder", Family("layer", 1e-5)),
    **_rows("moonshine ", Family("layer", _TORCH_EPS)),
    **_rows("starcoder2 stablelm", Family("layer", 1e-5)),
    # Gains stored less one.
    **_rows(_GEMMA, Family("rms", 1e-6, 1)),
    **_rows("nemotron", Family("layer", 1e-5, 1)),
    **_rows("videoprism videoprism_vision videoprism_text", Family("layer", 1e-6, 1)),
    **_rows(
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
        Family("rms", 1e-6, 1, (Rule(r"linear_attn\.norm", offset=0),)),
    ),
    # Norms that differ from the others of their model.
    **_rows(
        "convnext convnextv2 dinov3_convnext",
        Family(
            eps=1e-12,
            rules=(
                Rule(r"(embeddings|layers\.\d+)\.layernorm", eps=1e-6),
                Rule(r"downsampling_layer\.\d+", eps=1e-6),
            ),
        ),
    ),
    **_rows("biogpt perceiver prophetnet", Family(eps=_TORCH_EPS, rules=(Rule(".*", eps=_TORCH_EPS),))),
    **_rows("cvt segformer glpn", Family(None, _TORCH_EPS, 0, (Rule(".*", eps=_TORCH_EPS),), "pre")),
    **_rows(
        "mobilebert",
        Family(
            eps=1e-12,
            rules=(
                Rule(
                    r".*LayerNorm",
                    not_a="an affine map without statistics",
                    when=("normalization_type", "no_norm"),
                ),
            ),
        ),
    ),
    **_rows(
        "deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3",
        Family("rms", 1e-6, rules=(Rule(r"(q|kv)_a_layernorm", eps=1e-6),)),
    ),
    **_rows("bit poolformer mobilevitv2", Family(rules=(Rule(".*", not_a=_GROUP_NORM),))),
    **_rows(
        _SPEECH_CONV,
        Family(
            eps=1e-5,
            rules=(
                Rule(
                    r"conv_layers\.0\.layer_norm", not_a=_GROUP_NORM, when=("feat_extract_norm", "group")
                ),
            ),
            placement="post",
        ),
    ),
    **_rows(_QWEN_VISION, Family(eps=1e-6)),
    **_rows("qwen2_5_vl_vision exaone4_5_vision qwen2_5_omni_vision_encoder", Family("rms", 1e-6)),
    **_rows(
        "qwen2_5_vl exaone4_5", Family("rms", 1e-6, rules=(Rule(r"visual\..*", kind="rms", eps=1e-6),))
    ),
    **_rows("blip_vision chinese_clip_vision altclip_vision clap_audio", Family(eps=1e-5)),
    **_rows("blip_2_vision instructblip_vision instructblipvideo_vision", Family(eps=1e-6)),
    **_rows(
        "internvl aria vipllava", Family(rules=(Rule(r"multi_modal_projector\..*", eps=_TORCH_EPS),))
    ),
    **_rows("aya_vision lfm3_vl", Family(rules=(Rule(r"multi_modal_projector\..*", eps=1e-6),))),
    **_rows(
        "sam sam_hq", Family(rules=(Rule("layer_norm_final_attn", eps=_TORCH_EPS), Rule(".*", eps=1e-6)))
    ),
    **_rows(
        "sam2 sam2_video edgetam_video",
        Family(
            rules=(
                Rule(
                    r"(mask_decoder\.transformer|memory_attention|spatial_perceiver)\..*", eps=_TORCH_EPS
                ),
                Rule(".*", eps=1e-6),
            )
        ),
    ),
    **_rows(
        "maskformer mask2former oneformer",
        Family(
            eps=_TORCH_EPS, rules=(Rule(r"pixel_level_module\.decoder\..*\.\d+", not_a=_GROUP_NORM),)
        ),
    ),
    **_rows("qwen3_omni_moe_vision qwen4_exp_vision", Family(eps=1e-6)),
    **_rows("kimi_k25_vision lw_detr rf_detr rt_detr lightglue", Family(eps=_TORCH_EPS)),
    **_rows("layoutlmv3", Family(eps=1e-5, rules=(Rule("norm", eps=1e-6),))),
    **_rows("minimax", Family("rms", 1e-5, rules=(Rule(r"self_attn\.norm", eps=1e-6),))),
}


@cache
def family_row(model_type: str) -> Family | None:
    """Return the row of a model type, or of what it is a part of: siglip of siglip_vision_model."""
    name = model_type.lower().replace("-", "_")
    while name:
        if name in FAMILIES:
            return FAMILIES[name]
        shorter = re.sub(r"_(model|text|vision|audio|encoder|decoder|moe|vl|transformer)$", "", name)
        if shorter == name:
            return None
        name = shorter
    return None


def rule_for(family: Family, path: str, fields: dict[str, object]) -> Rule | None:
    """Return the first rule of a family that speaks of the norm at path."""
    for rule in family.rules:
        holds = rule.when is None or fields.get(rule.when[0]) == rule.when[1]
        if holds and re.search(rf"(^|\.)({rule.pattern})$", path):
            return rule
    return None
