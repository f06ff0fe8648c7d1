//! How keys and values are stored and which of them a row sees: shapes, types and masks, the same on every device.
//!
//! - [`codec`]: what a stored row of bytes means, to the bit
//!
//! Owns no memory; where a key lies is the device's own business.

pub mod codec;

use crate::{KernelError, backend::Backend, inputs::shape};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    F32,
    F16,
    /// One signed byte per element, and an f32 scale per token, head, and key or value.
    Q8,
    /// The same with bytes of E4M3: 3 bits of mantissa, so small elements of a row keep their relative precision, while
    /// large ones have a ninth of [`KvType::Q8`]'s.
    Fp8,
}

impl KvType {
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Q8, Self::Fp8];

    /// Bytes of one element.
    #[must_use]
    pub fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Q8 | Self::Fp8 => 1,
        }
    }

    /// Bytes of the scale of one token and head: none, or an f32. (A half would save 2 of 68 bytes of a head of 64, but
    /// overflow above 8e6, lose precision below 6e-5, and cost a conversion per key where the kernels read scales as they are.)
    #[must_use]
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 => 0,
            Self::Q8 | Self::Fp8 => 4,
        }
    }

    /// As flags and fingerprints spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Fp8 => "fp8",
        }
    }
}

/// Values are stored in whole vectors of as many elements, the rest zeros.
pub const VALUE_ALIGN: usize = 16;

/// Shape of the paged cache. Cache groups share its blocks: each group's block table names blocks of its own, and each
/// block holds as many layers as a group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of one block.
    pub layers: usize,
    pub blocks: usize,
    /// Tokens per block; a multiple of 16 that divides [`CHUNK`](crate::backend::CHUNK).
    pub block_size: usize,
    pub kv_heads: usize,
    /// Elements of a key, and of a query.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// A value is the first `value_dim` elements of its key and not stored again (latent attention: kv_heads 1).
    pub shared_values: bool,
    pub kv_type: KvType,
}

impl KvShape {
    /// Bytes of one token in one layer: elements (values in whole vectors, see [`VALUE_ALIGN`]) and scales of all heads.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        let (element, scale) = (self.kv_type.element_bytes(), self.kv_type.scale_bytes());
        let value = if self.shared_values { 0 } else { self.value_dim.next_multiple_of(VALUE_ALIGN) * element + scale };
        self.kv_heads * (self.key_dim * element + scale + value)
    }

    /// Bytes of one block: keys and values of all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.layers * self.block_size * self.token_bytes()
    }

    /// Bytes of one block of a memory that caches of several shapes share: of the largest, in whole cache lines unless it is
    /// the only one.
    #[must_use]
    pub fn shared_block_bytes(shapes: &[Self]) -> usize {
        match shapes {
            [only] => only.block_bytes(),
            _ => shapes.iter().map(Self::block_bytes).max().unwrap_or(0).next_multiple_of(64),
        }
    }
}

/// Which keys a row sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mask {
    /// All up to its own.
    #[default]
    Causal,
    /// Its own and those before it, so many together (at least 1).
    Window(usize),
    /// Positions are cut at multiples of this (at least 1): those of its own piece, up to its own.
    Chunk(usize),
}

impl Mask {
    /// The first key that a row at `position` sees; ascends with the position. Blocks that lie wholly before the first key of
    /// a sequence's first row are not read.
    #[must_use]
    pub fn first_key(self, position: usize) -> usize {
        match self {
            Self::Causal => 0,
            Self::Window(keys) => (position + 1).saturating_sub(keys),
            Self::Chunk(keys) => position - position % keys.max(1),
        }
    }
}

/// Attention of each row over its sequence's cache.
///
/// s = scale · q·k; with a softcap: s = cap · tanh(s / cap). The weights are the softmax of s over the keys that the mask
/// lets the row see, and of the head's sink, which has no value: it only takes weight away.
pub struct AttentionArgs<'a, B: Backend> {
    /// A multiple of `kv_heads`: heads share a KV head in runs.
    pub heads: usize,
    pub kv_heads: usize,
    /// As in the cache's [`KvShape`].
    pub key_dim: usize,
    pub value_dim: usize,
    /// Multiplies q·k.
    pub scale: f32,
    pub mask: Mask,
    /// Above 0.
    pub softcap: Option<f32>,
    /// One per head.
    pub sinks: Option<&'a B::Buffer>,
    /// Cache group and layer within it.
    pub group: usize,
    pub layer: usize,
}

