//! Tensors by role → packed weights.
//!
//! Checks every shape against the description, and that no tensor is left over: one that is not read would be a part of
//! the model that is silently not computed.
//!
//! - [`source`]: roles → stored matrices; [`piece`]: cutting and turning them
//! - [`layer`]: one layer's matrices on the device

mod layer;
mod piece;
mod source;

use std::borrow::Cow;

use quire_kernels::{
    backend::{self, Backend, Precision},
    quant::{TensorType, TensorView},
};

pub use layer::{AttentionWeights, ExpertWeights, LayerInputPart, LayerWeights};

use super::{
    checkpoint::Tensors,
    description::{Description, Norm, TensorMap, names::Role},
    error::ContentError,
    quantize::{fallback, requantise},
};
use piece::Piece;
use source::{Parts, Place, Source};

/// A norm's weights on a device.
pub struct NormWeights<B: Backend> {
    norm: Norm,
    weight: Option<B::Buffer>,
    bias: Option<B::Buffer>,
}

impl<B: Backend> NormWeights<B> {
    /// As an op takes it.
    pub fn args(&self) -> backend::Norm<'_, B> {
        backend::Norm { kind: self.norm.kind, weight: self.weight.as_ref(), bias: self.bias.as_ref(), epsilon: self.norm.epsilon }
    }
}

/// What every layer gets beside the hidden state.
pub struct LayerInputWeights<B: Backend> {
    pub table: B::Linear,
    pub projection: B::Linear,
    pub norm: NormWeights<B>,
}

/// All of a model's weights on a device.
pub struct Weights<B: Backend> {
    pub embedding: B::Linear,
    pub positions: Option<B::Linear>,
    pub layer_inputs: Option<LayerInputWeights<B>>,
    pub layers: Vec<LayerWeights<B>>,
    pub output_norm: NormWeights<B>,
    /// `None`: the embedding serves.
    pub output: Option<B::Linear>,
    bytes: usize,
}

impl<B: Backend> Weights<B> {
    /// Packs a checkpoint's tensors for the backend, which keeps nothing of the files; matrices in the type `quantize` where that
    /// takes fewer bytes.
    ///
    /// # Errors
    /// Names the tensor that is missing, of another shape than the configuration asks for, or left over.
    pub fn load(
        backend: &B,
        d: &Description,
        map: &TensorMap,
        tensors: &Tensors<'_>,
        quantize: Option<TensorType>,
    ) -> Result<Self, ContentError> {
        let source = Source::new(tensors, map);
        let mut packer = Packer { backend, source: &source, quantize, bytes: 0 };
        let layers = (0..d.layers.len()).map(|layer| packer.layer(layer, d)).collect::<Result<Vec<_>, _>>()?;
        let embedding = packer.table(Role::Embedding, d.vocabulary, d.hidden)?;
        let positions = d.learned_positions.map(|positions| packer.table(Role::Positions, positions, d.hidden)).transpose()?;
        let layer_inputs = d.layer_input.map(|width| packer.layer_inputs(width, d)).transpose()?;
        let output_norm = packer.norm(d.output_norm, Place::Once(Role::OutputNorm), d.hidden)?;
        let output = if d.tied_output { None } else { Some(packer.table(Role::Output, d.vocabulary, d.hidden)?) };
        let bytes = packer.bytes;
        source.nothing_left(d)?;
        Ok(Self { embedding, positions, layer_inputs, layers, output_norm, output, bytes })
    }

    /// Bytes that the packed matrices hold on the device.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Packs matrices and counts their bytes.
struct Packer<'s, 't, 'a, B> {
    backend: &'s B,
    source: &'s Source<'t, 'a>,
    quantize: Option<TensorType>,
    bytes: usize,
}

impl<B: Backend> Packer<'_, '_, '_, B> {
    fn pack(&mut self, parts: &Parts<'_>, precision: Precision) -> Result<B::Linear, ContentError> {
        let smaller = parts.pieces.iter().map(|piece| self.requantised(piece)).collect::<Result<Vec<_>, _>>()?;
        let pieces: Vec<_> = parts.pieces.iter().zip(&smaller).map(|(piece, smaller)| smaller.as_ref().unwrap_or(piece)).collect();
        self.pack_pieces(&pieces, &parts.bias, precision)
    }

    fn pack_pieces(&mut self, pieces: &[&Piece<'_>], bias: &[f32], precision: Precision) -> Result<B::Linear, ContentError> {
        let views: Vec<TensorView<'_>> = pieces.iter().map(|piece| piece.view()).collect();
        let linear = self.backend.linear(&views, (!bias.is_empty()).then_some(bias), precision)?;
        self.bytes += self.backend.linear_bytes(&linear);
        Ok(linear)
    }

    /// The matrix in the type that the user asked for, if that is smaller.
    fn requantised(&self, piece: &Piece<'_>) -> Result<Option<Piece<'static>>, ContentError> {
        let Some(wanted) = self.quantize else { return Ok(None) };
        let tensor_type = fallback(wanted, piece.columns);
        if tensor_type.row_bytes(piece.columns) >= piece.tensor_type.row_bytes(piece.columns) {
            return Ok(None);
        }
        let data = requantise(&piece.view(), tensor_type, None).map_err(|error| piece.fail(error))?;
        let (rows, columns) = (piece.rows, piece.columns);
        Ok(Some(Piece { name: piece.name.clone(), tensor_type, rows, columns, data: Cow::Owned(data) }))
    }

    /// A matrix in its own type, whatever the user asked for: a router is small, and a wrong expert costs more than a rounded one.
    fn matrix_as_stored(&mut self, place: Place, rows: usize, columns: usize, precision: Precision) -> Result<B::Linear, ContentError> {
        let parts = self.source.matrix(place, rows, columns)?;
        self.pack_pieces(&parts.pieces.iter().collect::<Vec<_>>(), &parts.bias, precision)
    }

    fn matrix(&mut self, place: Place, rows: usize, columns: usize, precision: Precision) -> Result<B::Linear, ContentError> {
        let parts = self.source.matrix(place, rows, columns)?;
        self.pack(&parts, precision)
    }

    fn table(&mut self, role: Role, rows: usize, columns: usize) -> Result<B::Linear, ContentError> {
        let parts = self.source.table(role, rows, columns)?;
        self.pack(&parts, Precision::Byte)
    }

    fn norm(&self, norm: Norm, place: Place, len: usize) -> Result<NormWeights<B>, ContentError> {
        let (weight, bias) = self.source.norm(place, len)?;
        let bias = bias.map(|bias| self.backend.buffer_from(&bias)).transpose()?;
        Ok(NormWeights { norm, weight: Some(self.backend.buffer_from(&weight)?), bias })
    }

    fn layer_inputs(&mut self, width: usize, d: &Description) -> Result<LayerInputWeights<B>, ContentError> {
        let rows = d.layers.len() * width;
        Ok(LayerInputWeights {
            table: self.table(Role::LayerInputs, d.vocabulary, rows)?,
            projection: self.matrix(Place::Once(Role::LayerInputProjection), rows, d.hidden, Precision::Byte)?,
            norm: self.norm(d.output_norm, Place::Once(Role::LayerInputNorm), width)?,
        })
    }
}
