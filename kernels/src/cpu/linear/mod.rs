//! Packed weight matrices and their product with prepared activations.
//!
//! API under way; the signatures below stay:
//!
//! ```text
//! PackedLinear::pack(isa: Isa, pool: &Pool, parts: &[TensorView<'_>], bias: Option<&[f32]>) -> Result<Self, KernelError>
//!   .rows() .columns() .bytes() -> usize     // out, in, bytes held
//!   .forms() -> Forms                        // which forms of activations it reads
//!   .groups() -> usize                       // units of work: up to 16 consecutive output rows each
//!   .group_rows(group) -> Range<usize>       // output rows of a group; a part's last group may hold fewer than 16
//!   .gather_row(row, out: &mut [f32]) -> Result<(), KernelError>   // the exact decoded row
//!   .matmul(groups: Range<usize>, activations: &Activations, sink: impl FnMut(usize, usize, &[f32])) -> Result<(), KernelError>
//!       // for each group in ascending order, for each activation row: sink(row, first output, up to 16 outputs), bias added
//! ```
