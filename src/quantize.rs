//! `quire quantize`: a model in fewer bits, as a GGUF file.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use indicatif::HumanBytes;
use quire_engine::model::{
    checkpoint::Checkpoint,
    quantize::{Importance, Mix, QuantizeOptions, quantize_file},
};
use quire_kernels::quant::TensorType;

#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// A .gguf file (the first part of a split one), or a folder with one
    input: PathBuf,
    /// The file to write
    output: PathBuf,
    /// f32, f16, bf16, q8_0, q6_k, q5_k_m, q5_k_s, q5_1, q5_0, q4_k_m, q4_k_s, q4_1, q4_0, iq4_nl, iq4_xs, mxfp4_moe, q3_k_l, q3_k_m, q3_k_s, q2_k or q2_k_s
    #[arg(long = "type", short = 't', value_name = "TYPE", default_value = "q4_k_m", value_parser = mix)]
    mix: Mix,
    /// Importance matrix of llama-imatrix, in either of its forms
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Every matrix in one type, none with more bits
    #[arg(long)]
    pure: bool,
    /// Type of the output matrix
    #[arg(long, value_name = "TYPE", value_parser = tensor_type)]
    output_type: Option<TensorType>,
    /// Type of the embedding
    #[arg(long, value_name = "TYPE", value_parser = tensor_type)]
    embedding_type: Option<TensorType>,
    /// Replace the output if it is there
    #[arg(long, short)]
    force: bool,
}

fn mix(name: &str) -> Result<Mix> {
    Mix::from_name(name).with_context(|| format!("`{name}` is no type; there are {}", Mix::names().collect::<Vec<_>>().join(", ")))
}

/// A tensor type by its name, in any case.
pub fn tensor_type(name: &str) -> Result<TensorType> {
    let found = TensorType::ALL.into_iter().find(|tensor_type| tensor_type.name().eq_ignore_ascii_case(name));
    found.with_context(|| format!("`{name}` is no type; there are {}", TensorType::ALL.map(TensorType::name).join(", ")))
}

/// Runs on the caller's thread until the file is written.
pub fn run(args: QuantizeArgs) -> Result<ExitCode> {
    ensure!(args.force || !args.output.exists(), "{} is there already; --force replaces it", args.output.display());
    let Checkpoint::Gguf(file) = Checkpoint::open(&args.input)? else {
        bail!("{} is a Hugging Face folder; convert it to GGUF first: only GGUF files can be quantised", args.input.display());
    };
    let gguf = file.parse().with_context(|| args.input.display().to_string())?;
    let importance = args.imatrix.as_deref().map(Importance::open).transpose()?;
    let options = QuantizeOptions { mix: args.mix, pure: args.pure, output: args.output_type, embedding: args.embedding_type, importance };
    let begun = Instant::now();
    let bar = indicatif::ProgressBar::new(gguf.tensors().len() as u64)
        .with_style(indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}").context("the bar's template")?);
    let summary = quantize_file(&gguf, &args.output, &options, &mut |done, _, name| {
        bar.set_position(done as u64);
        bar.set_message(name.to_owned());
    })?;
    bar.finish_and_clear();
    if summary.requantised > 0 {
        eprintln!(
            "quire: {} tensors were quantised already; a file made from F16, BF16 or F32 weights would be better",
            summary.requantised
        );
    }
    if summary.fallbacks > 0 {
        eprintln!("quire: {} tensors have rows that are no whole blocks of {}; they got another type", summary.fallbacks, args.mix.name());
    }
    let types: Vec<String> = summary.types.iter().map(|(name, count)| format!("{count} {name}")).collect();
    println!(
        "{}: {} ({} before) in {:.1} s; tensors: {}",
        args.output.display(),
        HumanBytes(summary.after),
        HumanBytes(summary.before),
        begun.elapsed().as_secs_f64(),
        types.join(", ")
    );
    Ok(ExitCode::SUCCESS)
}
