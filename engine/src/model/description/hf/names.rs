//! Names of tensors in Hugging Face checkpoints.

use crate::model::description::names::Role::{self, *};

type Names = &'static [(Role, &'static str)];

/// Llama and most others.
pub const LLAMA: Names = &[
    (Embedding, "embed_tokens"),
    (OutputNorm, "norm"),
    (Output, "/lm_head"),
    (AttentionNorm, "input_layernorm"),
    (Query, "self_attn.q_proj"),
    (Key, "self_attn.k_proj"),
    (Value, "self_attn.v_proj"),
    (QueryKeyValue, "self_attn.qkv_proj"),
    (QueryNorm, "self_attn.q_norm"),
    (KeyNorm, "self_attn.k_norm"),
    (AttentionOutput, "self_attn.o_proj"),
    (FeedForwardNorm, "post_attention_layernorm"),
    (Gate, "mlp.gate_proj"),
    (Up, "mlp.up_proj"),
    (GateUp, "mlp.gate_up_proj"),
    (Down, "mlp.down_proj"),
];

/// Norms before and after both parts: Gemma 2 and later.
pub const SANDWICH: Names = &[
    (AttentionBranchNorm, "post_attention_layernorm"),
    (FeedForwardNorm, "pre_feedforward_layernorm"),
    (FeedForwardBranchNorm, "post_feedforward_layernorm"),
];

/// Norms after both parts alone: OLMo 2.
pub const AFTER: Names = &[
    (AttentionNorm, ""),
    (FeedForwardNorm, ""),
    (AttentionBranchNorm, "post_attention_layernorm"),
    (FeedForwardBranchNorm, "post_feedforward_layernorm"),
];

pub const GLM4: Names = &[(AttentionBranchNorm, "post_self_attn_layernorm"), (FeedForwardBranchNorm, "post_mlp_layernorm")];

pub const GEMMA4: Names = &[
    (LayerInputs, "embed_tokens_per_layer"),
    (LayerInputProjection, "per_layer_model_projection"),
    (LayerInputNorm, "per_layer_projection_norm"),
    (LayerInputGate, "per_layer_input_gate"),
    (LayerInputUp, "per_layer_projection"),
    (LayerInputBranchNorm, "post_per_layer_input_norm"),
    (LayerScale, "layer_scalar"),
    (DenseNorm, "post_feedforward_layernorm_1"),
    (ExpertNorm, "post_feedforward_layernorm_2"),
    (ExpertInputNorm, "pre_feedforward_layernorm_2"),
    (RouterWeight, "router.proj"),
    (RouterVector, "router.scale"),
    (ExpertScale, "router.per_expert_scale"),
    (ExpertGateUp, "experts.gate_up_proj"),
    (ExpertDown, "experts.down_proj"),
];

/// Experts of Mixtral and MiniMax.
pub const BLOCK_SPARSE: Names = &[
    (RouterWeight, "block_sparse_moe.gate"),
    (RouterCorrection, "block_sparse_moe.e_score_correction_bias"),
    (ExpertGate, "block_sparse_moe.experts.{e}.w1"),
    (ExpertUp, "block_sparse_moe.experts.{e}.w3"),
    (ExpertDown, "block_sparse_moe.experts.{e}.w2"),
];

/// Experts of Qwen, DeepSeek and GLM.
pub const EXPERTS: Names = &[
    (RouterWeight, "mlp.gate"),
    (RouterCorrection, "mlp.gate.e_score_correction_bias"),
    (ExpertGate, "mlp.experts.{e}.gate_proj"),
    (ExpertUp, "mlp.experts.{e}.up_proj"),
    (ExpertDown, "mlp.experts.{e}.down_proj"),
    (SharedGate, "mlp.shared_experts.gate_proj"),
    (SharedUp, "mlp.shared_experts.up_proj"),
    (SharedDown, "mlp.shared_experts.down_proj"),
];

pub const QWEN2_SHARED: Names = &[
    (SharedGate, "mlp.shared_expert.gate_proj"),
    (SharedUp, "mlp.shared_expert.up_proj"),
    (SharedDown, "mlp.shared_expert.down_proj"),
    (RowGate, "mlp.shared_expert_gate"),
];

pub const GPT_OSS: Names = &[
    (Sinks, "self_attn.sinks"),
    (RouterWeight, "mlp.router"),
    (ExpertGateUp, "mlp.experts.gate_up_proj"),
    (ExpertDown, "mlp.experts.down_proj"),
];

pub const LLAMA4: Names = &[
    (Gate, "feed_forward.gate_proj"),
    (Up, "feed_forward.up_proj"),
    (Down, "feed_forward.down_proj"),
    (RouterWeight, "feed_forward.router"),
    (ExpertGateUp, "feed_forward.experts.gate_up_proj"),
    (ExpertDown, "feed_forward.experts.down_proj"),
    (SharedGate, "feed_forward.shared_expert.gate_proj"),
    (SharedUp, "feed_forward.shared_expert.up_proj"),
    (SharedDown, "feed_forward.shared_expert.down_proj"),
];

/// Multi-head latent attention.
pub const LATENT: Names = &[
    (QueryDown, "self_attn.q_a_proj"),
    (QueryDownNorm, "self_attn.q_a_layernorm"),
    (QueryUp, "self_attn.q_b_proj"),
    (LatentDown, "self_attn.kv_a_proj_with_mqa"),
    (LatentNorm, "self_attn.kv_a_layernorm"),
    (LatentUp, "self_attn.kv_b_proj"),
];

pub const PHI: Names = &[
    (OutputNorm, "final_layernorm"),
    (AttentionOutput, "self_attn.dense"),
    (QueryNorm, "self_attn.q_layernorm"),
    (KeyNorm, "self_attn.k_layernorm"),
    (FeedForwardNorm, "input_layernorm"),
    (Up, "mlp.fc1"),
    (Down, "mlp.fc2"),
];

pub const STABLELM: Names = &[(QueryNormOfHead, "self_attn.q_layernorm.norms.{h}"), (KeyNormOfHead, "self_attn.k_layernorm.norms.{h}")];

pub const STARCODER2: Names = &[(Up, "mlp.c_fc"), (Down, "mlp.c_proj")];

pub const GPT2: Names = &[
    (Embedding, "wte"),
    (Positions, "wpe"),
    (OutputNorm, "ln_f"),
    (Output, "/lm_head"),
    (AttentionNorm, "ln_1"),
    (QueryKeyValue, "attn.c_attn"),
    (AttentionOutput, "attn.c_proj"),
    (FeedForwardNorm, "ln_2"),
    (Up, "mlp.c_fc"),
    (Down, "mlp.c_proj"),
];

pub const NEOX: Names = &[
    (Embedding, "embed_in"),
    (OutputNorm, "final_layer_norm"),
    (Output, "/embed_out"),
    (AttentionNorm, "input_layernorm"),
    (QueryKeyValue, "attention.query_key_value"),
    (AttentionOutput, "attention.dense"),
    (FeedForwardNorm, "post_attention_layernorm"),
    (Up, "mlp.dense_h_to_4h"),
    (Down, "mlp.dense_4h_to_h"),
];

pub const FALCON: Names = &[
    (Embedding, "word_embeddings"),
    (OutputNorm, "ln_f"),
    (Output, "/lm_head"),
    (AttentionNorm, "input_layernorm"),
    (QueryKeyValue, "self_attention.query_key_value"),
    (AttentionOutput, "self_attention.dense"),
    (FeedForwardNorm, "post_attention_layernorm"),
    (Up, "mlp.dense_h_to_4h"),
    (Down, "mlp.dense_4h_to_h"),
];
