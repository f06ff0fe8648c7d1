//! One layer's weights.

use std::borrow::Cow;

use quire_kernels::{
    backend::{Backend, Precision, Span},
    quant::TensorType,
};

use super::{
    NormWeights, Packer,
    piece::Piece,
    source::{Parts, Place},
};
use crate::model::{
    description::{Attention, Dense, Description, Experts, HeadNorm, Keys, Latent, Norm, names::Role},
    error::ContentError,
};

pub struct AttentionWeights<B: Backend> {
    pub norm: Option<NormWeights<B>>,
    /// Q, K and V, one below the other; of latent attention what comes from the hidden state.
    pub qkv: B::Linear,
    pub query_norm: Option<NormWeights<B>>,
    pub key_norm: Option<NormWeights<B>>,
    pub value_norm: Option<NormWeights<B>>,
    pub latent: Option<LatentWeights<B>>,
    pub sinks: Option<B::Buffer>,
    pub output: B::Linear,
    pub branch_norm: Option<NormWeights<B>>,
}

/// What latent attention has beside the first projection.
pub struct LatentWeights<B: Backend> {
    pub query_up: Option<(NormWeights<B>, B::Linear)>,
    pub norm: NormWeights<B>,
    /// Per head, rank × plain part.
    pub absorb: B::Linear,
    /// Per head, values × rank.
    pub values: B::Linear,
}

pub struct DenseWeights<B: Backend> {
    /// Gate, then up; or up alone.
    pub gate_up: B::Linear,
    pub down: B::Linear,
    /// One row.
    pub row_gate: Option<B::Linear>,
    pub norm: Option<NormWeights<B>>,
}

pub struct ExpertWeights<B: Backend> {
    pub router: B::Linear,
    pub router_norm: Option<NormWeights<B>>,
    pub correction: Option<B::Buffer>,
    pub expert_scale: Option<B::Buffer>,
    pub input_norm: Option<NormWeights<B>>,
    pub gate_up: B::Linear,
    pub down: B::Linear,
    pub norm: Option<NormWeights<B>>,
}

pub struct LayerInputPart<B: Backend> {
    pub gate: B::Linear,
    pub up: B::Linear,
    pub branch_norm: NormWeights<B>,
}

pub struct LayerWeights<B: Backend> {
    pub attention: AttentionWeights<B>,
    pub feed_forward_norm: Option<NormWeights<B>>,
    pub dense: Option<DenseWeights<B>>,
    pub experts: Option<ExpertWeights<B>>,
    pub feed_forward_branch_norm: Option<NormWeights<B>>,
    pub layer_input: Option<LayerInputPart<B>>,
    /// Multiplies the layer's result.
    pub scale: f32,
}

