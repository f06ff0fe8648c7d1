//! Tensors by role; remembers which ones were read.

use std::{cell::RefCell, collections::HashSet};

use super::piece::{self, Piece};
use crate::model::{
    ContentError,
    checkpoint::{Tensor, Tensors},
    description::{
        Description, Keys,
        names::{Fused, Role, TensorMap},
    },
    gguf::clip,
};

/// Rows that go into one packed matrix, with their biases.
#[derive(Default)]
pub struct Parts<'a> {
    pub pieces: Vec<Piece<'a>>,
    /// Empty: none of the parts has one.
    pub bias: Vec<f32>,
}

impl<'a> Parts<'a> {
    pub fn rows(&self) -> usize {
        self.pieces.iter().map(|piece| piece.rows).sum()
    }

    /// Adds a part; parts without a bias get zeros if another has one.
    pub fn push(&mut self, piece: Piece<'a>, bias: Option<Vec<f32>>) {
        let before = self.rows();
        if let Some(own) = bias {
            self.bias.resize(before, 0.0);
            self.bias.extend(own);
        } else if !self.bias.is_empty() {
            self.bias.resize(before + piece.rows, 0.0);
        }
        self.pieces.push(piece);
    }

    pub fn append(&mut self, later: Self) {
        let (before, rows) = (self.rows(), later.rows());
        if !later.bias.is_empty() {
            self.bias.resize(before, 0.0);
            self.bias.extend(later.bias);
        } else if !self.bias.is_empty() {
            self.bias.resize(before + rows, 0.0);
        }
        self.pieces.extend(later.pieces);
    }
}

/// A matrix and its bias.
type Biased<'a> = (Piece<'a>, Option<Vec<f32>>);

/// A checkpoint as a family names it.
pub struct Source<'t, 'a> {
    pub tensors: &'t Tensors<'a>,
    pub map: &'t TensorMap,
    taken: RefCell<HashSet<String>>,
}

/// A role, in a layer or once in the model.
#[derive(Clone, Copy)]
pub enum Place {
    Once(Role),
    Layer(usize, Role),
}

impl<'t, 'a> Source<'t, 'a> {
    pub fn new(tensors: &'t Tensors<'a>, map: &'t TensorMap) -> Self {
        Self { tensors, map, taken: RefCell::default() }
    }

    fn name(&self, place: Place) -> Option<String> {
        match place {
            Place::Once(role) => self.map.once(role),
            Place::Layer(layer, role) => self.map.layer(layer, role),
        }
    }

    /// The name of a role that must have one.
    fn known(&self, place: Place) -> Result<String, ContentError> {
        let (Place::Once(role) | Place::Layer(_, role)) = place;
        self.name(place)
            .ok_or_else(|| ContentError::Model(format!("this architecture has no tensor for {role:?}, but its configuration asks for it")))
    }

    pub fn has(&self, place: Place) -> bool {
        self.name(place).is_some_and(|name| self.tensors.facts(&format!("{name}.weight")).is_some() || self.tensors.facts(&name).is_some())
    }

