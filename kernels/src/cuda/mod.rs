//! CUDA probe.