impl<B: Backend> AttentionArgs<'_, B> {
    /// Checks them against a cache; `sinks` is the length of that buffer.
    pub(crate) fn check(&self, op: &'static str, kv: &KvShape, sinks: usize) -> Result<(), KernelError> {
        let &Self { heads, kv_heads, key_dim, value_dim, mask, softcap, .. } = self;
        shape(op, (kv.kv_heads, kv.key_dim, kv.value_dim) == (kv_heads, key_dim, value_dim), || {
            let KvShape { kv_heads: h, key_dim: k, value_dim: v, .. } = kv;
            format!("the cache has other heads: {h} of {k} and {v}, not {kv_heads} of {key_dim} and {value_dim}")
        })?;
        shape(op, kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || format!("{heads} heads over {kv_heads}"))?;
        shape(op, !matches!(mask, Mask::Window(0) | Mask::Chunk(0)), || "mask: no key".into())?;
        shape(op, softcap.is_none_or(|cap| cap.is_finite() && cap > 0.0), || format!("softcap: {softcap:?}"))?;
        shape(op, self.sinks.is_none() || sinks >= heads, || format!("sinks: {sinks} for {heads} heads"))
    }
}

/// Checks the shapes that share a memory: all have the same blocks.
pub(crate) fn check_shapes(shapes: &[KvShape], groups: &[usize]) -> Result<(), KernelError> {
    let Some(first) = shapes.first() else { return shape("kv", false, || "no shape".into()) };
    for kv in shapes {
        check_shape(kv)?;
        shape("kv", (kv.blocks, kv.block_size) == (first.blocks, first.block_size), || {
            format!("{} blocks of {} beside {} of {}", kv.blocks, kv.block_size, first.blocks, first.block_size)
        })?;
    }
    shape("kv", groups.iter().all(|number| *number < shapes.len()), || format!("groups of shapes {groups:?}, there are {}", shapes.len()))
}

/// The shape of a group: number `groups[group]`, or the only one where nothing is said.
pub(crate) fn shape_of(op: &'static str, groups: &[usize], group: usize, shapes: usize) -> Result<usize, KernelError> {
    let number = groups.get(group).copied().or((groups.is_empty() && shapes == 1).then_some(0));
    number.ok_or_else(|| KernelError::Shape { op, detail: format!("group {group} of a cache with {}", groups.len()) })
}

/// Checks a cache's shape.
pub(crate) fn check_shape(kv: &KvShape) -> Result<(), KernelError> {
    let chunk = crate::backend::CHUNK;
    let good = kv.block_size > 0 && kv.block_size.is_multiple_of(16) && chunk.is_multiple_of(kv.block_size);
    shape("kv", good, || format!("block size {}: not a multiple of 16 that divides {chunk}", kv.block_size))?;
    shape("kv", kv.kv_heads > 0 && kv.key_dim > 0 && kv.value_dim > 0, || "no heads".into())?;
    shape("kv", !kv.shared_values || kv.value_dim <= kv.key_dim, || {
        format!("values of {} can't be the beginning of keys of {}", kv.value_dim, kv.key_dim)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_ascend_and_end_at_the_row() {
        for mask in [Mask::Causal, Mask::Window(1), Mask::Window(7), Mask::Chunk(1), Mask::Chunk(8)] {
            for p in 0..40 {
                let first = mask.first_key(p);
                assert!(first <= p && first <= mask.first_key(p + 1), "{mask:?} {p}");
            }
        }
        assert_eq!((Mask::Window(24).first_key(23), Mask::Window(24).first_key(24)), (0, 1));
        assert_eq!((Mask::Chunk(32).first_key(31), Mask::Chunk(32).first_key(32)), (0, 32));
    }

    #[test]
    fn bytes_count_scales_padding_and_sharing() {
        let kv = KvShape {
            layers: 2,
            blocks: 1,
            block_size: 16,
            kv_heads: 3,
            key_dim: 64,
            value_dim: 64,
            shared_values: false,
            kv_type: KvType::F16,
        };
        let of = |kv_type| KvShape { kv_type, ..kv }.block_bytes();
        assert_eq!(of(KvType::F16), 2 * 16 * 3 * 256);
        assert_eq!(of(KvType::Q8), 2 * 16 * 3 * (128 + 8));
        assert!(of(KvType::Q8) as f64 <= 0.54 * of(KvType::F16) as f64);
        assert_eq!(KvShape { value_dim: 17, ..kv }.token_bytes(), 3 * 2 * (64 + 32));
        let latent = KvShape { kv_heads: 1, key_dim: 576, value_dim: 512, shared_values: true, kv_type: KvType::Q8, ..kv };
        assert_eq!(latent.token_bytes(), 580);
    }
}
