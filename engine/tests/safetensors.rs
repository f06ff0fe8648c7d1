//! Safetensors: what is read, that a damaged file is a clear error, and tensors by name from either container.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::path::{Path, PathBuf};

use quire_engine::model::{
    checkpoint::{Checkpoint, Tensors},
    gguf::GgufFile,
    safetensors::{Dtype, Safetensors, SafetensorsFiles},
};
use quire_kernels::quant::TensorType;

/// A file of this header and so many bytes of data, counting up.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

fn error(header: &str, data: usize) -> String {
    Safetensors::parse(&file(header, data)).map(|_| ()).expect_err("a damaged file was accepted").to_string()
}

const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
    "a\u0041":{"shape":[],"dtype":"F32","data_offsets":[0,4]},"none":{"dtype":"I64","shape":[0,7],"data_offsets":[16,16]}}   "#;

#[test]
fn reads_tensors_by_name() {
    let bytes = file(GOOD, 16);
    let file = Safetensors::parse(&bytes).unwrap();
    assert_eq!(file.tensors().iter().map(|tensor| tensor.name.as_ref()).collect::<Vec<_>>(), ["aA", "b", "none"]);
    let b = file.tensor("b").unwrap();
    assert_eq!((b.dtype, b.shape.as_slice(), b.data), (Dtype::BF16, &[2, 3][..], &bytes[bytes.len() - 12..]));
    assert_eq!(file.tensor("aA").unwrap().elements(), 1);
    assert_eq!(file.tensor("none").unwrap().elements(), 0);
    assert!(file.tensor("a").is_none());
    assert!(Safetensors::parse(&self::file("{}", 0)).unwrap().tensors().is_empty());
}

