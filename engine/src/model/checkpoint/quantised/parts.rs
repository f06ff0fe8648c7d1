//! Stored tensors → plain ones, and the recipes of quantised ones, every shape checked.

use std::collections::BTreeMap;

use super::{
    QuantConfig, Recipe,
    config::Method,
    fp4::{Factor, Mxfp4, Nvfp4},
    integers::{AWQ_NIBBLES, Groups, IntegerMatrix, Packing, Table, stream},
    scaled::ScaledMatrix,
};
use crate::model::{
    ContentError,
    safetensors::{Dtype, SafetensorsError, StoredTensor, decode_f8},
};

/// A weight that several stored tensors make.
#[derive(Debug)]
pub(in crate::model::checkpoint) struct Weight<'a> {
    pub name: String,
    /// Outermost first.
    pub shape: Vec<usize>,
    /// Stored bytes of its parts.
    pub bytes: u64,
    pub recipe: Recipe<'a>,
}

/// A checkpoint's tensors, sorted out.
pub(in crate::model::checkpoint) struct Parts<'a> {
    pub plain: Vec<StoredTensor<'a>>,
    pub weights: Vec<Weight<'a>>,
}

type Tensors<'a> = BTreeMap<String, StoredTensor<'a>>;
type Result<T> = std::result::Result<T, ContentError>;

/// Of 8-bit activations and of the KV cache: no part of the weights.
const OTHERS: [&str; 10] = [
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".input_scale_ub",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".activation_scale",
];

/// Puts quantised weights together; everything else stays as it is.
pub(in crate::model::checkpoint) fn gather<'a>(tensors: Vec<StoredTensor<'a>>, config: &QuantConfig) -> Result<Parts<'a>> {
    let mut left: Tensors<'a> = tensors.into_iter().map(|tensor| (tensor.name.to_string(), tensor)).collect();
    let mut weights = Vec::new();
    let names: Vec<String> = left.keys().cloned().collect();
    for name in names {
        let found = if let Some(prefix) = name.strip_suffix(".qweight") {
            Some((format!("{prefix}.weight"), auto(&mut left, prefix, config)?))
        } else if let Some(prefix) = name.strip_suffix(".weight_packed") {
            Some((format!("{prefix}.weight"), packed(&mut left, prefix, config)?))
        } else if let Some(prefix) = name.strip_suffix("_blocks") {
            mxfp4(&mut left, &name, prefix)?.map(|found| (name.clone(), found))
        } else if name.ends_with(".weight") {
            scaled(&mut left, &name, config)?.map(|found| (name.clone(), found))
        } else {
            None
        };
        if let Some((name, Found { shape, bytes, recipe })) = found {
            weights.push(Weight { name, shape, bytes, recipe });
        }
    }
    left.retain(|name, _| !OTHERS.iter().any(|other| name.ends_with(other)));
    Ok(Parts { plain: left.into_values().collect(), weights })
}

struct Found<'a> {
    shape: Vec<usize>,
    bytes: u64,
    recipe: Recipe<'a>,
}

fn fail(name: &str, problem: impl Into<String>) -> ContentError {
    SafetensorsError::tensor(name, problem).into()
}

fn needed<'a>(left: &mut Tensors<'a>, name: String) -> Result<StoredTensor<'a>> {
    left.remove(&name).ok_or_else(|| fail(&name, "is missing"))
}

fn expect(tensor: &StoredTensor<'_>, dtypes: &[Dtype], shape: &[usize]) -> Result<()> {
    if !dtypes.contains(&tensor.dtype) {
        let wanted: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        return Err(fail(&tensor.name, format!("has type {}; expected {}", tensor.dtype.name(), wanted.join(" or "))));
    }
    if tensor.shape != shape {
        return Err(fail(&tensor.name, format!("has shape {:?}; expected {shape:?}", tensor.shape)));
    }
    Ok(())
}

/// Sizes of a matrix.
fn matrix(tensor: &StoredTensor<'_>) -> Result<[usize; 2]> {
    match tensor.shape[..] {
        [rows, columns] => Ok([rows, columns]),
        _ => Err(fail(&tensor.name, format!("has shape {:?}; a matrix was expected", tensor.shape))),
    }
}

