//! GGUF files: what is read, and that a damaged file is a clear error and never a panic.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

mod gguf_writer;

use gguf_writer::{Value, Writer};
use quire_engine::model::{
    Description,
    gguf::{Gguf, GgufError, GgufFile, ValueType},
};

fn small() -> Writer {
    Writer::default()
        .key("general.architecture", Value::string("llama"))
        .key("a.bool", Value::bool(true))
        .key("a.number", Value::u32(7))
        .key("a.float", Value::f32(0.5))
        .key("some.strings", Value::strings(&["a", "", "ü"]))
        .key("some.ints", Value::ints(&[-1, 2]))
        .f32_tensor("one", &[8])
        .f32_tensor("two", &[4, 3])
        .tensor("packed", &[64, 2], 3, vec![0; 80])
}

fn error(writer: &Writer) -> String {
    Gguf::parse(&writer.bytes()).map(|_| ()).expect_err("a damaged file was accepted").to_string()
}

#[test]
fn reads_all_value_types_and_both_versions() {
    let mut writer = small();
    for (number, bytes) in [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (10, 8), (11, 8)] {
        let mut raw = vec![0; bytes];
        raw[0] = 5;
        writer = writer.key(&format!("int.{number}"), Value(number, raw));
    }
    writer = writer.key("float.64", Value(12, 2.25f64.to_le_bytes().into()));
    for version in [2, 3] {
        writer.version = version;
        let bytes = writer.bytes();
        let gguf = Gguf::parse(&bytes).unwrap();
        let m = &gguf.metadata;
        assert_eq!(gguf.version, version);
        for number in [0, 1, 2, 3, 4, 5, 10, 11] {
            assert_eq!(m.unsigned(&format!("int.{number}")).unwrap(), Some(5));
        }
        assert_eq!(m.float("float.64").unwrap(), Some(2.25));
        assert_eq!(m.float("a.float").unwrap(), Some(0.5));
        assert_eq!(m.boolean("a.bool").unwrap(), Some(true));
        assert_eq!(m.string("general.architecture").unwrap(), Some("llama"));
        assert_eq!(m.strings("some.strings").unwrap(), Some(vec!["a", "", "ü"]));
        assert_eq!(m.floats("some.ints").unwrap(), Some(vec![-1.0, 2.0]));
        assert_eq!(m.unsigned("absent").unwrap(), None);
        assert_eq!(m.get("some.ints").unwrap().element, ValueType::I32);
        let two = gguf.tensor("two").unwrap();
        assert_eq!((two.columns(), two.rows(), two.elements()), (4, 3, 12));
        assert_eq!(two.data[4..8], 1f32.to_le_bytes());
        let packed = gguf.tensor("packed").unwrap().view().unwrap();
        assert_eq!((packed.rows, packed.columns, packed.data.len()), (2, 64, 80));
    }
}

#[test]
fn values_of_the_wrong_kind_are_named() {
    let bytes = small().bytes();
    let gguf = Gguf::parse(&bytes).unwrap();
    let m = &gguf.metadata;
    let errors = [
        m.unsigned("general.architecture").unwrap_err().to_string(),
        m.string("a.number").unwrap_err().to_string(),
        m.boolean("a.number").unwrap_err().to_string(),
        m.strings("some.ints").unwrap_err().to_string(),
        m.floats("some.strings").unwrap_err().to_string(),
        m.unsigneds("some.ints").unwrap_err().to_string(),
        m.unsigned("some.ints").unwrap_err().to_string(),
    ];
    for error in errors {
        assert!(error.starts_with("metadata key `") && error.contains("is not"), "{error}");
    }
}

#[test]
fn other_files_and_other_versions_are_refused_by_name() {
    assert!(Gguf::parse(b"<html>not a model</html>").unwrap_err().to_string().contains("is not a GGUF file: it starts with `<htm`"));
    assert!(matches!(Gguf::parse(b"GG"), Err(GgufError::Truncated { .. })));
    let with = |version| error(&Writer { version, ..small() });
    assert!(with(1).contains("version 1"), "{}", with(1));
    assert!(with(4).contains("version 4"));
    assert!(with(0x0300_0000).contains("big-endian"));
    assert!(GgufFile::open("/nonexistent/x.gguf".as_ref()).unwrap_err().to_string().contains("cannot be read"));
}