    fn take(&self, name: &str) -> Result<Option<Tensor<'a>>, ContentError> {
        let tensor = self.tensors.get(name)?;
        if tensor.is_some() {
            self.taken.borrow_mut().insert(name.to_owned());
        }
        Ok(tensor)
    }

    /// `name.weight`, or a tensor of just that name.
    fn weight(&self, name: &str) -> Result<Tensor<'a>, ContentError> {
        let full = format!("{name}.weight");
        if let Some(tensor) = self.take(&full)? {
            return Ok(tensor);
        }
        self.take(name)?.ok_or_else(|| ContentError::Model(format!("tensor `{}`: is missing", clip(&full))))
    }

    /// A tensor of `len` values.
    pub fn vector(&self, place: Place, len: usize) -> Result<Vec<f32>, ContentError> {
        values(&self.weight(&self.known(place)?)?, len)
    }

    /// `len` values, wherever they lie in the tensor's shape.
    fn named_vector(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, ContentError> {
        self.take(name)?.map(|tensor| values(&tensor, len)).transpose()
    }

    /// A vector that is part of no matrix: `.bias` is tried, too (GGUF's correction of experts' scores).
    pub fn loose_vector(&self, place: Place, len: usize) -> Result<Vec<f32>, ContentError> {
        let name = self.known(place)?;
        match self.named_vector(&format!("{name}.bias"), len)? {
            Some(values) => Ok(values),
            None => values(&self.weight(&name)?, len),
        }
    }

    /// Weights of a norm with their offset, and its bias.
    pub fn norm(&self, place: Place, len: usize) -> Result<(Vec<f32>, Option<Vec<f32>>), ContentError> {
        let name = self.known(place)?;
        let mut weights = values(&self.weight(&name)?, len)?;
        weights.iter_mut().for_each(|weight| *weight += self.map.norm_offset);
        Ok((weights, self.named_vector(&format!("{name}.bias"), len)?))
    }

    /// Weights of norms of heads, one tensor a head, one after the other.
    pub fn head_norms(&self, layer: usize, (each, all): (Role, Role), heads: usize, head_dim: usize) -> Result<Vec<f32>, ContentError> {
        let Some(pattern) = self.map.layer(layer, each) else {
            return self.vector(Place::Layer(layer, all), heads * head_dim);
        };
        let mut weights = Vec::with_capacity(heads * head_dim);
        for head in 0..heads {
            weights.extend(values(&self.weight(&pattern.replace("{h}", &head.to_string()))?, head_dim)?);
        }
        Ok(weights)
    }

    /// A matrix of this shape and its bias.
    fn part(&self, place: Place, rows: usize, columns: usize) -> Result<Biased<'a>, ContentError> {
        self.named_part(&self.known(place)?, rows, columns)
    }

    fn named_part(&self, name: &str, rows: usize, columns: usize) -> Result<Biased<'a>, ContentError> {
        let mut piece = Piece::new(self.weight(name)?);
        if self.map.transposed {
            piece = piece.turned()?;
        }
        Ok((piece.expect(rows, columns)?, self.named_vector(&format!("{name}.bias"), rows)?))
    }

    pub fn matrix(&self, place: Place, rows: usize, columns: usize) -> Result<Parts<'a>, ContentError> {
        let mut parts = Parts::default();
        let (piece, bias) = self.part(place, rows, columns)?;
        parts.push(piece, bias);
        Ok(parts)
    }

    /// A table of rows for tokens, of which the file may hold more.
    pub fn table(&self, role: Role, rows: usize, columns: usize) -> Result<Parts<'a>, ContentError> {
        let name = self.known(Place::Once(role))?;
        let piece = Piece::new(self.weight(&name)?);
        let stored = piece.rows.max(rows);
        let piece = piece.expect(stored, columns)?;
        let mut bias = self.named_vector(&format!("{name}.bias"), stored)?;
        if let Some(bias) = &mut bias {
            bias.truncate(rows);
        }
        let mut parts = Parts::default();
        parts.push(piece.cut(0, rows)?, bias);
        Ok(parts)
    }

    /// Q, K and V of a layer, one below the other: Q alone where the layer reads another's keys, no V where it is K.
    pub fn query_key_value(&self, layer: usize, d: &Description) -> Result<Parts<'a>, ContentError> {
        let attention = &d.layers[layer].attention;
        let at = |role| Place::Layer(layer, role);
        let (queries, keys) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
        let value_rows = attention.kv_heads * attention.value_dim;
        let mut parts = Parts::default();
        if self.has(at(Role::QueryKeyValue)) && attention.own_keys() {
            let (piece, bias) = self.part(at(Role::QueryKeyValue), queries + keys + value_rows, d.hidden)?;
            match self.map.fused {
                Fused::Stacked => parts.push(piece, bias),
                Fused::PerKeyHead => {
                    let own = queries / attention.kv_heads;
                    let period = own + attention.head_dim + attention.value_dim;
                    for (offset, rows) in [(0, own), (own, attention.head_dim), (own + attention.head_dim, attention.value_dim)] {
                        parts.push(piece.every(period, offset, rows), bias.as_ref().map(|bias| piece::every(bias, period, offset, rows)));
                    }
                }
            }
            return Ok(parts);
        }
        let mut wanted = vec![(Role::Query, queries)];
        match attention.keys {
            Keys::Own => wanted.extend([(Role::Key, keys), (Role::Value, value_rows)]),
            Keys::OwnForBoth => wanted.push((Role::Key, keys)),
            Keys::Shared(_) | Keys::Latent(_) => {}
        }
        for (role, rows) in wanted {
            let (piece, bias) = self.part(at(role), rows, d.hidden)?;
            parts.push(piece, bias);
        }
        Ok(parts)
    }

    /// Gate above up, or up alone.
    pub fn gate_up(&self, layer: usize, width: usize, hidden: usize, gated: bool, shared: bool) -> Result<Parts<'a>, ContentError> {
        let at = |role| Place::Layer(layer, role);
        let shared = shared && self.name(at(Role::SharedUp)).is_some();
        if gated && !shared && self.has(at(Role::GateUp)) {
            return self.matrix(at(Role::GateUp), 2 * width, hidden);
        }
        let mut parts = Parts::default();
        let roles = if shared { [Role::SharedGate, Role::SharedUp] } else { [Role::Gate, Role::Up] };
        for role in roles.into_iter().skip(usize::from(!gated)) {
            let (piece, bias) = self.part(at(role), width, hidden)?;
            parts.push(piece, bias);
        }
        Ok(parts)
    }

    pub fn down(&self, layer: usize, width: usize, hidden: usize, shared: bool) -> Result<Parts<'a>, ContentError> {
        let shared = shared && self.name(Place::Layer(layer, Role::SharedDown)).is_some();
        self.matrix(Place::Layer(layer, if shared { Role::SharedDown } else { Role::Down }), hidden, width)
    }

    /// All experts of a layer: gate and up of each, and down of each, one below the other.
    pub fn experts(&self, layer: usize, count: usize, width: usize, hidden: usize) -> Result<(Parts<'a>, Parts<'a>), ContentError> {
        let (mut gate_up, mut down) = (Parts::default(), Parts::default());
        let name = |role| self.known(Place::Layer(layer, role));
        let downs = name(Role::ExpertDown)?;
        if downs.contains("{e}") {
            for expert in 0..count {
                let own = |role| Ok::<_, ContentError>(name(role)?.replace("{e}", &expert.to_string()));
                for role in [Role::ExpertGate, Role::ExpertUp] {
                    let (piece, bias) = self.named_part(&own(role)?, width, hidden)?;
                    gate_up.push(piece, bias);
                }
                let (piece, bias) = self.named_part(&own(Role::ExpertDown)?, hidden, width)?;
                down.push(piece, bias);
            }
            return Ok((gate_up, down));
        }
        let stacks = if self.has(Place::Layer(layer, Role::ExpertGateUp)) {
            vec![self.stack(&name(Role::ExpertGateUp)?, count, 2 * width, hidden)?]
        } else {
            vec![self.stack(&name(Role::ExpertGate)?, count, width, hidden)?, self.stack(&name(Role::ExpertUp)?, count, width, hidden)?]
        };
        for expert in 0..count {
            for (piece, bias) in stacks.iter().filter_map(|stack| stack.get(expert)) {
                if self.map.experts_interleaved {
                    for offset in [0, 1] {
                        gate_up.push(piece.every(2, offset, 1), bias.as_ref().map(|bias| piece::every(bias, 2, offset, 1)));
                    }
                } else {
                    gate_up.push(piece.clone(), bias.clone());
                }
            }
        }
        for (piece, bias) in self.stack(&downs, count, hidden, width)? {
            down.push(piece, bias);
        }
        Ok((gate_up, down))
    }

    /// Matrices of all experts from one tensor.
    fn stack(&self, name: &str, count: usize, rows: usize, columns: usize) -> Result<Vec<Biased<'a>>, ContentError> {
        let whole = Piece::new(self.weight(name)?);
        let bias = self.take(&format!("{name}{}", self.map.expert_bias))?;
        let bias = bias.map(|bias| values(&bias, count * rows)).transpose()?;
        // Those that come in blocks lie as they are multiplied.
        let turned = self.map.experts_transposed && whole.tensor_type.is_float();
        let (stored_rows, stored_columns) = if turned { (columns, rows) } else { (rows, columns) };
        let whole = whole.expect(count * stored_rows, stored_columns)?;
        (0..count)
            .map(|expert| {
                let piece = whole.cut(expert * stored_rows, stored_rows)?;
                let piece = if turned { piece.turned()? } else { piece };
                Ok((piece, bias.as_ref().map(|bias| bias[expert * rows..(expert + 1) * rows].to_vec())))
            })
            .collect()
    }

    /// An error if a tensor was not read: it would be a part of the model that is silently not computed.
    pub fn nothing_left(&self, d: &Description) -> Result<(), ContentError> {
        let mut taken = self.taken.borrow_mut();
        if d.tied_output {
            // Some files hold it though it is the embedding.
            taken.extend(self.map.once(Role::Output).map(|name| format!("{name}.weight")));
        }
        let known = |name: &str| taken.contains(name) || self.map.ignored.iter().any(|part| name.contains(part.as_str()));
        match self.tensors.iter().find(|facts| !known(&facts.name)) {
            None => Ok(()),
            Some(facts) => Err(ContentError::Model(format!(
                "tensor `{}`: is not part of the `{}` architecture as it is understood here; it would be ignored",
                clip(&facts.name),
                d.architecture
            ))),
        }
    }
}

/// All values of a tensor that should have `len`.
fn values(tensor: &Tensor<'_>, len: usize) -> Result<Vec<f32>, ContentError> {
    let stored = tensor.rows() * tensor.columns();
    if stored != len {
        let problem = format!("has {stored} values; the configuration asks for {len}");
        return Err(ContentError::Model(format!("tensor `{}`: {problem}", clip(&tensor.name))));
    }
    tensor.to_f32()
}
