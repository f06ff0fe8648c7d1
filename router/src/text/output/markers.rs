//! Looking for markers in text that may be cut anywhere.

/// The marker that is complete first.
pub(super) fn first(text: &str, markers: &[&'static str]) -> Option<(usize, &'static str)> {
    markers.iter().filter_map(|marker| text.find(marker).map(|at| (at, *marker))).min_by_key(|(at, marker)| at + marker.len())
}

/// Bytes at the end of a text that may be the beginning of a marker.
pub(super) fn beginning(text: &str, markers: &[&str]) -> usize {
    let longest = markers.iter().map(|marker| marker.len()).max().unwrap_or(0);
    let from = text.ceil_char_boundary(text.len().saturating_sub(longest.saturating_sub(1)));
    let starts = text[from..].char_indices().map(|(at, _)| from + at);
    starts.into_iter().find(|&at| markers.iter().any(|marker| marker.starts_with(&text[at..]))).map_or(0, |at| text.len() - at)
}

/// Whether a text is the beginning of a marker, and not all of it.
pub(super) fn may_become(text: &str, markers: &[&str]) -> bool {
    markers.iter().any(|marker| marker.len() > text.len() && marker.starts_with(text))
}