/// Counts that claim more than there is must not be believed even for the time of an allocation.
#[test]
fn lying_counts_are_refused_at_once() {
    for count in [1000, 1 << 20, 1 << 40, u64::MAX] {
        assert!(error(&Writer { key_count: Some(count), ..small() }).contains("cut short"), "{count} keys");
        assert!(error(&Writer { tensor_count: Some(count), ..small() }).contains("cut short"), "{count} tensors");
        for element in [0, 6, 8, 12] {
            let mut bytes = u32::to_le_bytes(element).to_vec();
            bytes.extend(count.to_le_bytes());
            let message = error(&small().key("liar", Value(9, bytes)));
            assert!(message.contains("liar") || message.contains("cut short"), "{message}");
        }
        let message = error(&small().key("liar", Value(8, count.to_le_bytes().into())));
        assert!(message.contains("liar"), "{message}");
    }
}

#[test]
fn damaged_keys_are_named() {
    assert!(error(&small().key("a.number", Value::u32(8))).contains("`a.number`: stands in the file twice"));
    assert!(error(&small().key("odd", Value(13, vec![]))).contains("`odd`: has the unknown value type 13"));
    assert!(error(&small().key("nest", Value::array(9, &[]))).contains("`nest`: is an array of arrays"));
    assert!(error(&small().key("", Value::u32(8))).contains("empty"));
    for alignment in [0, 3, 48, u32::MAX] {
        let message = error(&small().key("general.alignment", Value::u32(alignment)));
        assert!(message.contains("`general.alignment`") && message.contains("power of two"), "{message}");
    }
    let aligned = Writer { alignment: 128, ..small() }.key("general.alignment", Value::u32(128));
    assert_eq!(Gguf::parse(&aligned.bytes()).unwrap().tensor("two").unwrap().offset, 128);
}

#[test]
fn damaged_tensors_are_named() {
    let with = |dimensions: &[u64], tensor_type: u32| error(&small().tensor("bad", dimensions, tensor_type, vec![0; 64]));
    let expect = |message: String, part: &str| assert!(message.contains("`bad`") && message.contains(part), "{message}");
    expect(with(&[48, 2], 3), "not a multiple of the 32 that Q4_1 packs");
    expect(with(&[0, 2], 0), "dimension of 0");
    expect(with(&[1, 1, 1, 1, 1], 0), "5 dimensions");
    expect(with(&[1 << 40, 1 << 40], 0), "no file can hold");
    expect(with(&[u64::MAX], 0), "no file can hold");
    expect(with(&[u64::MAX, u64::MAX, u64::MAX, u64::MAX], 2), "not a multiple");
    expect(with(&[1 << 20], 0), "lies outside the file");
    expect(with(&[32], 99), "unknown type 99");
    expect(with(&[32], 4), "withdrawn");
    expect(with(&[32], 15), "never stored");
    let mut writer = small();
    writer.tensors[1].offset = Some(33);
    assert!(error(&writer).contains("`two`: starts at 33, which is not a multiple of the alignment 32"));
    writer.tensors[1].offset = Some(0);
    assert!(error(&writer).contains("overlaps"));
    writer.tensors[1].offset = Some(u64::MAX - 31);
    assert!(error(&writer).contains("`two`: lies outside the file"));
    assert!(error(&small().f32_tensor("one", &[4])).contains("`one`: stands in the file twice"));
    // Known but without arithmetic: the file opens, the tensor says why it can't be used.
    let bytes = small().tensor("rare", &[256], 16, vec![0; 66]).bytes();
    let message = Gguf::parse(&bytes).unwrap().tensor("rare").unwrap().view().unwrap_err().to_string();
    assert!(message.contains("`rare`: has type IQ2_XXS, which is not supported yet; supported: F32"), "{message}");
}

fn touch_everything(bytes: &[u8]) -> bool {
    let Ok(gguf) = Gguf::parse(bytes) else { return false };
    let mut sum = 0u64;
    for tensor in gguf.tensors() {
        sum += tensor.data.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        let _ = tensor.view();
    }
    for (key, entry) in gguf.metadata.sorted() {
        sum += entry.scalars().count() as u64 + entry.strings().map(|text| text.len() as u64).sum::<u64>();
        let _ = (gguf.metadata.strings(key), gguf.metadata.floats(key), gguf.metadata.unsigneds(key));
    }
    let _ = Description::from_gguf(&gguf);
    let _ = quire_engine::model::tokenizer::Tokenizer::from_gguf(&gguf.metadata);
    std::hint::black_box(sum);
    true
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let bytes = small().bytes();
    assert!(touch_everything(&bytes));
    for length in 0..bytes.len() {
        assert!(!touch_everything(&bytes[..length]), "cut at {length} of {}", bytes.len());
    }
    // A real one: every length around its directory, and steps through its data.
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/models/llama-Q4_1.gguf")).unwrap();
    for length in (0..bytes.len()).filter(|length| *length < 2000 || *length % 61 == 0) {
        assert!(!touch_everything(&bytes[..length]), "cut at {length} of {}", bytes.len());
    }
}

