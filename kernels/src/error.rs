use thiserror::Error;

/// What can go wrong on a device.
#[derive(Debug, Error)]
pub enum KernelError {
    /// A tensor, plan or buffer does not have the shape that an op needs.
    #[error("{op}: {detail}")]
    Shape { op: &'static str, detail: String },
    /// The device has no kernel for this.
    #[error("{0} is not supported by this backend")]
    Unsupported(String),
    /// Memory could not be had.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory { what: &'static str, bytes: usize },
    /// The device or its driver failed.
    #[error("device failure: {0}")]
    Device(String),
}
