//! Safetensors: one file or a folder of shards with an index.
//!
//! Owns the container and its limits: a header is checked against the bytes that are there before it is believed, and
//! never costs more memory than a few times its own size. Never knows what a tensor means.
//!
//! ```text
//! header length u64 ‖ header: JSON {name: {dtype, shape, data_offsets}} ‖ data, without holes or overlaps
//! ```

mod dtype;
mod error;
mod files;
mod header;

pub use dtype::Dtype;
pub(super) use dtype::decode_f8;
pub use error::SafetensorsError;
pub use files::SafetensorsFiles;
pub use header::{Safetensors, StoredTensor};