#[test]
fn flipped_bytes_never_panic() {
    // A small generator: the same bytes on every run.
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let fixture = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/models/llama-Q4_1.gguf")).unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for (original, rounds, span) in [(small().bytes(), 20_000, usize::MAX), (fixture, 3_000, 24_000)] {
        for _ in 0..rounds {
            let mut bytes = original.clone();
            for _ in 0..1 + random() % 4 {
                let at = random() as usize % bytes.len().min(span);
                bytes[at] = random() as u8;
            }
            if touch_everything(&bytes) { accepted += 1 } else { refused += 1 }
        }
    }
    assert!(accepted > 100 && refused > 100, "{accepted} accepted, {refused} refused");
}

/// The smallest thing that a description can be made of.
fn model() -> Writer {
    Writer::default()
        .key("general.architecture", Value::string("llama"))
        .key("llama.block_count", Value::u32(1))
        .key("llama.context_length", Value::u32(64))
        .key("llama.embedding_length", Value::u32(32))
        .key("llama.feed_forward_length", Value::u32(32))
        .key("llama.attention.head_count", Value::u32(4))
        .key("llama.attention.layer_norm_rms_epsilon", Value::f32(1e-5))
        .f32_tensor("token_embd.weight", &[32, 40])
}

fn describe(writer: &Writer) -> Result<Description, String> {
    let bytes = writer.bytes();
    let gguf = Gguf::parse(&bytes).map_err(|error| error.to_string())?;
    Description::from_gguf(&gguf).map_err(|error| error.to_string())
}

#[test]
fn a_description_has_the_defaults_of_its_family() {
    let d = describe(&model()).unwrap();
    let (attention, dense) = (d.layers[0].attention, d.layers[0].feed_forward.dense.unwrap());
    assert_eq!((d.layers.len(), d.hidden, attention.heads, attention.kv_heads, attention.head_dim, dense.width), (1, 32, 4, 4, 8, 32));
    assert_eq!((d.vocabulary, d.trained_context, d.tied_output), (40, 64, true));
    assert_eq!((d.ropes[0].dim(), d.ropes[0].frequencies[0]), (8, 1.0));
    assert!((d.ropes[0].frequencies[2] - 0.01).abs() < 1e-8);
    // Per-layer values that agree; padding rows that are no tokens; stretched positions.
    let writer = model()
        .key("llama.attention.head_count_kv", Value::ints(&[2]))
        .key("llama.rope.scaling.type", Value::string("linear"))
        .key("llama.rope.scaling.factor", Value::f32(4.0))
        .key("tokenizer.ggml.tokens", Value::strings(&["a", "b", "c"]))
        .f32_tensor("output.weight", &[32, 40])
        .f32_tensor("rope_freqs.weight", &[4]);
    assert!(describe(&writer).unwrap_err().contains("`rope_freqs.weight`: holds a factor that is not a positive number"));
    let mut writer = writer;
    writer.tensors[2].data = [1f32, 1.0, 2.0, 8.0].iter().flat_map(|factor| factor.to_le_bytes()).collect();
    let d = describe(&writer).unwrap();
    assert_eq!((d.layers[0].attention.kv_heads, d.vocabulary, d.tied_output), (2, 3, false));
    let f = &d.ropes[0].frequencies;
    assert!((f[0] - 0.25).abs() < 1e-7 && (f[2] - 0.01 / 8.0).abs() < 1e-8 && (f[3] - 0.001 / 32.0).abs() < 1e-9, "{f:?}");
}

