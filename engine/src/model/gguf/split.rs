//! Models in several files: `name-00001-of-00003.gguf`, …
//!
//! The first part holds all metadata; each part has its own tensors. `split.no` counts from 0, `split.count` and
//! `split.tensors.count` say the whole.

use super::{Gguf, GgufError};

/// What a part's name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    pub stem: &'a str,
    /// From 1.
    pub number: u32,
    pub total: u32,
}

/// `name-00002-of-00005.gguf` → (`name`, 2, 5).
#[must_use]
pub fn part_of(file: &str) -> Option<Part<'_>> {
    let (rest, total) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !five(total) || !five(number) {
        return None;
    }
    Some(Part { stem, number: number.parse().ok()?, total: total.parse().ok()? })
}

impl Part<'_> {
    /// Names of all parts, in order.
    pub(super) fn siblings(&self) -> impl Iterator<Item = String> {
        (1..=self.total).map(|number| format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.total))
    }
}

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Is this the part `index` (from 0) of `count`?
pub(super) fn check_part(part: &Gguf<'_>, index: u64, count: u64) -> Result<(), GgufError> {
    let claimed = part.metadata.unsigned(COUNT)?.unwrap_or(1).max(1);
    if claimed != count {
        let problem = if count == 1 {
            format!(
                "is {claimed}: this is one part of a split model; name its first part as it was, …-00001-of-{claimed:05}.gguf, with the others beside it"
            )
        } else {
            format!("is {claimed}, but the file's name says {count}")
        };
        return Err(GgufError::key(COUNT, problem));
    }
    match part.metadata.unsigned(NUMBER)? {
        Some(number) if number != index => {
            Err(GgufError::key(NUMBER, format!("is {number}, but by its name this is part {index} (from 0): files were renamed")))
        }
        _ => Ok(()),
    }
}

/// Are all tensors there?
pub(super) fn check_whole(whole: &Gguf<'_>) -> Result<(), GgufError> {
    match whole.metadata.unsigned(TENSORS)? {
        Some(count) if count != whole.tensors().len() as u64 => {
            let problem = format!("is {count}, but all parts together have {} tensors", whole.tensors().len());
            Err(GgufError::key(TENSORS, problem))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let part = part_of("big-Q8_0-00002-of-00003.gguf").unwrap();
        assert_eq!((part.stem, part.number, part.total), ("big-Q8_0", 2, 3));
        assert_eq!(part.siblings().nth(2).unwrap(), "big-Q8_0-00003-of-00003.gguf");
        for whole in ["a.gguf", "a-1-of-2.gguf", "a-00001-of-0002x.gguf", "00001-of-00002.gguf"] {
            assert_eq!(part_of(whole), None, "{whole}");
        }
    }
}
