//! Which tensor has which role, and how it lies in the checkpoint.
//!
//! Families differ in names more than in arithmetic. A [`TensorMap`] is a table of names; whoever loads weights asks for
//! roles. Names are without `.weight` and `.bias`.

/// What a tensor is for. The first ones stand once in a model, the others once in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    Embedding,
    Positions,
    OutputNorm,
    Output,
    LayerInputs,
    LayerInputProjection,
    LayerInputNorm,

    AttentionNorm,
    Query,
    Key,
    Value,
    /// All three in one tensor; [`Fused`] says how.
    QueryKeyValue,
    QueryNorm,
    KeyNorm,
    /// One tensor per head: `{h}`.
    QueryNormOfHead,
    KeyNormOfHead,
    QueryDown,
    QueryDownNorm,
    QueryUp,
    /// Latent and rotated key part.
    LatentDown,
    LatentNorm,
    /// Keys and values of all heads from the latent, head by head.
    LatentUp,
    /// The same in two tensors, one matrix a head; the first is transposed.
    LatentUpKey,
    LatentUpValue,
    Sinks,
    AttentionOutput,
    AttentionBranchNorm,

    FeedForwardNorm,
    Gate,
    Up,
    /// Gate, then up.
    GateUp,
    Down,
    DenseNorm,
    FeedForwardBranchNorm,
    RowGate,

    RouterWeight,
    RouterVector,
    RouterCorrection,
    ExpertScale,
    ExpertInputNorm,
    ExpertNorm,
    /// With `{e}`: one tensor an expert; without: all experts in one.
    ExpertGate,
    ExpertUp,
    ExpertGateUp,
    ExpertDown,
    /// The feed-forward part beside experts, where its names differ from those of a layer without.
    SharedGate,
    SharedUp,
    SharedDown,

    LayerInputGate,
    LayerInputUp,
    LayerInputBranchNorm,
    LayerScale,
}

/// How a tensor of Q, K and V is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fused {
    /// All of Q, all of K, all of V.
    Stacked,
    /// Per key head: its queries, its key, its value.
    PerKeyHead,
}

/// Names and layout of a checkpoint's tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorMap {
    /// Before every name of the table.
    pub prefix: String,
    /// After the prefix, before a layer's names: `layers.{}.`.
    pub layer: &'static str,
    /// Later entries of a role go before earlier ones.
    pub table: Vec<(Role, &'static str)>,
    pub fused: Fused,
    /// Matrices of layers are stored in × out.
    pub transposed: bool,
    /// Matrices of experts that lie in one tensor are stored in × out.
    pub experts_transposed: bool,
    /// Rows of gate and up take turns.
    pub experts_interleaved: bool,
    /// Experts that lie in one tensor have biases of this suffix.
    pub expert_bias: &'static str,
    pub expert_weight: &'static str,
    /// Added to the stored weights of norms.
    pub norm_offset: f32,
    /// Tensors that need not be read: buffers, other parts of a larger model. By a part of their names.
    pub ignored: Vec<String>,
}

impl TensorMap {
    #[must_use]
    pub fn new(prefix: &str, layer: &'static str, tables: &[&[(Role, &'static str)]]) -> Self {
        Self {
            prefix: prefix.to_owned(),
            layer,
            table: tables.concat(),
            fused: Fused::Stacked,
            transposed: false,
            experts_transposed: false,
            experts_interleaved: false,
            expert_bias: ".bias",
            expert_weight: ".weight",
            norm_offset: 0.0,
            ignored: Vec::new(),
        }
    }

    /// The name of a role that stands once in the model; one that begins with `/` has no prefix.
    #[must_use]
    pub fn once(&self, role: Role) -> Option<String> {
        let name = self.pattern(role)?;
        Some(match name.strip_prefix('/') {
            Some(whole) => whole.to_owned(),
            None => format!("{}{name}", self.prefix),
        })
    }

    /// The name of a layer's role.
    #[must_use]
    pub fn layer(&self, layer: usize, role: Role) -> Option<String> {
        let name = self.pattern(role)?;
        Some(format!("{}{}{name}", self.prefix, self.layer.replace("{}", &layer.to_string())))
    }

    fn pattern(&self, role: Role) -> Option<&'static str> {
        self.table.iter().rev().find(|(other, _)| *other == role).map(|(_, name)| *name).filter(|name| !name.is_empty())
    }

    /// Adds names; they go before those that are there.
    #[must_use]
    pub fn with(mut self, table: &[(Role, &'static str)]) -> Self {
        self.table.extend_from_slice(table);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_names_go_first() {
        let map = TensorMap::new("model.", "layers.{}.", &[&[(Role::Query, "q"), (Role::Output, "/lm_head"), (Role::Sinks, "s")]]);
        assert_eq!(map.layer(3, Role::Query).as_deref(), Some("model.layers.3.q"));
        assert_eq!(map.once(Role::Output).as_deref(), Some("lm_head"));
        let map = map.with(&[(Role::Query, "wq"), (Role::Sinks, "")]);
        assert_eq!(map.layer(0, Role::Query).as_deref(), Some("model.layers.0.wq"));
        assert_eq!(map.layer(0, Role::Sinks), None);
        assert_eq!(map.layer(0, Role::Key), None);
    }
}