impl<B: Backend> Packer<'_, '_, '_, B> {
    pub(super) fn layer(&mut self, layer: usize, d: &Description) -> Result<LayerWeights<B>, ContentError> {
        let described = &d.layers[layer];
        let feed_forward = &described.feed_forward;
        let at = |role| Place::Layer(layer, role);
        let dense = feed_forward.dense.map(|dense| self.dense(layer, &dense, d, feed_forward.experts.is_some())).transpose()?;
        let experts = feed_forward.experts.map(|experts| self.experts(layer, &experts, d)).transpose()?;
        let layer_input = match d.layer_input {
            None => None,
            Some(width) => Some(LayerInputPart {
                gate: self.matrix(at(Role::LayerInputGate), width, d.hidden, Precision::Byte)?,
                up: self.matrix(at(Role::LayerInputUp), d.hidden, width, Precision::Byte)?,
                branch_norm: self.norm(d.output_norm, at(Role::LayerInputBranchNorm), d.hidden)?,
            }),
        };
        let scale = if described.scaled { self.source.vector(at(Role::LayerScale), 1)?.first().copied() } else { None };
        Ok(LayerWeights {
            attention: self.attention(layer, d)?,
            feed_forward_norm: self.maybe_norm(feed_forward.norm, at(Role::FeedForwardNorm), d.hidden)?,
            dense,
            experts,
            feed_forward_branch_norm: self.maybe_norm(feed_forward.output.norm, at(Role::FeedForwardBranchNorm), d.hidden)?,
            layer_input,
            scale: scale.unwrap_or(1.0),
        })
    }

    fn maybe_norm(&self, norm: Option<Norm>, place: Place, len: usize) -> Result<Option<NormWeights<B>>, ContentError> {
        norm.map(|norm| self.norm(norm, place, len)).transpose()
    }

    fn attention(&mut self, layer: usize, d: &Description) -> Result<AttentionWeights<B>, ContentError> {
        let attention = &d.layers[layer].attention;
        let at = |role| Place::Layer(layer, role);
        let (qkv, latent) = match attention.keys {
            Keys::Latent(latent) => {
                let parts = self.source.latent_down(layer, attention, &latent, d.hidden)?;
                (self.pack(&parts, Precision::TwoBytes)?, Some(self.latent(layer, attention, &latent)?))
            }
            _ => {
                let parts = self.source.query_key_value(layer, d)?;
                (self.pack(&parts, Precision::TwoBytes)?, None)
            }
        };
        let head_norm = |roles, heads| match attention.head_norm {
            Some(norm) => self.head_norm(layer, &norm, roles, heads, attention.head_dim).map(Some),
            None => Ok(None),
        };
        let query_norm = head_norm((Role::QueryNormOfHead, Role::QueryNorm), attention.heads)?;
        let keys = attention.own_keys() && latent.is_none();
        let key_norm = if keys { head_norm((Role::KeyNormOfHead, Role::KeyNorm), attention.kv_heads)? } else { None };
        let sinks = if attention.sinks { Some(self.source.vector(at(Role::Sinks), attention.heads)?) } else { None };
        Ok(AttentionWeights {
            norm: self.maybe_norm(attention.norm, at(Role::AttentionNorm), d.hidden)?,
            qkv,
            query_norm,
            key_norm,
            value_norm: attention.value_norm.filter(|_| keys).map(|norm| NormWeights { norm, weight: None, bias: None }),
            latent,
            sinks: sinks.map(|sinks| self.backend.buffer_from(&sinks)).transpose()?,
            output: self.matrix(at(Role::AttentionOutput), d.hidden, attention.heads * attention.value_dim, Precision::Byte)?,
            branch_norm: self.maybe_norm(attention.output.norm, at(Role::AttentionBranchNorm), d.hidden)?,
        })
    }

    /// Weights of one head for all, of each head, or of all together.
    fn head_norm(
        &self,
        layer: usize,
        head_norm: &HeadNorm,
        roles: (Role, Role),
        heads: usize,
        head_dim: usize,
    ) -> Result<NormWeights<B>, ContentError> {
        let norm = head_norm.norm;
        if head_norm.plain_after_rope {
            return Ok(NormWeights { norm, weight: None, bias: None });
        }
        match head_norm.span {
            Span::Head => self.norm(norm, Place::Layer(layer, roles.1), head_dim),
            Span::Width => self.norm(norm, Place::Layer(layer, roles.1), heads * head_dim),
            Span::EachHead => {
                let weights = self.source.head_norms(layer, roles, heads, head_dim)?;
                Ok(NormWeights { norm, weight: Some(self.backend.buffer_from(&weights)?), bias: None })
            }
        }
    }

    fn latent(&mut self, layer: usize, attention: &Attention, latent: &Latent) -> Result<LatentWeights<B>, ContentError> {
        let at = |role| Place::Layer(layer, role);
        let queries = attention.heads * attention.head_dim;
        let query_up = match latent.query_rank {
            None => None,
            Some(rank) => {
                let norm = self.norm(latent.norm, at(Role::QueryDownNorm), rank)?;
                Some((norm, self.matrix(at(Role::QueryUp), queries, rank, Precision::TwoBytes)?))
            }
        };
        let (absorb, values) = self.source.latent_up(layer, attention, latent)?;
        Ok(LatentWeights {
            query_up,
            norm: self.norm(latent.norm, at(Role::LatentNorm), latent.rank)?,
            absorb: self.pack(&absorb, Precision::TwoBytes)?,
            values: self.pack(&values, Precision::TwoBytes)?,
        })
    }

    fn dense(&mut self, layer: usize, dense: &Dense, d: &Description, shared: bool) -> Result<DenseWeights<B>, ContentError> {
        let at = |role| Place::Layer(layer, role);
        let gate_up = self.source.gate_up(layer, dense.width, d.hidden, dense.gated, shared)?;
        let down = self.source.down(layer, dense.width, d.hidden, shared)?;
        let row_gate = if dense.row_gate { Some(self.matrix_as_stored(at(Role::RowGate), 1, d.hidden, Precision::Byte)?) } else { None };
        Ok(DenseWeights {
            gate_up: self.pack(&gate_up, Precision::Byte)?,
            down: self.pack(&down, Precision::TwoBytes)?,
            row_gate,
            norm: self.maybe_norm(dense.norm, at(Role::DenseNorm), d.hidden)?,
        })
    }

    fn experts(&mut self, layer: usize, experts: &Experts, d: &Description) -> Result<ExpertWeights<B>, ContentError> {
        let at = |role| Place::Layer(layer, role);
        let router = &experts.router;
        let router_norm = match router.own_norm {
            None => None,
            Some(norm) => {
                let share = (d.hidden as f64).sqrt().recip() as f32;
                let weights: Vec<f32> = self.source.vector(at(Role::RouterVector), d.hidden)?.iter().map(|w| w * share).collect();
                Some(NormWeights { norm, weight: Some(self.backend.buffer_from(&weights)?), bias: None })
            }
        };
        let per_expert = |wanted: bool, role| match wanted {
            true => {
                let values = self.source.loose_vector(at(role), experts.count)?;
                Ok::<_, ContentError>(Some(self.backend.buffer_from(&values)?))
            }
            false => Ok(None),
        };
        let (correction, expert_scale) =
            (per_expert(router.correction, Role::RouterCorrection)?, per_expert(router.expert_scale, Role::ExpertScale)?);
        let (gate_up, down) = self.source.experts(layer, experts.count, experts.width, d.hidden)?;
        Ok(ExpertWeights {
            router: self.matrix_as_stored(at(Role::RouterWeight), experts.count, d.hidden, Precision::TwoBytes)?,
            router_norm,
            correction,
            expert_scale,
            input_norm: self.maybe_norm(experts.input_norm, at(Role::ExpertInputNorm), d.hidden)?,
            gate_up: self.pack(&gate_up, Precision::Byte)?,
            down: self.pack(&down, Precision::TwoBytes)?,
            norm: self.maybe_norm(experts.norm, at(Role::ExpertNorm), d.hidden)?,
        })
    }
}