/// Numbers of any kind as f32.
fn floats(tensor: &StoredTensor<'_>) -> Result<Vec<f32>> {
    let data = tensor.data;
    let four = || data.as_chunks::<4>().0.iter();
    let two = || data.as_chunks::<2>().0.iter();
    Ok(match tensor.dtype {
        Dtype::F32 => four().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        Dtype::F16 => two().map(|bytes| half::f16::from_le_bytes(*bytes).to_f32()).collect(),
        Dtype::BF16 => two().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32()).collect(),
        Dtype::F8_E4M3 | Dtype::F8_E5M2 => data.iter().map(|byte| decode_f8(tensor.dtype, *byte)).collect(),
        Dtype::F8_E8M0 => data.iter().map(|byte| 2f32.powi(i32::from(*byte) - 127)).collect(),
        Dtype::I8 => data.iter().map(|byte| f32::from(*byte as i8)).collect(),
        Dtype::I32 => four().map(|bytes| i32::from_le_bytes(*bytes) as f32).collect(),
        other => return Err(fail(&tensor.name, format!("has type {}, which is no type of scales", other.name()))),
    })
}

fn integers(tensor: &StoredTensor<'_>) -> Result<Vec<i64>> {
    match tensor.dtype {
        Dtype::I64 => Ok(tensor.data.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()),
        Dtype::I32 => Ok(tensor.data.as_chunks::<4>().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes))).collect()),
        other => Err(fail(&tensor.name, format!("has type {}; expected I32 or I64", other.name()))),
    }
}

const SCALES: [Dtype; 3] = [Dtype::F16, Dtype::BF16, Dtype::F32];

/// The group of each column; none where the columns of a group stand together.
fn groups_of(index: Option<StoredTensor<'_>>, columns: usize, groups: usize, name: &str) -> Result<Groups> {
    if groups == 0 {
        return Err(fail(name, "has no groups"));
    }
    let size = columns.div_ceil(groups).max(1);
    let Some(index) = index else {
        if !columns.is_multiple_of(groups) {
            return Err(fail(name, format!("has {groups} groups for {columns} columns, which do not divide")));
        }
        return Ok(Groups::Every(size));
    };
    if index.shape != [columns] {
        return Err(fail(&index.name, format!("has shape {:?}; expected [{columns}]", index.shape)));
    }
    let found = integers(&index)?;
    // compressed-tensors writes −1 for "in order".
    if found.iter().all(|group| *group == -1) && columns.is_multiple_of(groups) {
        return Ok(Groups::Every(size));
    }
    if let Some(group) = found.iter().find(|group| !(0..groups as i64).contains(group)) {
        return Err(fail(&index.name, format!("names group {group} of {groups}")));
    }
    if columns.is_multiple_of(groups) && found.iter().enumerate().all(|(column, group)| column / size == *group as usize) {
        return Ok(Groups::Every(size));
    }
    Ok(Groups::Named(found.into_iter().map(|group| group as u32).collect()))
}