#[test]
fn contradictions_are_told() {
    let with = |key: &str, value| describe(&model().key(key, value)).unwrap_err();
    let cases = [
        (with("llama.attention.head_count_kv", Value::u32(3)), "is 3: 4 query heads can't share so many"),
        (with("llama.attention.head_count_kv", Value::ints(&[2, 4])), "has 2 values for 1 layers"),
        (with("llama.attention.key_length", Value::u32(0)), "`llama.attention.key_length`: is 0"),
        (with("llama.attention.value_length", Value::u32(0)), "`llama.attention.value_length`: is 0"),
        (with("llama.rope.dimension_count", Value::u32(10)), "is 10 for heads of 8"),
        (with("llama.rope.freq_base", Value::f32(f32::NAN)), "NaN"),
        (with("llama.rope.scaling.type", Value::string("yarn")), "`llama.rope.scaling.factor`: is missing"),
        (with("llama.rope.scaling.type", Value::string("other")), "`other`, which is not supported"),
        (with("llama.expert_count", Value::u32(8)), "`llama.expert_used_count`: is missing"),
    ];
    for (message, part) in cases {
        assert!(message.contains(part), "{message}");
    }
    let mut writer = model();
    writer.keys[0].1 = Value::string("mamba");
    assert!(describe(&writer).unwrap_err().starts_with("architecture `mamba` is not supported; supported: llama, qwen2"));
    for missing in 1..model().keys.len() {
        let mut writer = model();
        let (name, _) = writer.keys.remove(missing);
        let message = describe(&writer).unwrap_err();
        assert!(message.contains(&name) && message.contains("is missing"), "{message}");
    }
    let mut writer = model();
    writer.tensors.clear();
    assert!(describe(&writer).unwrap_err().contains("`token_embd.weight`: is missing"));
}

/// Three parts as `llama-gguf-split` writes them: metadata in the first, tensors in all.
fn parts() -> [Writer; 3] {
    let part = |number: u16| {
        Writer::default()
            .key("split.no", Value(2, number.to_le_bytes().into()))
            .key("split.count", Value(2, 3u16.to_le_bytes().into()))
            .key("split.tensors.count", Value::ints(&[]))
    };
    let whole = |mut writer: Writer| {
        writer.keys[2].1 = Value(5, 4i32.to_le_bytes().into());
        writer
    };
    [
        whole(part(0)).key("general.architecture", Value::string("llama")).f32_tensor("one", &[8]),
        whole(part(1)).f32_tensor("two", &[4, 3]).f32_tensor("three", &[2]),
        whole(part(2)).f32_tensor("four", &[6]),
    ]
}

fn write_parts(folder: &std::path::Path, parts: &[Writer]) -> std::path::PathBuf {
    for (index, part) in parts.iter().enumerate() {
        std::fs::write(folder.join(format!("m-{:05}-of-00003.gguf", index + 1)), part.bytes()).unwrap();
    }
    folder.join("m-00001-of-00003.gguf")
}

#[test]
fn a_model_in_several_files() {
    let folder = Folder::new("split");
    let first = write_parts(&folder.0, &parts());
    let file = GgufFile::open(&first).unwrap();
    let whole = file.parse().unwrap();
    assert_eq!(whole.metadata.string("general.architecture").unwrap(), Some("llama"));
    assert_eq!(whole.tensors().iter().map(|tensor| tensor.name).collect::<Vec<_>>(), ["one", "two", "three", "four"]);
    assert_eq!(whole.tensor("two").unwrap().data[4..8], 1f32.to_le_bytes());
    assert_eq!(whole.tensor_bytes(), 4 * (8 + 12 + 2 + 6));
}

#[test]
fn parts_that_do_not_fit_together_are_named() {
    let folder = Folder::new("split-bad");
    let open = |path: &std::path::Path| GgufFile::open(path).and_then(|file| file.parse().map(|_| ()));
    let first = write_parts(&folder.0, &parts());
    let check = |path: &std::path::Path, needles: &[&str]| {
        let error = open(path).unwrap_err().to_string();
        assert!(needles.iter().all(|needle| error.contains(needle)), "{error}");
    };
    check(&folder.0.join("m-00002-of-00003.gguf"), &["part 2 of 3", "open the first"]);
    // A part under another name.
    std::fs::copy(&first, folder.0.join("renamed.gguf")).unwrap();
    check(&folder.0.join("renamed.gguf"), &["split.count", "is 3", "-00001-of-00003.gguf"]);
    // Parts swapped.
    std::fs::write(folder.0.join("m-00002-of-00003.gguf"), parts()[2].bytes()).unwrap();
    check(&first, &["m-00002-of-00003.gguf", "split.no", "is 2"]);
    // A tensor twice, and one too few.
    let mut twice = parts();
    twice[2].tensors[0].name = "one".to_owned();
    write_parts(&folder.0, &twice);
    check(&first, &["`one`", "stands in two parts"]);
    let mut few = parts();
    few[2].tensors.clear();
    write_parts(&folder.0, &few);
    check(&first, &["split.tensors.count", "is 4", "3 tensors"]);
    std::fs::remove_file(folder.0.join("m-00003-of-00003.gguf")).unwrap();
    check(&first, &["m-00003-of-00003.gguf", "cannot be read"]);
}

/// A folder that goes with the test.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quire-gguf-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
