//! Which layers share a block.
//!
//! All groups take their blocks from one pool, so all blocks have the same bytes: every group has as many layers as fill a
//! block. A model with 22 layers that see a window and 4 that see everything is cut into groups of 4: one of the full
//! layers, six of the others, the last of them with two places unused. Where layers have keys and values of different
//! sizes, a block holds more of the small ones.

use super::GroupKind;

/// A group costs block tables, index entries and time in every step: as much as so large a share of the full layers' memory
/// that is unused.
const GROUP_COST: f64 = 0.02;
/// What unused memory counts in groups that hold little of a long sequence.
const WINDOW_WEIGHT: f64 = 0.25;

/// What one layer keeps of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerCache {
    pub kind: GroupKind,
    /// Numbers the shapes of keys and values that the model has; layers of one group have one shape.
    pub shape: usize,
    /// Elements of a token's keys and values, all heads together.
    pub width: usize,
}

/// Where a layer's keys and values lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Cache group: whose block table names the blocks.
    pub group: usize,
    /// Place within each block.
    pub layer: usize,
    /// Of the layer's keys and values.
    pub shape: usize,
}

/// The layers of a model, in groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    groups: Vec<GroupKind>,
    places: Vec<Option<Place>>,
    /// Per shape.
    layers_per_block: Vec<usize>,
}

/// Layers that are alike, and how many there are.
type Kinds = [(LayerCache, usize)];

impl CacheLayout {
    /// `layers[i]`: what layer i keeps; `None` if it has no cache of its own. Full groups come first.
    #[must_use]
    pub fn new(layers: &[Option<LayerCache>]) -> Self {
        let mut kinds: Vec<(LayerCache, usize)> = Vec::new();
        for kind in layers.iter().flatten().map(|layer| LayerCache { width: layer.width.max(1), ..*layer }) {
            match kinds.iter_mut().find(|(other, _)| *other == kind) {
                Some((_, count)) => *count += 1,
                None => kinds.push((kind, 1)),
            }
        }
        kinds.sort_unstable();
        let block_width = block_width(&kinds);
        let shapes = kinds.iter().map(|(kind, _)| kind.shape + 1).max().unwrap_or(0);
        let mut layers_per_block = vec![0; shapes];
        let mut groups = Vec::new();
        let mut first_group = Vec::new();
        for &(kind, count) in &kinds {
            let each = block_width / kind.width;
            layers_per_block[kind.shape] = each;
            first_group.push(groups.len());
            groups.resize(groups.len() + count.div_ceil(each), kind.kind);
        }
        let mut seen = vec![0; kinds.len()];
        let places = layers
            .iter()
            .map(|layer| {
                let layer = layer.as_ref()?;
                let number = kinds.iter().position(|(kind, _)| (kind.kind, kind.shape) == (layer.kind, layer.shape))?;
                let (before, each) = (seen[number], layers_per_block[layer.shape]);
                seen[number] += 1;
                Some(Place { group: first_group[number] + before / each, layer: before % each, shape: layer.shape })
            })
            .collect();
        Self { groups, places, layers_per_block }
    }

    /// What each group keeps.
    #[must_use]
    pub fn groups(&self) -> &[GroupKind] {
        &self.groups
    }

    /// Layers of each shape that one block holds keys and values of.
    #[must_use]
    pub fn layers_per_block(&self) -> &[usize] {
        &self.layers_per_block
    }

    /// Where a layer's keys and values lie; `None` if it has none.
    #[must_use]
    pub fn place(&self, layer: usize) -> Option<Place> {
        self.places.get(layer).copied().flatten()
    }
}

/// Elements of a token in a block: of all whole numbers of layers of some kind, the one that costs least.
fn block_width(kinds: &Kinds) -> usize {
    let least = kinds.iter().map(|(kind, _)| kind.width).max().unwrap_or(1);
    let widths = kinds.iter().flat_map(|(kind, count)| (1..=*count).map(|layers| layers * kind.width));
    let best = widths.filter(|width| *width >= least).min_by(|a, b| {
        // Of equal ones the widest: fewer groups.
        cost(kinds, *a).total_cmp(&cost(kinds, *b)).then(b.cmp(a))
    });
    best.unwrap_or(least)
}

