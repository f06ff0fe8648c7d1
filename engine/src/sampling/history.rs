use std::collections::{HashMap, hash_map::Entry};

/// The distinct tokens that penalties look at, with how often each was generated. Kept up to date token by token.
#[derive(Clone, Debug, Default)]
pub struct History {
    places: HashMap<u32, u32>,
    ids: Vec<u32>,
    counts: Vec<u32>,
}

impl History {
    /// A token that was generated.
    pub fn generated(&mut self, id: u32) {
        let place = self.place(id);
        self.counts[place] += 1;
    }

    /// A token of the prompt.
    pub fn prompt(&mut self, id: u32) {
        self.place(id);
    }

    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// One entry per id.
    #[must_use]
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    fn place(&mut self, id: u32) -> usize {
        match self.places.entry(id) {
            Entry::Occupied(place) => *place.get() as usize,
            Entry::Vacant(vacant) => {
                vacant.insert(self.ids.len() as u32);
                self.ids.push(id);
                self.counts.push(0);
                self.ids.len() - 1
            }
        }
    }
}
