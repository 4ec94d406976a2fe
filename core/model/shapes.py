"""Names and shapes of a decoder's tensors, in the spelling of transformers."""

from __future__ import annotations

from .config import DecoderConfig

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Every tensor that a checkpoint must hold."""
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: DecoderConfig) -> Shapes:
    hidden, width = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, q_width),
        "mlp.down_proj.weight": (hidden, width),
    }
    if config.fold.fused_qkv:
        shapes["self_attn.qkv_proj.weight"] = (q_width + 2 * kv_width, hidden)
    else:
        shapes["self_attn.q_proj.weight"] = (q_width, hidden)
        shapes["self_attn.k_proj.weight"] = shapes["self_attn.v_proj.weight"] = (kv_width, hidden)
    if config.fold.fused_gate_up:
        shapes["mlp.gate_up_proj.weight"] = (2 * width, hidden)
    else:
        shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (width, hidden)
    if config.qk_norm:
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        shapes |= dict.fromkeys(norms, (config.head_dim,))
    return shapes | _biases(config, shapes)


def _biases(config: DecoderConfig, shapes: Shapes) -> Shapes:
    """A bias is as long as its weight has rows."""
    biased = {
        "self_attn.q_proj": config.qkv_bias,
        "self_attn.k_proj": config.qkv_bias,
        "self_attn.v_proj": config.qkv_bias,
        "self_attn.o_proj": config.o_bias,
        "mlp.gate_proj": config.mlp_bias,
        "mlp.up_proj": config.mlp_bias,
        "mlp.down_proj": config.mlp_bias,
    }
    biased["self_attn.qkv_proj"], biased["mlp.gate_up_proj"] = config.qkv_bias, config.mlp_bias
    return {
        f"{name}.bias": (shapes[f"{name}.weight"][0],)
        for name, has in biased.items()
        if has and f"{name}.weight" in shapes
    }