fn cost(kinds: &Kinds, block_width: usize) -> f64 {
    let groups = |kind: &LayerCache, count: usize| count.div_ceil(block_width / kind.width);
    let unused = |full: bool| {
        let (used, taken) = kinds
            .iter()
            .filter(|(kind, _)| kind.kind.reach().is_none() == full)
            .fold((0, 0), |sums, (kind, count)| (sums.0 + count * kind.width, sums.1 + groups(kind, *count) * block_width));
        (taken - used) as f64 / used.max(1) as f64
    };
    let groups: usize = kinds.iter().map(|(kind, count)| groups(kind, *count)).sum();
    unused(true) + WINDOW_WEIGHT * unused(false) + GROUP_COST * groups as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: GroupKind = GroupKind::Window { tokens: 512 };

    fn layer(kind: GroupKind) -> LayerCache {
        LayerCache { kind, shape: 0, width: 512 }
    }

    fn kind(number: usize, full_every: usize) -> GroupKind {
        if (number + 1).is_multiple_of(full_every) { GroupKind::Full } else { LOCAL }
    }

    fn layout(layers: usize, full_every: usize) -> CacheLayout {
        CacheLayout::new(&(0..layers).map(|number| Some(layer(kind(number, full_every)))).collect::<Vec<_>>())
    }

    fn shape(layout: &CacheLayout) -> (usize, usize, usize) {
        let full = layout.groups().iter().filter(|kind| **kind == GroupKind::Full).count();
        (layout.layers_per_block()[0], full, layout.groups().len() - full)
    }

    #[test]
    fn known_models_are_cut_as_expected() {
        assert_eq!(shape(&layout(30, 1)), (30, 1, 0), "one group, one block for all layers");
        assert_eq!(shape(&layout(24, 2)), (12, 1, 1), "gpt-oss 20B");
        assert_eq!(shape(&layout(26, 6)), (4, 1, 6), "Gemma 3 1B");
        assert_eq!(shape(&layout(34, 6)), (5, 1, 6), "Gemma 3 4B");
        assert_eq!(shape(&layout(48, 6)), (8, 1, 5), "Gemma 3 12B");
        assert_eq!(shape(&layout(62, 6)), (10, 1, 6), "Gemma 3 27B");
        assert_eq!(shape(&layout(48, 4)), (12, 1, 3), "Llama 4");
    }

    #[test]
    fn every_layer_has_a_place_of_its_own_in_a_group_of_its_kind() {
        for (layers, every) in [(30, 1), (24, 2), (26, 6), (62, 6), (7, 3), (1, 1), (1, 2)] {
            let layout = layout(layers, every);
            let mut places: Vec<_> = (0..layers).map(|layer| layout.place(layer).unwrap()).collect();
            for (layer, place) in places.iter().enumerate() {
                assert_eq!(layout.groups()[place.group], kind(layer, every));
                assert!(place.layer < layout.layers_per_block()[0]);
            }
            places.sort_by_key(|place| (place.group, place.layer));
            places.dedup();
            assert_eq!(places.len(), layers);
            assert_eq!(layout.place(layers), None);
            assert!(layout.groups().is_sorted(), "full groups come first");
        }
    }

    #[test]
    fn a_block_holds_more_of_the_smaller_layers() {
        // Full layers with 4 heads of 512, others with 8 heads of 256 and half of the keys: five to one.
        let layers: Vec<_> = (0..36)
            .map(|number| match kind(number, 6) {
                GroupKind::Full => Some(LayerCache { kind: GroupKind::Full, shape: 1, width: 4096 }),
                kind => Some(LayerCache { kind, shape: 0, width: 2048 }),
            })
            .collect();
        let layout = CacheLayout::new(&layers);
        assert_eq!(layout.layers_per_block(), [12, 6], "one full group of 6, three others of 10 or 12");
        assert_eq!(layout.groups(), [GroupKind::Full, LOCAL, LOCAL, LOCAL]);
        assert_eq!(layout.place(35), Some(Place { group: 0, layer: 5, shape: 1 }));
        assert_eq!(layout.place(12), Some(Place { group: 1, layer: 10, shape: 0 }));
        assert_eq!(layout.place(34), Some(Place { group: 3, layer: 5, shape: 0 }));
    }

    #[test]
    fn shapes_never_share_a_group_even_of_one_width() {
        let of = |shape| Some(LayerCache { kind: GroupKind::Full, shape, width: 64 });
        let layout = CacheLayout::new(&[of(0), of(1), of(0), of(1), of(1), of(0)]);
        assert_eq!((layout.groups().len(), layout.layers_per_block()), (2, &[3, 3][..]));
        assert_eq!(layout.place(4), Some(Place { group: 1, layer: 2, shape: 1 }));
    }

    #[test]
    fn layers_without_a_cache_take_no_place() {
        let full = Some(layer(GroupKind::Full));
        let layout = CacheLayout::new(&[full, None, full, None]);
        assert_eq!((layout.layers_per_block(), layout.groups()), (&[2][..], &[GroupKind::Full][..]));
        assert_eq!((layout.place(1), layout.place(2)), (None, Some(Place { group: 0, layer: 1, shape: 0 })));
        assert_eq!(CacheLayout::new(&[None]).groups(), []);
    }
}
