//! Which layers share a block.
//!
//! All groups take their blocks from one pool, so all blocks must have the same bytes: every group has the same number of
//! layers. A model with 22 layers that see a window and 4 that see everything is cut into groups of 4: one of the full
//! layers, six of the others, the last of them with two places unused.

use super::GroupKind;

/// A group costs block tables, index entries and time in every step: as much as so large a share of the full layers' memory
/// that is unused.
const GROUP_COST: f64 = 0.02;
/// What unused memory counts in groups that hold little of a long sequence.
const WINDOW_WEIGHT: f64 = 0.25;

/// Where a layer's keys and values lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Cache group: whose block table names the blocks.
    pub group: usize,
    /// Place within each block.
    pub layer: usize,
}

/// The layers of a model, in groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    groups: Vec<GroupKind>,
    places: Vec<Option<Place>>,
    layers_per_block: usize,
}

impl CacheLayout {
    /// `layers[i]`: what layer i keeps; `None` if it has no cache of its own. Full groups come first.
    #[must_use]
    pub fn new(layers: &[Option<GroupKind>]) -> Self {
        let mut kinds: Vec<(GroupKind, usize)> = Vec::new();
        for kind in layers.iter().flatten() {
            match kinds.iter_mut().find(|(other, _)| other == kind) {
                Some((_, count)) => *count += 1,
                None => kinds.push((*kind, 1)),
            }
        }
        kinds.sort_unstable();
        let layers_per_block = layers_per_block(&kinds);
        let mut groups = Vec::new();
        let mut first_group = Vec::new();
        for &(kind, count) in &kinds {
            first_group.push(groups.len());
            groups.resize(groups.len() + count.div_ceil(layers_per_block), kind);
        }
        let mut seen = vec![0; kinds.len()];
        let places = layers
            .iter()
            .map(|layer| {
                let number = kinds.iter().position(|(kind, _)| Some(*kind) == *layer)?;
                let before = seen[number];
                seen[number] += 1;
                Some(Place { group: first_group[number] + before / layers_per_block, layer: before % layers_per_block })
            })
            .collect();
        Self { groups, places, layers_per_block }
    }

    /// What each group keeps.
    #[must_use]
    pub fn groups(&self) -> &[GroupKind] {
        &self.groups
    }

    /// Layers that one block holds keys and values of.
    #[must_use]
    pub fn layers_per_block(&self) -> usize {
        self.layers_per_block
    }

    /// Where a layer's keys and values lie; `None` if it has none.
    #[must_use]
    pub fn place(&self, layer: usize) -> Option<Place> {
        self.places.get(layer).copied().flatten()
    }

    /// Share of a block of every group that no layer uses.
    #[must_use]
    pub fn unused(&self) -> f64 {
        let places = (self.groups.len() * self.layers_per_block).max(1);
        1.0 - self.places.iter().flatten().count() as f64 / places as f64
    }
}

fn layers_per_block(kinds: &[(GroupKind, usize)]) -> usize {
    let unused = |size: usize, full: bool| {
        let (layers, places) = kinds
            .iter()
            .filter(|(kind, _)| kind.reach().is_none() == full)
            .fold((0, 0), |(layers, places), (_, count)| (layers + count, places + count.next_multiple_of(size)));
        (places - layers) as f64 / layers.max(1) as f64
    };
    let cost = |size: usize| {
        let groups: usize = kinds.iter().map(|(_, count)| count.div_ceil(size)).sum();
        unused(size, true) + WINDOW_WEIGHT * unused(size, false) + GROUP_COST * groups as f64
    };
    let largest = kinds.iter().map(|(_, count)| *count).max().unwrap_or(1);
    (1..=largest).rev().min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: GroupKind = GroupKind::Window { tokens: 512 };

    fn layout(layers: usize, full_every: usize) -> CacheLayout {
        let kinds: Vec<_> = (0..layers).map(|layer| Some(if (layer + 1) % full_every == 0 { GroupKind::Full } else { LOCAL })).collect();
        CacheLayout::new(&kinds)
    }

    fn shape(layout: &CacheLayout) -> (usize, usize, usize) {
        let full = layout.groups().iter().filter(|kind| **kind == GroupKind::Full).count();
        (layout.layers_per_block(), full, layout.groups().len() - full)
    }

    #[test]
    fn known_models_are_cut_as_expected() {
        assert_eq!(shape(&layout(30, 1)), (30, 1, 0), "one group, one block for all layers");
        assert_eq!(shape(&layout(24, 2)), (12, 1, 1), "gpt-oss 20B");
        assert_eq!(shape(&layout(26, 6)), (4, 1, 6), "Gemma 3 1B");
        assert_eq!(shape(&layout(34, 6)), (5, 1, 6), "Gemma 3 4B");
        assert_eq!(shape(&layout(48, 6)), (8, 1, 5), "Gemma 3 12B");
        assert_eq!(shape(&layout(62, 6)), (10, 1, 6), "Gemma 3 27B");
        assert_eq!(shape(&layout(48, 4)), (12, 1, 3), "Llama 4, Command R7B");
        assert!(layout(26, 6).unused() < 0.08);
        assert_eq!(layout(24, 2).unused(), 0.0);
    }

    #[test]
    fn every_layer_has_a_place_of_its_own_in_a_group_of_its_kind() {
        for (layers, every) in [(30, 1), (24, 2), (26, 6), (62, 6), (7, 3), (1, 1), (1, 2)] {
            let layout = layout(layers, every);
            let mut places: Vec<_> = (0..layers).map(|layer| layout.place(layer).unwrap()).collect();
            for (layer, place) in places.iter().enumerate() {
                let kind = if (layer + 1) % every == 0 { GroupKind::Full } else { LOCAL };
                assert_eq!(layout.groups()[place.group], kind);
                assert!(place.layer < layout.layers_per_block());
            }
            places.sort_by_key(|place| (place.group, place.layer));
            places.dedup();
            assert_eq!(places.len(), layers);
            assert_eq!(layout.place(layers), None);
            assert!(layout.groups().is_sorted(), "full groups come first");
        }
    }

    #[test]
    fn layers_without_a_cache_take_no_place() {
        let layout = CacheLayout::new(&[Some(GroupKind::Full), None, Some(GroupKind::Full), None]);
        assert_eq!((layout.layers_per_block(), layout.groups()), (2, &[GroupKind::Full][..]));
        assert_eq!((layout.place(1), layout.place(2)), (None, Some(Place { group: 0, layer: 1 })));
        assert_eq!(CacheLayout::new(&[None]).groups(), []);
    }
}
