//! Scalar f32.
