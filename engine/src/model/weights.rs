//! Tensors by name → packed weights.
//!
//! Owns the names; checks every shape against the description, and that no tensor is left over: one that is not read
//! would be a part of the model that is silently not computed.

use std::{cell::RefCell, collections::HashSet};

use quire_kernels::{
    backend::{Backend, Precision},
    quant::{TensorView, dequantize},
};

use super::{
    description::Description,
    error::ContentError,
    gguf::{Gguf, GgufError, TensorInfo},
};

/// One layer.
pub struct LayerWeights<B: Backend> {
    pub attention_norm: B::Buffer,
    /// Q, K and V, one below the other.
    pub qkv: B::Linear,
    pub attention_output: B::Linear,
    pub feed_forward_norm: B::Buffer,
    /// Gate, then up.
    pub gate_up: B::Linear,
    pub down: B::Linear,
}

/// All of a model's weights on a device.
pub struct Weights<B: Backend> {
    pub embedding: B::Linear,
    pub layers: Vec<LayerWeights<B>>,
    pub output_norm: B::Buffer,
    /// `None`: the embedding serves.
    pub output: Option<B::Linear>,
}

impl<B: Backend> Weights<B> {
    /// Packs the file's tensors for the backend, which keeps nothing of the file.
    pub fn load(backend: &B, description: &Description, gguf: &Gguf<'_>) -> Result<Self, ContentError> {
        let d = description;
        let source = Source { backend, gguf, taken: RefCell::default() };
        let layers = (0..d.layers).map(|layer| source.layer(layer, d)).collect::<Result<Vec<_>, _>>()?;
        let weights = Self {
            embedding: source.table("token_embd", d)?,
            layers,
            output_norm: source.norm("output_norm", d)?,
            output: if d.tied_output { None } else { Some(source.table("output", d)?) },
        };
        // Part of the description.
        source.take("rope_freqs.weight");
        source.nothing_left(d)?;
        Ok(weights)
    }

    /// Bytes that the packed matrices hold on the device.
    pub fn bytes(&self, backend: &B) -> usize {
        let layers = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.attention_output, &layer.gate_up, &layer.down]);
        layers.chain([&self.embedding]).chain(&self.output).map(|linear| backend.linear_bytes(linear)).sum()
    }
}

/// A matrix of this shape, and perhaps its bias.
struct Part {
    name: String,
    rows: usize,
    columns: usize,
}

/// A file's tensors; remembers which ones were asked for.
struct Source<'g, 'a, B> {
    backend: &'g B,
    gguf: &'g Gguf<'a>,
    taken: RefCell<HashSet<&'a str>>,
}

impl<'g, 'a, B: Backend> Source<'g, 'a, B> {
    fn layer(&self, layer: usize, d: &Description) -> Result<LayerWeights<B>, ContentError> {
        let name = |name: &str| format!("blk.{layer}.{name}");
        let part = |part: &str, rows, columns| Part { name: name(part), rows, columns };
        let (q, kv) = (d.heads * d.head_dim, d.kv_heads * d.head_dim);
        Ok(LayerWeights {
            attention_norm: self.norm(&name("attn_norm"), d)?,
            qkv: self
                .linear(&[part("attn_q", q, d.hidden), part("attn_k", kv, d.hidden), part("attn_v", kv, d.hidden)], Precision::TwoBytes)?,
            attention_output: self.linear(&[part("attn_output", d.hidden, q)], Precision::Byte)?,
            feed_forward_norm: self.norm(&name("ffn_norm"), d)?,
            gate_up: self
                .linear(&[part("ffn_gate", d.feed_forward, d.hidden), part("ffn_up", d.feed_forward, d.hidden)], Precision::Byte)?,
            down: self.linear(&[part("ffn_down", d.hidden, d.feed_forward)], Precision::TwoBytes)?,
        })
    }

    fn take(&self, name: &str) -> Option<&'g TensorInfo<'a>> {
        let tensor = self.gguf.tensor(name)?;
        self.taken.borrow_mut().insert(tensor.name);
        Some(tensor)
    }

    fn needed(&self, name: &str) -> Result<&'g TensorInfo<'a>, GgufError> {
        self.take(name).ok_or_else(|| GgufError::tensor(name, "is missing"))
    }

    fn norm(&self, name: &str, d: &Description) -> Result<B::Buffer, ContentError> {
        Ok(self.backend.buffer_from(&vector(self.needed(&format!("{name}.weight"))?, d.hidden)?)?)
    }

    /// The parts one below the other, with their biases: parts without one get zeros if another has one.
    fn linear(&self, parts: &[Part], precision: Precision) -> Result<B::Linear, ContentError> {
        let mut views = Vec::with_capacity(parts.len());
        let mut bias: Vec<f32> = Vec::new();
        let mut rows = 0;
        for part in parts {
            let tensor = self.needed(&format!("{}.weight", part.name))?;
            expect(tensor, part.rows, part.columns)?;
            views.push(tensor.view()?);
            if let Some(own) = self.take(&format!("{}.bias", part.name)) {
                bias.resize(rows, 0.0);
                bias.extend(vector(own, part.rows)?);
            }
            rows += part.rows;
        }
        let has_bias = !bias.is_empty();
        bias.resize(rows, 0.0);
        Ok(self.backend.linear(&views, has_bias.then_some(&bias[..]), precision)?)
    }

    /// The rows of the tokens that exist; a table may have more.
    fn table(&self, name: &str, d: &Description) -> Result<B::Linear, ContentError> {
        let tensor = self.needed(&format!("{name}.weight"))?;
        expect(tensor, tensor.rows().max(d.vocabulary), d.hidden)?;
        let whole = tensor.view()?;
        let bytes = d.vocabulary * whole.tensor_type.row_bytes(whole.columns);
        let data = whole.data.get(..bytes).ok_or_else(|| GgufError::tensor(tensor.name, "is shorter than its shape"))?;
        Ok(self.backend.linear(&[TensorView { rows: d.vocabulary, data, ..whole }], None, Precision::Byte)?)
    }

    fn nothing_left(&self, d: &Description) -> Result<(), GgufError> {
        let taken = self.taken.borrow();
        // Rotation tables of very old converters: a function of the metadata.
        let known = |name: &str| taken.contains(name) || name.ends_with(".attn_rot_embd.weight") || name.ends_with(".rope_freqs.weight");
        match self.gguf.tensors().iter().find(|tensor| !known(tensor.name)) {
            None => Ok(()),
            Some(tensor) => {
                let problem = format!("is not part of the `{}` architecture as it is understood here; it would be ignored", d.architecture);
                Err(GgufError::tensor(tensor.name, problem))
            }
        }
    }
}

fn expect(tensor: &TensorInfo<'_>, rows: usize, columns: usize) -> Result<(), GgufError> {
    if (tensor.rows(), tensor.columns()) == (rows, columns) {
        return Ok(());
    }
    let problem = format!("has {} × {} values; the metadata asks for {rows} × {columns}", tensor.rows(), tensor.columns());
    Err(GgufError::tensor(tensor.name, problem))
}

/// A tensor of `len` values, decoded.
pub(super) fn vector(tensor: &TensorInfo<'_>, len: usize) -> Result<Vec<f32>, ContentError> {
    expect(tensor, 1, len)?;
    let mut values = vec![0.0; len];
    dequantize(tensor.view()?.tensor_type, tensor.data, &mut values)?;
    Ok(values)
}
