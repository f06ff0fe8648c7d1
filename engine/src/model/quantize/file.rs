//! A GGUF model → a GGUF file in other types.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use quire_kernels::quant::TensorType;
use thiserror::Error;

use super::{
    Choice, Importance, Mix, ModelFacts,
    mix::{fallback, is_quantised, is_value, layer_of},
    requantise,
};
use crate::model::{
    ContentError,
    gguf::{Gguf, GgufWriter, Planned, StoredValue, TensorInfo},
};

/// What becomes of a model.
#[derive(Debug)]
pub struct QuantizeOptions {
    pub mix: Mix,
    /// Every matrix in the general type.
    pub pure: bool,
    pub output: Option<TensorType>,
    pub embedding: Option<TensorType>,
    pub importance: Option<Importance>,
}

/// Why a model could not be written.
#[derive(Debug, Error)]
pub enum QuantizeError {
    #[error(transparent)]
    Content(#[from] ContentError),
    #[error("tensor `{name}`: {problem}")]
    Tensor { name: String, problem: String },
    #[error("{}: {problem}", path.display())]
    Importance { path: PathBuf, problem: String },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub before: u64,
    pub after: u64,
    /// Tensors of each type in the new file.
    pub types: BTreeMap<&'static str, usize>,
    /// Matrices that were quantised already: what they had lost stays lost.
    pub requantised: usize,
    /// Matrices whose rows are no whole blocks of the wanted type.
    pub fallbacks: usize,
}

/// Writes the model at `output`, which appears when it is complete. `progress`: tensors done, of how many, the next one.
///
/// # Errors
/// [`QuantizeError`] names the tensor or the file.
pub fn quantize_file(
    gguf: &Gguf<'_>,
    output: &Path,
    options: &QuantizeOptions,
    progress: &mut dyn FnMut(usize, usize, &str),
) -> Result<Summary, QuantizeError> {
    let partial = output.with_extension("gguf.partial");
    let result = write(gguf, &partial, options, progress).and_then(|summary| {
        fs::rename(&partial, output).map(|()| summary).map_err(|source| QuantizeError::Write { path: output.to_owned(), source })
    });
    if result.is_err() {
        // It may never have come to be.
        let _ = fs::remove_file(&partial);
    }
    result
}

fn write(
    gguf: &Gguf<'_>,
    path: &Path,
    options: &QuantizeOptions,
    progress: &mut dyn FnMut(usize, usize, &str),
) -> Result<Summary, QuantizeError> {
    let failed = |source: io::Error| QuantizeError::Write { path: path.to_owned(), source };
    let (types, mut summary) = plan(gguf, options)?;
    let planned = gguf.tensors().iter().zip(&types).map(|(tensor, to)| planned(tensor, *to)).collect::<Vec<_>>();
    summary.after = planned.iter().map(|tensor| tensor.bytes).sum();
    let file = File::create(path).map_err(failed)?;
    let mut writer = GgufWriter::new(BufWriter::with_capacity(1 << 20, file), &keys(gguf, options.mix), planned).map_err(failed)?;
    for (index, (tensor, to)) in gguf.tensors().iter().zip(&types).enumerate() {
        progress(index, types.len(), tensor.name);
        match to {
            None => writer.tensor(tensor.data),
            Some(to) => {
                let bytes = convert(tensor, *to, options)?;
                writer.tensor(&bytes)
            }
        }
        .map_err(failed)?;
    }
    let mut out = writer.finish().map_err(failed)?;
    out.flush().and_then(|()| out.get_ref().sync_all()).map_err(failed)?;
    Ok(summary)
}

fn convert(tensor: &TensorInfo<'_>, to: TensorType, options: &QuantizeOptions) -> Result<Vec<u8>, QuantizeError> {
    let fail = |problem: String| QuantizeError::Tensor { name: tensor.name.to_owned(), problem };
    let view = tensor.view().map_err(ContentError::from)?;
    let importance = match &options.importance {
        Some(importance) => importance.of(tensor.name, tensor.columns()).map_err(fail)?,
        None => None,
    };
    requantise(&view, to, importance).map_err(|error| fail(error.to_string()))
}

/// The new type of every tensor, in the file's order; none: it stays as it is.
fn plan(gguf: &Gguf<'_>, options: &QuantizeOptions) -> Result<(Vec<Option<TensorType>>, Summary), QuantizeError> {
    let facts = facts(gguf, options)?;
    let mut choice = Choice::new(options.mix, &facts);
    let mut order: Vec<usize> = (0..gguf.tensors().len()).collect();
    order.sort_by_key(|index| layer_of(gguf.tensors()[*index].name));
    let mut types = vec![None; order.len()];
    let mut summary = Summary { before: gguf.tensor_bytes(), ..Summary::default() };
    for index in order {
        let tensor = &gguf.tensors()[index];
        let own = tensor.tensor_type.kernel;
        let mut name = tensor.tensor_type.name;
        if is_quantised(tensor.name, tensor.rank) && own.is_some() {
            let own_choice = match tensor.name {
                "output.weight" => options.output,
                "token_embd.weight" => options.embedding,
                _ => None,
            };
            let stacked = tensor.dimensions[2] > 1;
            let mixed = choice.next(tensor.name, tensor.columns(), stacked);
            let wanted = own_choice.unwrap_or(if options.pure { options.mix.general() } else { mixed });
            let to = fallback(wanted, tensor.columns());
            summary.fallbacks += usize::from(!tensor.columns().is_multiple_of(options.mix.general().block_len()));
            name = to.name();
            if own != Some(to) {
                summary.requantised += usize::from(own.is_some_and(|own| !own.is_float()));
                types[index] = Some(to);
            }
        }
        *summary.types.entry(name).or_default() += 1;
    }
    Ok((types, summary))
}

fn facts(gguf: &Gguf<'_>, options: &QuantizeOptions) -> Result<ModelFacts, QuantizeError> {
    let metadata = &gguf.metadata;
    let content = |error| QuantizeError::from(ContentError::Gguf(error));
    let architecture = metadata.string("general.architecture").map_err(content)?.unwrap_or_default().to_owned();
    // A list per layer counts by its first entry that is not 0.
    let number = |key: &str| -> Result<usize, QuantizeError> {
        let values = metadata.unsigneds(&format!("{architecture}.{key}")).map_err(content)?.unwrap_or_default();
        Ok(values.into_iter().find(|value| *value > 0).and_then(|value| usize::try_from(value).ok()).unwrap_or(0))
    };
    let heads = number("attention.head_count")?;
    let kv_heads = number("attention.head_count_kv")?;
    Ok(ModelFacts {
        layers: number("block_count")?,
        experts: number("expert_count")?,
        heads_per_kv: heads.checked_div(kv_heads).unwrap_or(1),
        tied_embeddings: gguf.tensor("output.weight").is_none(),
        values: gguf.tensors().iter().filter(|tensor| is_value(tensor.name)).count(),
        importance: options.importance.is_some(),
        architecture,
    })
}

fn planned(tensor: &TensorInfo<'_>, to: Option<TensorType>) -> Planned {
    let (tensor_type, bytes) = match to {
        Some(to) => (to.gguf_id(), (tensor.rows() * to.row_bytes(tensor.columns())) as u64),
        None => (tensor.tensor_type.number, tensor.data.len() as u64),
    };
    let dimensions = tensor.dimensions[..tensor.rank].iter().map(|size| *size as u64).collect();
    Planned { name: tensor.name.to_owned(), dimensions, tensor_type, bytes }
}

/// The model's metadata, but for what is no longer so.
fn keys(gguf: &Gguf<'_>, mix: Mix) -> Vec<(String, StoredValue)> {
    const CHANGED: [&str; 3] = ["general.file_type", "general.quantization_version", "general.alignment"];
    let kept = gguf.metadata.sorted().into_iter().filter(|(key, _)| !CHANGED.contains(key) && !key.starts_with("split."));
    let mut keys: Vec<_> = kept.map(|(key, entry)| (key.to_owned(), StoredValue::from(&entry))).collect();
    keys.push((CHANGED[0].to_owned(), StoredValue::u32(mix.file_type())));
    if !mix.general().is_float() {
        keys.push((CHANGED[1].to_owned(), StoredValue::u32(2)));
    }
    keys
}
