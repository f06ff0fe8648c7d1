use super::BlockId;

/// What one sequence owns of the KV memory: a block table per cache group. All tables have the same length; the entries
/// of blocks that left a window are [`BlockId::DEAD`] and are never read.
#[derive(Clone, Debug, Default)]
pub struct SequenceKv {
    pub(super) tables: Vec<Vec<BlockId>>,
    /// Per group: leading entries that are dead.
    pub(super) dead: Vec<usize>,
    /// Leading blocks that have been offered to the index.
    pub(super) registered: usize,
}

impl SequenceKv {
    pub(super) fn prepare(&mut self, groups: usize) {
        self.tables.resize_with(groups, Vec::new);
        self.dead.resize(groups, 0);
    }

    /// Takes memory for tables of so many blocks, so that growing takes none. The blocks themselves are not taken.
    pub fn reserve(&mut self, blocks: usize) {
        for table in &mut self.tables {
            table.reserve_exact(blocks.saturating_sub(table.len()));
        }
    }

    /// Block table of a group, in order of position.
    #[must_use]
    pub fn table(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], Vec::as_slice)
    }

    /// Leading entries of a group's table that are dead.
    #[must_use]
    pub fn dead(&self, group: usize) -> usize {
        self.dead.get(group).copied().unwrap_or(0)
    }

    /// Length of every table: blocks between the first token and the last that there is room for.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.table(0).len()
    }

    /// Blocks owned, all groups together, beyond the first `shared` of each table.
    #[must_use]
    pub fn owned_beyond(&self, shared: usize) -> usize {
        self.tables.iter().zip(&self.dead).map(|(table, dead)| table.len().saturating_sub((*dead).max(shared))).sum()
    }
}
