//! What layers keep of the past, and how much memory that takes.

/// What a group of layers keeps of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupKind {
    /// Keys and values of every position.
    Full,
    /// A row sees `tokens` positions: its own and those just before it.
    Window { tokens: usize },
    /// Positions are cut into chunks of `tokens`; a row sees its own chunk, up to itself.
    Chunk { tokens: usize },
}

impl GroupKind {
    /// The first position that a row at `position` sees. Never falls as positions rise.
    #[must_use]
    pub fn first_visible(self, position: usize) -> usize {
        match self {
            Self::Full => 0,
            Self::Window { tokens } => (position + 1).saturating_sub(tokens.max(1)),
            Self::Chunk { tokens } => position - position % tokens.max(1),
        }
    }

    /// Positions before its own that a row sees at most; `None`: all.
    #[must_use]
    pub fn reach(self) -> Option<usize> {
        match self {
            Self::Full => None,
            Self::Window { tokens } | Self::Chunk { tokens } => Some(tokens.max(1) - 1),
        }
    }
}

/// How many blocks of the pool a sequence takes, all groups together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    pub groups: Vec<GroupKind>,
    /// Tokens per block.
    pub block_size: usize,
    /// Rows that one sequence computes in one step at most: until the step is done, a window holds what the first of them
    /// sees.
    pub step_rows: usize,
}

impl Footprint {
    /// Blocks of one group that hold `tokens` tokens if nothing is given back.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Leading blocks that no row from `position` on sees.
    #[must_use]
    pub fn dead(&self, group: usize, position: usize) -> usize {
        self.groups[group].first_visible(position) / self.block_size
    }

    /// Blocks that a group holds at most while a sequence is computed up to `tokens`, `rows` a step.
    pub(super) fn group_peak(&self, group: usize, tokens: usize, rows: usize) -> usize {
        let all = self.blocks_for(tokens);
        // So many positions, wherever they begin in a block.
        let span = |positions: usize| (positions + self.block_size).saturating_sub(2) / self.block_size + 1;
        self.groups[group].reach().map_or(all, |reach| all.min(span(reach + rows.max(1))))
    }

    /// Blocks that a sequence holds at most while it is computed up to `tokens`.
    #[must_use]
    pub fn peak(&self, tokens: usize) -> usize {
        (0..self.groups.len()).map(|group| self.group_peak(group, tokens, self.step_rows)).sum()
    }

    /// The longest sequence that `blocks` blocks can hold; `usize::MAX` if there is no limit.
    #[must_use]
    pub fn longest(&self, blocks: usize) -> usize {
        if self.groups.is_empty() {
            return 0;
        }
        let Some(most) = blocks.checked_mul(self.block_size) else { return usize::MAX };
        // Past this nothing grows but full groups.
        let settled = self.groups.iter().filter_map(|kind| kind.reach()).max().unwrap_or(0).saturating_add(self.step_rows);
        let settled = settled.saturating_add(2 * self.block_size);
        if self.full_groups() == 0 && self.peak(settled) <= blocks {
            return usize::MAX;
        }
        let (mut fits, mut too_long) = (0, most.max(settled) / self.block_size + 1);
        while fits + 1 < too_long {
            let middle = fits.midpoint(too_long);
            if self.peak(middle.saturating_mul(self.block_size)) <= blocks { fits = middle } else { too_long = middle }
        }
        fits.saturating_mul(self.block_size)
    }

    /// Groups that grow for as long as their sequences do.
    #[must_use]
    pub fn full_groups(&self) -> usize {
        self.groups.iter().filter(|kind| kind.reach().is_none()).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kind() -> impl Strategy<Value = GroupKind> {
        prop_oneof![
            Just(GroupKind::Full),
            (1usize..80).prop_map(|tokens| GroupKind::Window { tokens }),
            (1usize..80).prop_map(|tokens| GroupKind::Chunk { tokens }),
        ]
    }

    proptest! {
        /// Against the definition: hold what any row of the step sees, step by step, in chunks of any size.
        #[test]
        fn nobody_ever_holds_more_than_the_peak(
            groups in prop::collection::vec(kind(), 1..5),
            block_size in 1usize..9,
            step_rows in 1usize..30,
            chunks in prop::collection::vec(1usize..30, 1..40),
        ) {
            let footprint = Footprint { groups: groups.clone(), block_size, step_rows };
            let (mut done, mut seen) = (0, 0);
            for chunk in chunks {
                let end = done + chunk.min(step_rows);
                let held: usize = groups.iter().map(|kind| {
                    let visible = (done..end).map(|row| kind.first_visible(row)).min().unwrap();
                    assert_eq!(visible, kind.first_visible(done), "it never falls");
                    (visible / block_size..=(end - 1) / block_size).count()
                }).sum();
                seen = seen.max(held);
                prop_assert!(seen <= footprint.peak(end), "{} of {} at {}", seen, footprint.peak(end), end);
                done = end;
            }
            // What is said to fit does, and a block more does not.
            let longest = footprint.longest(footprint.peak(done));
            prop_assert!(longest >= done);
            if longest < usize::MAX {
                prop_assert!(footprint.peak(longest) <= footprint.peak(done));
                prop_assert!(footprint.peak(longest + block_size) > footprint.peak(done));
            }
        }
    }

    #[test]
    fn a_window_is_what_the_field_calls_a_window() {
        // Row 9 of a window of 4 sees 6, 7, 8, 9; of chunks of 4: 8, 9.
        assert_eq!(GroupKind::Window { tokens: 4 }.first_visible(9), 6);
        assert_eq!(GroupKind::Window { tokens: 4 }.first_visible(2), 0);
        assert_eq!(GroupKind::Chunk { tokens: 4 }.first_visible(9), 8);
        assert_eq!(GroupKind::Full.first_visible(9), 0);
        let footprint = Footprint { groups: vec![GroupKind::Full, GroupKind::Window { tokens: 128 }], block_size: 16, step_rows: 1 };
        assert_eq!(footprint.peak(16_000), 1000 + 9, "128 positions lie in 9 blocks at most");
        assert_eq!(footprint.longest(1009), 16_000);
        let windows = Footprint { groups: vec![GroupKind::Window { tokens: 128 }], ..footprint };
        assert_eq!((windows.longest(9), windows.longest(8)), (usize::MAX, 128));
    }
}
