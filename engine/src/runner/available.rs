//! How much memory this process may still use, as the system tells it.

use std::{fs, path::Path};

/// Bytes: the lesser of the machine's available memory and what the control group leaves; `None` where neither is told.
#[must_use]
pub fn available_memory() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    [machine, cgroup_v2(), cgroup_v1()].into_iter().flatten().min()
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The tightest limit on the way from this process's group to the root.
fn cgroup_v2() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    root.join(path).ancestors().take_while(|group| group.starts_with(root)).filter_map(group_left).min()
}

fn group_left(group: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    // `max` is not a number: no limit here.
    let limit = number("memory.max")?;
    let reclaimable = fs::read_to_string(group.join("memory.stat")).ok().and_then(|text| stat(&text, "inactive_file")).unwrap_or(0);
    Some(limit.saturating_sub(number("memory.current")?.saturating_sub(reclaimable)))
}

fn cgroup_v1() -> Option<u64> {
    let root = Path::new("/sys/fs/cgroup/memory");
    let number = |name: &str| fs::read_to_string(root.join(name)).ok()?.trim().parse::<u64>().ok();
    // "No limit" is a number near the top of the range.
    let limit = number("memory.limit_in_bytes").filter(|limit| *limit < 1 << 60)?;
    let reclaimable = fs::read_to_string(root.join("memory.stat")).ok().and_then(|text| stat(&text, "total_inactive_file")).unwrap_or(0);
    Some(limit.saturating_sub(number("memory.usage_in_bytes")?.saturating_sub(reclaimable)))
}

fn stat(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_and_stat_are_read_by_whole_names() {
        let text = "MemTotal:       24682516 kB\nMemFree:        1 kB\nMemAvailable:   24111104 kB\n";
        assert_eq!(meminfo_available(text), Some(24_111_104 * 1024));
        assert_eq!(meminfo_available("MemTotal: 5 kB\n"), None);
        assert_eq!(stat("active_file 1\ninactive_file 77\ntotal_inactive_file 5\n", "inactive_file"), Some(77));
        assert_eq!(stat("inactive_files 77\n", "inactive_file"), None);
    }
}
