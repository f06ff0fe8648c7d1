//! Compiles the protos without protoc, and keeps the descriptor set for reflection.
use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const PROTOS: [&str; 2] = ["quire/worker/v1/worker.proto", "quire/inference/v1/inference.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    for proto in PROTOS {
        println!("cargo:rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(PROTOS, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        // A worker's prompt can be long; ids are copied once, as Vec<u32>.
        .bytes(".quire.worker.v1.ArtefactChunk")
        .compile_fds(descriptors)?;
    Ok(())
}