/// GPTQ and AWQ.
fn auto<'a>(left: &mut Tensors<'a>, prefix: &str, config: &QuantConfig) -> Result<Found<'a>> {
    let name = |part: &str| format!("{prefix}.{part}");
    let [words, zeros, scales] = [needed(left, name("qweight"))?, needed(left, name("qzeros"))?, needed(left, name("scales"))?];
    let index = left.remove(&name("g_idx"));
    let [groups, rows] = matrix(&scales)?;
    let [down, _] = matrix(&words)?;
    let awq = match config.method {
        Method::Awq => true,
        Method::Gptq => false,
        other => return Err(fail(&words.name, format!("is of GPTQ or AWQ, but the config's `quant_method` is {other}"))),
    };
    let (columns, bits) = if awq {
        (down, 4)
    } else {
        let columns = index.as_ref().map(StoredTensor::elements);
        let bits = match (config.bits, columns) {
            // Single modules may have other bits than the config says.
            (_, Some(columns)) if columns > 0 => (down * 32 / columns) as u32,
            (Some(bits), _) => bits,
            (None, _) => return Err(fail(&words.name, "has no `g_idx` beside it, and the config has no `bits`")),
        };
        (columns.unwrap_or(down * 32 / bits.max(1) as usize), bits)
    };
    if !matches!(bits, 2..=4 | 8) {
        return Err(fail(&words.name, format!("has values of {bits} bits; supported: 2, 3, 4, 8")));
    }
    if awq && config.bits.is_some_and(|bits| bits != 4) {
        return Err(fail(&words.name, "is AWQ of other than 4 bits, which is not supported"));
    }
    let word_row = (rows * bits as usize).div_ceil(32);
    if awq {
        expect(&words, &[Dtype::I32], &[columns, rows / 8])?;
    } else {
        expect(&words, &[Dtype::I32], &[(columns * bits as usize).div_ceil(32), rows])?;
    }
    if awq && !rows.is_multiple_of(8) {
        return Err(fail(&scales.name, format!("has {rows} columns, which is no multiple of the 8 that AWQ packs together")));
    }
    expect(&zeros, &[Dtype::I32], &[groups, word_row])?;
    expect(&scales, &SCALES, &[groups, rows])?;
    let zero = |group: usize, row: usize| {
        let at = if awq { row / 8 * 8 + AWQ_NIBBLES[row % 8] as usize } else { row };
        let stored = stream(zeros.data, group * word_row, 1, at, bits) as i16;
        if config.zeros_less_one && !awq { (stored + 1) & ((1 << bits) - 1) } else { stored }
    };
    let zero_points: Vec<i16> =
        (0..groups).flat_map(|group| (0..rows).map(move |row| (group, row))).map(|(group, row)| zero(group, row)).collect();
    drop_zero_bias(left, &name("bias"));
    let bytes = [&words, &zeros, &scales].iter().map(|part| part.data.len() as u64).sum();
    Ok(Found {
        shape: vec![rows, columns],
        bytes,
        recipe: Recipe::Integers(IntegerMatrix {
            rows,
            columns,
            bits,
            packing: if awq { Packing::Awq } else { Packing::Gptq },
            words: words.data,
            group_of: groups_of(index, columns, groups, &scales.name)?,
            scales: Table::ByGroup { values: floats(&scales)?, rows },
            zeros: Table::ByGroup { values: zero_points, rows },
        }),
    })
}

/// Some writers give every quantised module a bias, of zeros where the model has none.
fn drop_zero_bias(left: &mut Tensors<'_>, name: &str) {
    if left.get(name).is_some_and(|bias| bias.data.iter().all(|byte| *byte == 0)) {
        left.remove(name);
    }
}

/// compressed-tensors: packed integers, or four-bit floats.
fn packed<'a>(left: &mut Tensors<'a>, prefix: &str, config: &QuantConfig) -> Result<Found<'a>> {
    let name = |part: &str| format!("{prefix}.{part}");
    let words = needed(left, name("weight_packed"))?;
    let scales = needed(left, name("weight_scale"))?;
    if words.dtype == Dtype::U8 {
        let global = left.remove(&name("weight_global_scale"));
        left.remove(&name("weight_shape"));
        return four_bit_floats(&words, &scales, global.map(|global| (global, false)));
    }
    let shape_tensor = needed(left, name("weight_shape"))?;
    let shape = integers(&shape_tensor)?;
    let [rows, columns] = match shape[..] {
        [rows, columns] if rows > 0 && columns > 0 && rows < 1 << 40 && columns < 1 << 40 => [rows as usize, columns as usize],
        _ => return Err(fail(&shape_tensor.name, format!("holds {shape:?}; two sizes were expected"))),
    };
    let [_, across] = matrix(&words)?;
    // As many values a word as fit whole; 4 and 8 bits are what is published.
    let bits =
        [8, 4, 2].into_iter().find(|bits| columns.div_ceil(32 / bits) == across && config.bits.is_none_or(|own| own as usize == *bits));
    let Some(bits) = bits else {
        let problem =
            format!("has shape {:?}, which holds {columns} columns of no number of bits that is supported (2, 4, 8)", words.shape);
        return Err(fail(&words.name, problem));
    };
    expect(&words, &[Dtype::I32], &[rows, across])?;
    let middle = 1_i16 << (bits - 1);
    let groups = match scales.shape[..] {
        [] | [1] | [1, 1] => 1,
        [own, groups] if own == rows => groups,
        [own] if own == rows => 1,
        _ => return Err(fail(&scales.name, format!("has shape {:?}; expected [{rows}, groups]", scales.shape))),
    };
    let values = floats(&scales)?;
    let index = left.remove(&name("weight_g_idx"));
    let zeros = match left.remove(&name("weight_zero_point")) {
        None => Table::One(middle),
        Some(zeros) => zero_points(&zeros, rows, groups, bits)?,
    };
    Ok(Found {
        shape: vec![rows, columns],
        bytes: (words.data.len() + scales.data.len()) as u64,
        recipe: Recipe::Integers(IntegerMatrix {
            rows,
            columns,
            bits: bits as u32,
            packing: Packing::Rows,
            words: words.data,
            group_of: groups_of(index, columns, groups, &scales.name)?,
            scales: if let [one] = values[..] { Table::One(one) } else { Table::ByRow { values, groups } },
            zeros,
        }),
    })
}

