//! What a process holds, and what its server says of itself.

use std::collections::BTreeMap;

use serde::Serialize;

/// Memory, descriptors and threads of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Holding {
    /// Resident memory.
    pub kib: u64,
    pub descriptors: u64,
    pub threads: u64,
}

impl Holding {
    /// Of a running process; `None` where the system does not tell.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok());
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
        Some(Self { kib: field("VmRSS:")?, descriptors, threads: field("Threads:")? })
    }
}

/// Series of a metrics page, summed over their labels, by name.
#[must_use]
pub fn series(page: &str) -> BTreeMap<String, f64> {
    let mut out = BTreeMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let name = series.split('{').next().unwrap_or(series);
        if let Ok(value) = value.parse::<f64>() {
            *out.entry(name.to_owned()).or_insert(0.0) += value;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_summed() {
        let page = "# HELP a b\na{x=\"1\",y=\"} 2\"} 3\na{x=\"2\"} 4.5\nb 1\n\nc{le=\"+Inf\"} 7\n";
        let series = series(page);
        assert_eq!((series["a"], series["b"], series["c"]), (7.5, 1.0, 7.0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_holds_something() {
        let holding = Holding::of(std::process::id()).unwrap();
        assert!(holding.kib > 100 && holding.descriptors >= 3 && holding.threads >= 1);
        assert_eq!(Holding::of(u32::MAX), None);
    }
}
