//! What a caller is told while the store works, and how it says stop.

/// Hears of progress. One thing at a time: `started`, any number of `advanced`, then the next `started` or `finished`.
pub trait Progress: Sync {
    /// Something that takes time begins; `total` in bytes if known.
    fn started(&self, what: &str, total: Option<u64>);
    /// Bytes done of it so far.
    fn advanced(&self, bytes: u64);
    /// It is over, well or not.
    fn finished(&self);
    /// Worth a line of its own.
    fn note(&self, message: &str);
    /// Asked between chunks: true stops the work; what came so far stays, to be continued.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn started(&self, _: &str, _: Option<u64>) {}
    fn advanced(&self, _: u64) {}
    fn finished(&self) {}
    fn note(&self, _: &str) {}
}