/// Zero points of compressed-tensors: bytes, or packed down the rows; less half the range.
fn zero_points(zeros: &StoredTensor<'_>, rows: usize, groups: usize, bits: usize) -> Result<Table<i16>> {
    let middle = 1_i16 << (bits - 1);
    let values: Vec<i16> = if zeros.dtype == Dtype::I32 && zeros.shape == [rows.div_ceil(32 / bits), groups] && rows > 1 {
        let each = 32 / bits;
        let at = |row: usize, group: usize| stream(zeros.data, row / each * groups + group, 1, row % each, bits as u32) as i16;
        (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group))).map(|(row, group)| at(row, group)).collect()
    } else {
        floats(zeros)?.into_iter().map(|zero| zero as i16 + middle).collect()
    };
    match values[..] {
        [one] => Ok(Table::One(one)),
        _ if values.len() == rows * groups => Ok(Table::ByRow { values, groups }),
        _ => Err(fail(&zeros.name, format!("has shape {:?}; expected one zero point per scale", zeros.shape))),
    }
}

/// `…_blocks` and `…_scales` of bytes.
fn mxfp4<'a>(left: &mut Tensors<'a>, name: &str, prefix: &str) -> Result<Option<Found<'a>>> {
    let scales = format!("{prefix}_scales");
    let bytes = |tensor: Option<&StoredTensor<'_>>| tensor.is_some_and(|tensor| tensor.dtype == Dtype::U8);
    if !bytes(left.get(name)) || !bytes(left.get(&scales)) {
        return Ok(None);
    }
    let (blocks, scales) = (needed(left, name.to_owned())?, needed(left, scales)?);
    let mut shape = scales.shape.clone();
    shape.push(16);
    expect(&blocks, &[Dtype::U8], &shape)?;
    shape.pop();
    if let Some(columns) = shape.last_mut() {
        *columns = columns.saturating_mul(32);
    }
    let bytes = (blocks.data.len() + scales.data.len()) as u64;
    Ok(Some(Found { shape, bytes, recipe: Recipe::Mxfp4(Mxfp4 { blocks: blocks.data, exponents: scales.data }) }))
}

