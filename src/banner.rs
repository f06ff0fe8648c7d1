//! What a person sees once a process is ready.

use std::{net::IpAddr, thread};

use indicatif::HumanBytes;

use crate::models::Running;

/// Model, types, CPU, threads, memory: one paragraph a model.
pub fn models(running: &[Running]) -> String {
    let mut text = String::new();
    for model in running {
        let local = &model.local;
        let mut line = |label: &str, value: &str| text.push_str(&format!("  {label:<8} {value}\n"));
        line("model", &format!("{}: {}", model.names.join(", "), model.about));
        let source = if local.source == local.path.display().to_string() { String::new() } else { format!(", from {}", local.source) };
        line("file", &format!("{} ({}{source})", local.path.display(), HumanBytes(local.bytes)));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        line("compute", &format!("{} of {cores} CPUs; the CPU has {}", model.compute, cpu_features()));
        line("memory", &model.memory);
        line("loaded", &format!("in {:.2} s", model.loaded_in.as_secs_f64()));
    }
    text
}

/// Where to ask, and a line to try.
pub fn urls(host: IpAddr, port: u16, admin: Option<u16>, model: Option<&str>, with_key: bool) -> String {
    let base = format!("http://{}:{port}", reachable(host));
    let mut text = format!("  API      {base}/v1 (HTTP and gRPC)\n");
    if let Some(admin) = admin {
        text.push_str(&format!("  admin    http://{}:{admin} (/livez, /readyz, /metrics)\n", reachable(host)));
    }
    let Some(model) = model else { return text };
    let key = if with_key { " -H \"authorization: Bearer $QUIRE_API_KEY\"" } else { "" };
    let body = serde_json::json!({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]});
    let quoted = body.to_string().replace('\'', "'\\''");
    text.push_str(&format!("\n  curl {base}/v1/chat/completions -H 'content-type: application/json'{key} \\\n    -d '{quoted}'\n"));
    text
}

/// `0.0.0.0` is no address to go to.
fn reachable(host: IpAddr) -> String {
    match host {
        IpAddr::V4(v4) if v4.is_unspecified() => "127.0.0.1".to_owned(),
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) if v6.is_unspecified() => "[::1]".to_owned(),
        IpAddr::V6(v6) => format!("[{v6}]"),
    }
}

/// Those that arithmetic could use.
fn cpu_features() -> String {
    #[allow(unused_mut)] // Only where there is something to detect.
    let mut found: Vec<&str> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! note {
            ($($feature:tt),*) => { $( if std::arch::is_x86_feature_detected!($feature) { found.push($feature); } )* };
        }
        note!("sse4.1", "avx", "f16c", "fma", "avx2", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "avx512fp16");
    }
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! note {
            ($($feature:tt),*) => { $( if std::arch::is_aarch64_feature_detected!($feature) { found.push($feature); } )* };
        }
        note!("neon", "fp16", "dotprod", "i8mm", "bf16", "sve", "sve2");
    }
    if found.is_empty() { "no features that are known here".to_owned() } else { found.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_can_be_gone_to() {
        let text = urls("0.0.0.0".parse().unwrap(), 8000, Some(9090), Some("it's"), true);
        assert!(text.contains("http://127.0.0.1:8000/v1") && text.contains("http://127.0.0.1:9090 "), "{text}");
        assert!(text.contains("Bearer $QUIRE_API_KEY") && text.contains("it'\\''s"), "{text}");
        let text = urls("::1".parse().unwrap(), 1, None, None, false);
        assert!(text.contains("http://[::1]:1/v1") && !text.contains("admin") && !text.contains("curl"), "{text}");
    }
}