#[test]
fn damage_is_named() {
    let entry =
        |dtype: &str, shape: &str, offsets: &str| format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
    for (header, data, needles) in [
        (entry("F32", "[2]", "[0,8]"), 7, &["8 bytes", "has 7"][..]),
        (entry("F32", "[2]", "[0,8]"), 9, &["8 bytes", "has 9"]),
        (entry("F32", "[3]", "[0,8]"), 8, &["`w`", "`shape`", "[3]", "8 bytes"]),
        (entry("F99", "[2]", "[0,8]"), 8, &["`w`", "`dtype`", "F99"]),
        (entry("F32", "[2]", "[4,12]"), 12, &["`w`", "`data_offsets`", "hole"]),
        (entry("F32", "[2]", "[8,0]"), 8, &["`w`", "`data_offsets`"]),
        (entry("U8", "[4294967296,4294967296]", "[0,8]"), 8, &["`w`", "`shape`"]),
        (entry("U8", "[-1]", "[0,8]"), 8, &["`w`", "-1"]),
        (entry("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, &["`w`", "`shape`", "8 dimensions"]),
        (entry("U8", "[1]", "[0,1,2]"), 1, &["`w`", "trailing"]),
        (entry("U8", "7", "[0,1]"), 1, &["`w`", "`shape`"]),
        (r#"{"w":{"dtype":"U8","shape":[1]}}"#.to_owned(), 1, &["`w`", "data_offsets"]),
        (r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#.to_owned(), 1, &["header"]),
        ("[]".to_owned(), 0, &["header", "tensors by name"]),
        (
            r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#.to_owned(),
            2,
            &["`w`", "twice"],
        ),
        (
            r#"{"v":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#.to_owned(),
            3,
            &["`w`", "overlaps"],
        ),
    ] {
        let error = error(&header, data);
        assert!(needles.iter().all(|needle| error.contains(needle)), "{header}: {error}");
    }
    for bytes in [&b"\x08\0\0"[..], &u64::MAX.to_le_bytes(), &9u64.to_le_bytes(), b"<html>not a model</html>"] {
        let error = Safetensors::parse(bytes).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("header"), "{error}");
    }
    let mut bytes = file(GOOD, 16);
    bytes[9] = 0xff;
    assert!(Safetensors::parse(&bytes).unwrap_err().to_string().contains("UTF-8"));
}

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quire-safetensors-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn with(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn shard(name: &str, bytes: usize) -> Vec<u8> {
    file(&format!(r#"{{"{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#), bytes)
}

#[test]
fn shards_with_an_index() {
    let index = r#"{"metadata":{"total_size":9},"weight_map":{"x":"s-1.safetensors","y":"s-2.safetensors"}}"#;
    let folder = Folder::new("shards")
        .with("model.safetensors.index.json", index)
        .with("s-1.safetensors", shard("x", 4))
        .with("s-2.safetensors", shard("y", 5));
    let files = SafetensorsFiles::open(&folder.0).unwrap();
    let names: Vec<_> = files.parse().unwrap().into_iter().map(|tensor| (tensor.name.into_owned(), tensor.data.len())).collect();
    assert_eq!(names, [("x".to_owned(), 4), ("y".to_owned(), 5)]);

    let open = |folder: &Path| SafetensorsFiles::open(folder).and_then(|files| files.parse().map(|_| ())).unwrap_err().to_string();
    let folder = folder.with("s-2.safetensors", shard("z", 5));
    let error = open(&folder.0);
    assert!(error.contains("s-2.safetensors") && error.contains("`y`") && error.contains("missing"), "{error}");
    let folder = folder.with("s-2.safetensors", &shard("y", 5)[..30]);
    assert!(open(&folder.0).contains("s-2.safetensors"), "{}", open(&folder.0));
    std::fs::remove_file(folder.0.join("s-2.safetensors")).unwrap();
    assert!(open(&folder.0).contains("s-2.safetensors"));
    for (index, needle) in [
        (r#"{"weight_map":{"x":"../secret.safetensors"}}"#, "no .safetensors file beside it"),
        (r#"{"weight_map":{"x":"pickle.bin"}}"#, "no .safetensors file beside it"),
        (r#"{"weight_map":{}}"#, "names no tensor"),
        (r#"{"weights":{}}"#, "weight_map"),
    ] {
        std::fs::write(folder.0.join("model.safetensors.index.json"), index).unwrap();
        assert!(open(&folder.0).contains(needle), "{}", open(&folder.0));
    }
}

#[test]
fn tensors_are_what_kernels_read() {
    let header = r#"{"f8":{"dtype":"F8_E4M3","shape":[1,256],"data_offsets":[0,256]},"f64":{"dtype":"F64","shape":[1],"data_offsets":[512,520]},
        "g8":{"dtype":"F8_E5M2","shape":[256],"data_offsets":[256,512]},"i":{"dtype":"I32","shape":[1],"data_offsets":[520,524]}}"#;
    let mut bytes = file(header, 0);
    bytes.extend((0..512).map(|i| i as u8));
    bytes.extend(0.1f64.to_le_bytes());
    bytes.extend(7i32.to_le_bytes());
    let folder = Folder::new("kernels").with("config.json", "{}").with("model.safetensors", bytes);
    let Checkpoint::HuggingFace(opened) = Checkpoint::open(&folder.0).unwrap() else { panic!("a folder with a config") };
    let tensors = opened.tensors().unwrap();
    assert_eq!(tensors.facts("f8").unwrap().shape, [1, 256]);
    assert_eq!(tensors.bytes(), 524);
    let f8 = tensors.needed("f8").unwrap();
    assert_eq!((f8.tensor_type, f8.rows(), f8.columns()), (TensorType::BF16, 1, 256));
    let (f8, g8) = (f8.to_f32().unwrap(), tensors.needed("g8").unwrap().to_f32().unwrap());
    assert_eq!((f8[0x7e], f8[0x81], g8[0x7b], g8[0x81]), (448.0, -0.001_953_125, 57344.0, -(2f32.powi(-16))));
    assert_eq!(tensors.needed("f64").unwrap().to_f32().unwrap(), [0.1]);
    assert!(tensors.needed("i").unwrap_err().to_string().contains("I32"));
    assert!(tensors.needed("j").unwrap_err().to_string().contains("`j`: is missing"));
    assert!(tensors.get("j").unwrap().is_none());
    for (config, needle) in [("[]", "JSON object"), ("{", "JSON object")] {
        std::fs::write(folder.0.join("config.json"), config).unwrap();
        let error = Checkpoint::open(&folder.0).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains(needle), "{error}");
    }
}

#[test]
fn a_gguf_file_gives_the_same_face() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/models/llama-F32.gguf");
    let Checkpoint::Gguf(file) = Checkpoint::open(&path).unwrap() else { panic!("a GGUF file") };
    let gguf = file.parse().unwrap();
    let tensors = Tensors::from_gguf(&gguf);
    assert_eq!(tensors.iter().len(), gguf.tensors().len());
    let embedding = tensors.needed("token_embd.weight").unwrap();
    assert_eq!((embedding.shape.as_slice(), embedding.tensor_type), (&[512, 64][..], TensorType::F32));
    assert_eq!(embedding.view().row(1).len(), 256);
    assert_eq!(tensors.bytes(), gguf.tensor_bytes());
}

/// Every folder of the seed's fixtures opens, and the Llama one equals its GGUF file.
#[test]
fn fixtures_open() {
    let Some(fixtures) = std::env::var_os("QUIRE_FIXTURES") else {
        println!("skipped: QUIRE_FIXTURES is not set");
        return;
    };
    let fixtures = PathBuf::from(fixtures);
    let mut opened = 0;
    for entry in std::fs::read_dir(fixtures.join("models")).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("config.json").is_file() {
            continue;
        }
        let Checkpoint::HuggingFace(folder) = Checkpoint::open(&path).unwrap() else { panic!("a folder with a config") };
        let tensors = folder.tensors().unwrap();
        // One model has a table of integers, which is no weight.
        for facts in tensors.iter().filter(|facts| facts.type_name != "I64") {
            let tensor = tensors.needed(&facts.name).unwrap();
            assert!(tensor.to_f32().unwrap().iter().all(|value| value.is_finite()), "{}", facts.name);
        }
        opened += 1;
    }
    assert!(opened > 50);
    let hf = Checkpoint::open(&fixtures.join("models/llama")).unwrap();
    let Checkpoint::HuggingFace(hf) = hf else { panic!("a folder with a config") };
    let file = GgufFile::open(&fixtures.join("gguf/llama-F32.gguf")).unwrap();
    let gguf = file.parse().unwrap();
    let (ours, theirs) = (hf.tensors().unwrap(), Tensors::from_gguf(&gguf));
    for (hf, gguf) in [("model.embed_tokens", "token_embd"), ("model.layers.1.mlp.down_proj", "blk.1.ffn_down")] {
        let ours = ours.needed(&format!("{hf}.weight")).unwrap();
        assert_eq!(ours.data, theirs.needed(&format!("{gguf}.weight")).unwrap().data);
    }
}