/// Two E2M1 a byte. `global`: one factor of all scales, and whether it multiplies (else it divides).
fn four_bit_floats<'a>(
    packed: &StoredTensor<'a>,
    scales: &StoredTensor<'a>,
    global: Option<(StoredTensor<'a>, bool)>,
) -> Result<Found<'a>> {
    let [rows, half] = matrix(packed)?;
    let columns = half.saturating_mul(2);
    let shape = vec![rows, columns];
    let bytes = (packed.data.len() + scales.data.len()) as u64;
    let Some((global, times)) = global else {
        expect(scales, &[Dtype::U8, Dtype::F8_E8M0], &[rows, columns / 32])?;
        if !columns.is_multiple_of(32) {
            return Err(fail(&packed.name, format!("has rows of {columns} values, which is no multiple of 32")));
        }
        return Ok(Found { shape, bytes, recipe: Recipe::Mxfp4(Mxfp4 { blocks: packed.data, exponents: scales.data }) });
    };
    expect(scales, &[Dtype::F8_E4M3], &[rows, columns / 16])?;
    let factor = match floats(&global)?[..] {
        [factor] if columns.is_multiple_of(16) => factor,
        _ => return Err(fail(&global.name, format!("has shape {:?}, or rows of {columns} values are no multiple of 16", global.shape))),
    };
    let factor = if times { Factor::Times(factor) } else { Factor::Over(factor) };
    Ok(Found { shape, bytes, recipe: Recipe::Nvfp4(Nvfp4 { packed: packed.data, scales: scales.data, factor }) })
}

/// 8-bit weights with scales beside them.
fn scaled<'a>(left: &mut Tensors<'a>, name: &str, config: &QuantConfig) -> Result<Option<Found<'a>>> {
    let part = |part: &str| format!("{name}_{part}");
    let eight = [Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::I8];
    let Some(dtype) = left.get(name).map(|weight| weight.dtype) else { return Ok(None) };
    if dtype == Dtype::U8 && left.contains_key(&part("scale_2")) {
        let (packed, scales) = (needed(left, name.to_owned())?, needed(left, part("scale"))?);
        let global = needed(left, part("scale_2"))?;
        return four_bit_floats(&packed, &scales, Some((global, true))).map(Some);
    }
    let scales = if eight.contains(&dtype) { left.remove(&part("scale_inv")).or_else(|| left.remove(&part("scale"))) } else { None };
    let Some(scales) = scales else { return Ok(None) };
    let weight = needed(left, name.to_owned())?;
    let Some((&[rows, columns], outer)) = weight.shape.split_last_chunk::<2>().map(|(outer, last)| (last, outer)) else {
        return Err(fail(name, format!("has shape {:?}; a matrix was expected", weight.shape)));
    };
    let matrices: usize = outer.iter().product();
    let values = floats(&scales)?;
    let block = block_of(&scales, [matrices, rows, columns], config)?;
    let zeros = match left.remove(&part("zero_point")) {
        None => Vec::new(),
        Some(zeros) => {
            let zero_points = floats(&zeros)?;
            if zero_points.len() != values.len() {
                return Err(fail(&zeros.name, format!("has shape {:?}; expected that of the scales", zeros.shape)));
            }
            if zero_points.iter().all(|zero| *zero == 0.0) { Vec::new() } else { zero_points }
        }
    };
    Ok(Some(Found {
        shape: weight.shape.clone(),
        bytes: (weight.data.len() + scales.data.len()) as u64,
        recipe: Recipe::Scaled(ScaledMatrix { matrices, rows, columns, dtype, data: weight.data, block, scales: values, zeros }),
    }))
}

/// Rows and columns that share a scale, from the shape of the scales; which are per matrix of a stack.
fn block_of(scales: &StoredTensor<'_>, [matrices, rows, columns]: [usize; 3], config: &QuantConfig) -> Result<[usize; 2]> {
    let count = scales.elements();
    if count == 1 {
        return Ok([rows, columns]);
    }
    let published = config.block.unwrap_or([128, 128]);
    let per_row = scales.shape.last().copied().unwrap_or(1);
    let group = columns.checked_div(per_row).filter(|group| *group > 0).unwrap_or(columns);
    let candidates = [[rows, columns], [1, columns], published, [1, group]];
    let fits = |[down, across]: &[usize; 2]| {
        let (rows, columns) = (rows.div_ceil(*down), columns.div_ceil(*across));
        let last = if scales.shape.len() < 2 { columns == 1 } else { per_row == columns };
        matrices * rows * columns == count && last
    };
    candidates.into_iter().filter(|block| block.iter().all(|size| *size > 0)).find(fits).ok_or_else(|| {
        let problem =
            format!("has shape {:?}, which is not one scale per tensor, row or block of a {rows} × {columns} matrix", scales.shape);
        fail(&scales.name, problem)
    })
}
