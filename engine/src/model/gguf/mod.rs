//! GGUF files: a memory-mapped container of metadata and tensors.
//!
//! Owns the container and its limits: whatever a file claims is checked against the bytes that are there before it is
//! believed, so a damaged or hostile file is a [`GgufError`] and never a panic or a large allocation. Never knows what a
//! key or a tensor means.
//!
//! ```text
//! "GGUF" ‖ version u32 ‖ tensors u64 ‖ keys u64 ‖ keys… ‖ tensor infos… ‖ padding to the alignment ‖ tensor data
//! ```

mod error;
mod file;
mod metadata;
mod reader;
mod split;
mod tensors;
mod types;
mod writer;

pub use error::GgufError;
pub(super) use error::clip;
pub use file::{Gguf, GgufFile};
pub use metadata::{Entry, Metadata, Scalar, ValueType};
pub use split::{Part, part_of};
pub use tensors::TensorInfo;
pub use types::GgmlType;
pub use writer::{GgufWriter, Planned, StoredValue};