impl super::source::Source<'_, '_> {
    /// What latent attention takes from the hidden state: queries or their low-rank vector, latent, rotated key.
    pub(super) fn latent_down(
        &self,
        layer: usize,
        attention: &Attention,
        latent: &Latent,
        hidden: usize,
    ) -> Result<Parts<'_>, ContentError> {
        let at = |role| Place::Layer(layer, role);
        let mut parts = match latent.query_rank {
            Some(rank) => self.matrix(at(Role::QueryDown), rank, hidden)?,
            None => self.matrix(at(Role::Query), attention.heads * attention.head_dim, hidden)?,
        };
        parts.append(self.matrix(at(Role::LatentDown), latent.rank + latent.rope_dim, hidden)?);
        Ok(parts)
    }

    /// Per head: the transposed key rows and the value rows of the projection from the latent.
    pub(super) fn latent_up(&self, layer: usize, attention: &Attention, latent: &Latent) -> Result<(Parts<'_>, Parts<'_>), ContentError> {
        let at = |role| Place::Layer(layer, role);
        let (heads, plain, value, rank) = (attention.heads, latent.plain_dim, attention.value_dim, latent.rank);
        let (mut absorb, mut values) = (Parts::default(), Parts::default());
        if self.has(at(Role::LatentUpKey)) {
            let keys = self.matrix(at(Role::LatentUpKey), heads * rank, plain)?;
            let all = self.matrix(at(Role::LatentUpValue), heads * value, rank)?;
            for head in 0..heads {
                absorb.push(keys.pieces[0].cut(head * rank, rank)?, None);
                values.push(all.pieces[0].cut(head * value, value)?, None);
            }
            return Ok((absorb, values));
        }
        let whole = self.matrix(at(Role::LatentUp), heads * (plain + value), rank)?;
        for head in 0..heads {
            let start = head * (plain + value);
            absorb.push(widened(&whole.pieces[0].cut(start, plain)?)?.turned()?, None);
            values.push(whole.pieces[0].cut(start + plain, value)?, None);
        }
        Ok((absorb, values))
    }
}

/// As F32 where it lies in blocks, which can't be turned.
fn widened<'a>(piece: &Piece<'a>) -> Result<Piece<'a>, ContentError> {
    if piece.tensor_type.is_float() {
        return Ok(piece.clone());
    }
    let mut values = vec![0.0; piece.rows * piece.columns];
    quire_kernels::quant::dequantize(piece.tensor_type, &piece.data, &mut values)?;
    let data = Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect());
    Ok(Piece { tensor_type: TensorType::F32, data, ..piece.clone() })
}
