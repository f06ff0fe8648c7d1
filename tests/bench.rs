//! The measures of `quire bench` that need no server, on a committed model.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Helpers of tests are tests, too.

use std::process::{Command, Stdio};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/engine/testdata/models/llama-Q4_1.gguf");

fn bench(arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    for (name, _) in std::env::vars() {
        if name.starts_with("QUIRE_") {
            command.env_remove(name);
        }
    }
    let output = command.arg("bench").args(arguments).stdin(Stdio::null()).output().unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// Numbers of a line of the table, after backend and KV type.
fn numbers(line: &str) -> Vec<f64> {
    line.split_whitespace().filter_map(|field| field.parse().ok()).collect()
}

#[test]
fn perplexity_of_kv_types_side_by_side() {
    let (ok, out, err) = bench(&["perplexity", MODEL, "--context", "64", "--windows", "3", "--kv-types", "f16,f32,q8,fp8"]);
    assert!(ok, "{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].contains("3 windows of 64, 96 tokens scored"), "{out}");
    assert_eq!(lines.len(), 6, "{out}");
    let rows: Vec<Vec<f64>> = lines[2..].iter().map(|line| numbers(line)).collect();
    for (line, kv_type) in lines[2..].iter().zip(["f16", "f32", "q8", "fp8"]) {
        assert!(line.contains(&format!(" {kv_type} ")), "{line}");
    }
    // Bytes per token, their ratio, the perplexity, its change, the mean and the largest difference.
    assert_eq!((rows[0][1], rows[0][3], rows[0][4]), (1.0, 0.0, 0.0));
    assert_eq!(rows[1][1], 2.0);
    for row in &rows {
        assert!(row[2] > 1.0 && row[3].abs() < 5.0, "{out}");
    }
    assert!(rows[3][4] > rows[2][4] && rows[2][4] > rows[1][4], "fp8 is coarser than q8, and q8 than f32: {out}");
}

#[test]
fn perplexity_says_what_is_wrong() {
    for (arguments, words) in [
        (&["perplexity", MODEL, "--context", "256"][..], "--context 256"),
        (&["perplexity", MODEL, "--context", "2"], "--context"),
        (&["perplexity", MODEL, "--text", "no-such-file"], "no-such-file"),
        (&["perplexity", MODEL, "--kv-types", "q3"], "q3"),
        (&["perplexity", "no-such-model.gguf"], "no-such-model.gguf"),
    ] {
        let (ok, _, err) = bench(arguments);
        assert!(!ok && err.contains(words), "{arguments:?}: {err}");
    }
}
