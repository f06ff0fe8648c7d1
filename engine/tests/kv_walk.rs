//! Seeded random walks of the KV memory over several cache groups that share one pool, with a lower tier, against a naive
//! model: what every slot of every block holds. Every position that a row sees must hold that row's own past, blocks are
//! conserved, reference counts are owners, hits are as long as the definition says, and what is said to fit does.
//!
//! QUIRE_WALK_OPS sets the number of operations.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Instant,
};

use quire_engine::{
    cache::{BlockId, BlockName, BlockState, Footprint, GroupKind, KvCache, KvConfig, Registered, SequenceKv, Tier},
    simulate::Random,
};
use quire_proto::block_hash::{BlockHash, chain};

const OPERATIONS: usize = 1_000_000;
const SEEDS: u64 = 100;
const B: usize = 4;
const EMPTY: u64 = 0;

/// What stands for the keys and values of a token: they depend on all tokens before it, and on the layers.
fn content(group: usize, state: u64) -> u64 {
    mix(state, group as u64 + 1) | 1
}

fn mix(state: u64, value: u64) -> u64 {
    let mut z = (state ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 27)
}

fn states(tokens: &[u32]) -> Vec<u64> {
    tokens
        .iter()
        .scan(1, |state, token| {
            *state = mix(*state, u64::from(*token));
            Some(*state)
        })
        .collect()
}

/// The device's memory, and a lower tier in the host's.
struct Memory {
    blocks: Vec<[u64; B]>,
    below: BTreeMap<BlockName, [u64; B]>,
    /// Copies under way: out, in.
    storing: BTreeMap<u32, (BlockName, [u64; B])>,
    fetching: BTreeMap<u32, [u64; B]>,
    capacity: usize,
    random: Random,
}

struct HostTier(Arc<Mutex<Memory>>);

impl Memory {
    fn keep(&mut self, name: BlockName, content: [u64; B]) {
        if self.below.len() >= self.capacity {
            let nth = self.random.below(self.below.len());
            let victim = *self.below.keys().nth(nth).unwrap();
            self.below.remove(&victim);
        }
        self.below.insert(name, content);
    }
}

impl Tier for HostTier {
    fn holds(&self, name: &BlockName) -> bool {
        self.0.lock().unwrap().below.contains_key(name)
    }

    fn evicted(&mut self, name: &BlockName, block: BlockId) -> bool {
        let mut memory = self.0.lock().unwrap();
        let kept = memory.random.below(2) == 0;
        if kept {
            let content = memory.blocks[block.0 as usize];
            memory.keep(*name, content);
        }
        kept
    }

    fn store(&mut self, name: &BlockName, block: BlockId) -> bool {
        let mut memory = self.0.lock().unwrap();
        let content = memory.blocks[block.0 as usize];
        assert!(memory.storing.insert(block.0, (*name, content)).is_none(), "stored twice at a time");
        true
    }

    fn fetch(&mut self, name: &BlockName, block: BlockId) -> bool {
        let mut memory = self.0.lock().unwrap();
        let Some(content) = memory.below.get(name).copied() else { return false };
        assert!(memory.fetching.insert(block.0, content).is_none());
        true
    }
}

struct Running {
    tokens: Vec<u32>,
    states: Vec<u64>,
    hashes: Vec<BlockHash>,
    kv: SequenceKv,
    computed: usize,
    /// What it was let in for.
    end: usize,
    indexed: bool,
}

#[derive(Default)]
struct Tally {
    steps: usize,
    hits: usize,
    below: usize,
    fetched: usize,
    forks: usize,
    retired: usize,
    no_room: usize,
    failed: usize,
    promises: usize,
}

struct Walk {
    cache: KvCache,
    memory: Arc<Mutex<Memory>>,
    footprint: Footprint,
    running: Vec<Running>,
    random: Random,
    /// Rebuilt from events alone.
    replica: BTreeSet<BlockHash>,
    tally: Tally,
}

fn root() -> BlockHash {
    BlockHash::root("", b"")
}

fn layout(random: &mut Random) -> Vec<GroupKind> {
    (0..1 + random.below(4))
        .map(|_| match random.below(5) {
            0 | 1 => GroupKind::Full,
            2 | 3 => GroupKind::Window { tokens: 1 + random.below(40) },
            _ => GroupKind::Chunk { tokens: 1 + random.below(40) },
        })
        .collect()
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let blocks = 8 + random.below(57);
        let footprint = Footprint { groups: layout(&mut random), block_size: B, step_rows: 1 + random.below(24) };
        let mut cache = KvCache::new(KvConfig { footprint: footprint.clone(), blocks, caching: random.below(8) > 0, epoch: seed });
        cache.events().listen(true);
        let memory = Arc::new(Mutex::new(Memory {
            blocks: vec![[EMPTY; B]; blocks],
            below: BTreeMap::new(),
            storing: BTreeMap::new(),
            fetching: BTreeMap::new(),
            capacity: 4 + random.below(60),
            random: Random::new(seed + 1000),
        }));
        if random.below(3) > 0 {
            cache.set_tier(Box::new(HostTier(Arc::clone(&memory))));
        }
        Self { cache, memory, footprint, running: Vec::new(), random, replica: BTreeSet::new(), tally: Tally::default() }
    }

    fn operation(&mut self) {
        match self.random.below(32) {
            0..6 if self.running.len() < 12 => self.arrive(),
            6 if !self.running.is_empty() => self.fork(),
            7 | 8 => self.leave(),
            9 => drop(self.cache.evict(1)),
            10 => self.fail(),
            11 => self.write_back(),
            12 => self.fetch(),
            13..17 => self.land(),
            17 => self.finish_one(),
            _ => self.advance(),
        }
    }

    fn prompt(&mut self) -> Vec<u32> {
        let longest = self.footprint.longest(self.cache.total()).min(self.cache.total() * B);
        let len = 1 + self.random.below(longest.max(8) * 3 / 4);
        let family = self.random.below(3) as u32;
        let mut tokens: Vec<u32> = (0..len as u32).map(|i| family * 10_000 + i).collect();
        if self.random.below(2) == 0 {
            let from = self.random.below(len);
            tokens[from..].iter_mut().for_each(|token| *token += 5_000);
        }
        tokens
    }

    fn arrive(&mut self) {
        let tokens = self.prompt();
        let indexed = self.random.below(6) > 0;
        let hashes = if indexed { chain(root(), &tokens, B) } else { Vec::new() };
        let hit = self.cache.hit(&hashes, tokens.len());
        assert_eq!(hit, self.longest_hit(&hashes, tokens.len()), "{:?}", self.footprint);
        let below = self.cache.hit_below(&hashes, hit, tokens.len());
        self.tally.below += below;
        let promised: usize = self.running.iter().map(|running| self.cache.still_to_take(&running.kv, running.end)).sum();
        if !self.cache.fits(&hashes, hit, tokens.len(), promised) {
            self.tally.no_room += 1;
            return;
        }
        let mut kv = SequenceKv::default();
        self.cache.admit(&mut kv, &hashes, hit);
        self.tally.hits += hit;
        let (states, end) = (states(&tokens), tokens.len());
        self.running.push(Running { states, tokens, hashes, kv, computed: hit * B, end, indexed });
        if self.random.below(4) == 0 {
            // What was said to fit fits to the end, if nobody comes between.
            let last = self.running.len() - 1;
            while self.running[last].computed < end {
                assert!(self.step(last), "what was said to fit does not: {:?}", self.footprint);
            }
        }
    }

    /// By definition, one length after the other.
    fn longest_hit(&self, hashes: &[BlockHash], tokens: usize) -> usize {
        let most = hashes.len().min((tokens - 1) / B);
        let has = |group: usize, i: usize| self.cache.index().get(&BlockName { hash: hashes[i], group: group as u32 }).is_some();
        let accepts = |blocks: usize| {
            self.footprint
                .groups
                .iter()
                .enumerate()
                .all(|(group, kind)| (kind.first_visible(blocks * B)..blocks * B).all(|at| has(group, at / B)))
        };
        (0..=most).rev().find(|blocks| accepts(*blocks)).unwrap()
    }

    fn advance(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let number = self.random.below(self.running.len());
        let running = &mut self.running[number];
        if running.computed == running.tokens.len() {
            if running.tokens.len() / B + 2 > self.cache.total() {
                return;
            }
            // Generated.
            let token = 90_000 + self.random.below(2) as u32;
            running.tokens.push(token);
            running.states.push(mix(*running.states.last().unwrap(), u64::from(token)));
            if running.indexed {
                running.hashes = chain(root(), &running.tokens, B);
            }
        }
        if !self.step(number) {
            self.tally.no_room += 1;
            let mut gone = self.running.swap_remove(number);
            self.cache.release(&mut gone.kv);
        }
    }

    /// Computes some rows; false if there is no room.
    fn step(&mut self, number: usize) -> bool {
        self.tally.steps += 1;
        let rows = 1 + self.random.below(self.footprint.step_rows);
        let running = &mut self.running[number];
        let (start, end) = (running.computed, running.tokens.len().min(running.computed + rows));
        let dead = |kv: &SequenceKv| (0..self.footprint.groups.len()).map(|group| kv.dead(group)).sum::<usize>();
        let before = dead(&running.kv);
        if !self.cache.grow(&mut running.kv, start, end) {
            assert_eq!(running.kv.blocks(), start.div_ceil(B), "no room, but something was taken");
            return false;
        }
        self.tally.retired += dead(&running.kv) - before;
        self.cache.register(&mut running.kv, root(), &running.hashes, end, &mut Vec::new());
        let mut memory = self.memory.lock().unwrap();
        for (group, kind) in self.footprint.groups.iter().enumerate() {
            let table = running.kv.table(group);
            for at in start..end {
                memory.blocks[table[at / B].0 as usize][at % B] = content(group, running.states[at]);
            }
            for at in kind.first_visible(start)..end {
                let block = table[at / B];
                assert_ne!(block, BlockId::DEAD, "a row reads what left the window");
                assert!(self.cache.pool().refs(block) > 0, "a row reads a free block");
                assert_ne!(self.cache.pool().state(block), BlockState::Arriving, "a row reads what has not arrived");
                assert_eq!(memory.blocks[block.0 as usize][at % B], content(group, running.states[at]), "group {group}, position {at}");
            }
        }
        running.computed = end;
        true
    }

    /// If there is as much room as was promised, a sequence ends what it was let in for.
    fn finish_one(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let number = self.random.below(self.running.len());
        let Running { ref kv, end, .. } = self.running[number];
        if self.cache.free() < self.cache.still_to_take(kv, end) {
            return;
        }
        self.tally.promises += 1;
        while self.running[number].computed < end {
            assert!(self.step(number), "a promise was broken: {:?}", self.footprint);
        }
    }

    fn fork(&mut self) {
        let number = self.random.below(self.running.len());
        let parent = &self.running[number];
        if parent.computed == 0 {
            return;
        }
        let tokens = 1 + self.random.below(parent.computed);
        let mut kv = SequenceKv::default();
        let can = self.cache.can_fork(&parent.kv, tokens) && self.cache.free() >= self.footprint.groups.len();
        assert_eq!(self.cache.fork(&parent.kv, &mut kv, tokens), can);
        if !can {
            assert_eq!(kv.blocks(), 0);
            return;
        }
        self.tally.forks += 1;
        let last = (tokens - 1) / B;
        let mut memory = self.memory.lock().unwrap();
        for group in 0..self.footprint.groups.len() {
            let (from, to) = (parent.kv.table(group)[last], kv.table(group)[last]);
            assert_ne!(from, to);
            if from != BlockId::DEAD {
                memory.blocks[to.0 as usize] = memory.blocks[from.0 as usize];
            }
        }
        drop(memory);
        let fork = Running {
            tokens: parent.tokens[..tokens].to_vec(),
            states: parent.states[..tokens].to_vec(),
            hashes: parent.hashes[..parent.hashes.len().min(tokens / B)].to_vec(),
            kv,
            computed: tokens - 1,
            end: tokens,
            indexed: parent.indexed,
        };
        self.running.push(fork);
        // The row that it computes again sees what it shares.
        let last = self.running.len() - 1;
        assert!(self.step(last));
    }

    fn leave(&mut self) {
        if !self.running.is_empty() {
            let number = self.random.below(self.running.len());
            let mut gone = self.running.swap_remove(number);
            self.cache.release(&mut gone.kv);
        }
    }

    /// A step that fails takes the names of what it did not write with it; a sequence that gave rubbish, all of its own.
    fn fail(&mut self) {
        if self.running.is_empty() {
            return;
        }
        self.tally.failed += 1;
        let number = self.random.below(self.running.len());
        let mut gone = self.running.swap_remove(number);
        let end = gone.tokens.len().min(gone.computed + self.footprint.step_rows);
        if self.random.below(2) == 0 {
            if self.cache.grow(&mut gone.kv, gone.computed, end) {
                let mut registered: Vec<Registered> = Vec::new();
                self.cache.register(&mut gone.kv, root(), &gone.hashes, end, &mut registered);
                registered.iter().for_each(|registered| self.cache.withdraw(*registered));
            }
        } else {
            self.cache.withdraw_all(&gone.kv, &gone.hashes);
            for group in 0..self.footprint.groups.len() {
                for (i, &hash) in gone.hashes[..gone.hashes.len().min(gone.kv.blocks())].iter().enumerate() {
                    let found = self.cache.index().get(&BlockName { hash, group: group as u32 });
                    assert!(found.is_none_or(|block| i >= gone.kv.dead(group) && block != gone.kv.table(group)[i]));
                }
            }
        }
        self.cache.release(&mut gone.kv);
    }

    fn write_back(&mut self) {
        let mut started = Vec::new();
        self.cache.write_back(1 + self.random.below(4), &mut started);
        started.iter().for_each(|block| assert_eq!(self.cache.pool().state(*block), BlockState::Leaving));
    }

    fn fetch(&mut self) {
        let tokens = self.prompt();
        let hashes = chain(root(), &tokens, B);
        let hit = self.cache.hit(&hashes, tokens.len());
        let below = self.cache.hit_below(&hashes, hit, tokens.len());
        let mut started = Vec::new();
        self.cache.fetch(root(), &hashes, hit + below, &mut started);
        assert_eq!(self.cache.hit(&hashes, tokens.len()), hit, "what has not arrived is not found, what was there is not lost");
        started.iter().for_each(|block| assert_eq!(self.cache.pool().state(*block), BlockState::Arriving));
        if self.random.below(2) == 0 {
            let room = below > 0 && !started.is_empty();
            started.iter().for_each(|block| self.arrive_from_below(block.0, true));
            let now = self.cache.hit(&hashes, tokens.len());
            assert!(now >= hit);
            self.tally.fetched += usize::from(room) * (now - hit);
        }
    }

    fn arrive_from_below(&mut self, block: u32, well: bool) {
        let mut memory = self.memory.lock().unwrap();
        let content = memory.fetching.remove(&block).unwrap();
        memory.blocks[block as usize] = if well { content } else { [EMPTY; B] };
        drop(memory);
        self.cache.fetched(BlockId(block), well);
    }

    /// A copy under way ends.
    fn land(&mut self) {
        let mut memory = self.memory.lock().unwrap();
        if let Some((block, (name, content))) = memory.storing.pop_first() {
            if self.random.below(8) > 0 {
                memory.keep(name, content);
            }
            drop(memory);
            self.cache.stored(BlockId(block));
            return;
        }
        let first = memory.fetching.keys().next().copied();
        drop(memory);
        if let Some(block) = first {
            let well = self.random.below(8) > 0;
            self.arrive_from_below(block, well);
        }
    }

    fn check(&mut self) {
        let pool = self.cache.pool();
        assert_eq!(pool.free() + pool.used(), pool.total());
        let memory = self.memory.lock().unwrap();
        let mut owners = vec![0; pool.total()];
        for running in &self.running {
            for group in 0..self.footprint.groups.len() {
                let (table, dead) = (running.kv.table(group), running.kv.dead(group));
                assert_eq!(table.len(), running.kv.blocks());
                assert!(table[..dead].iter().all(|block| *block == BlockId::DEAD));
                table[dead..].iter().for_each(|block| owners[block.0 as usize] += 1);
            }
        }
        memory.storing.keys().chain(memory.fetching.keys()).for_each(|block| owners[*block as usize] += 1);
        for (block, owners) in owners.iter().enumerate() {
            let id = BlockId(block as u32);
            assert_eq!(pool.refs(id), *owners);
            let named = self.cache.index().name_of(id).is_some();
            let want = match owners {
                _ if memory.storing.contains_key(&id.0) => BlockState::Leaving,
                _ if memory.fetching.contains_key(&id.0) => BlockState::Arriving,
                0 if named => BlockState::Cached,
                0 => BlockState::Free,
                _ => BlockState::Used,
            };
            assert_eq!(pool.state(id), want);
        }
        assert_eq!(pool.eviction_order().count(), pool.free());
        drop(memory);
        self.check_events();
    }

    /// Whoever listens has the index of group 0.
    fn check_events(&mut self) {
        if let Some(changes) = self.cache.events().flush() {
            changes.removed.iter().for_each(|hash| assert!(self.replica.remove(hash)));
            changes.stored.iter().for_each(|stored| assert!(self.replica.insert(stored.hash)));
        }
        let held: BTreeSet<_> = self.cache.snapshot().into_iter().map(|(hash, _)| hash).collect();
        assert_eq!(held, self.replica);
    }
}

#[test]
fn groups_of_one_pool_keep_every_promise() {
    let operations = std::env::var("QUIRE_WALK_OPS").map_or(OPERATIONS, |text| text.parse().unwrap());
    let began = Instant::now();
    let mut sum = Tally::default();
    let mut tier = (0, 0, 0, 0);
    for seed in 0..SEEDS {
        let mut walk = Walk::new(seed);
        for number in 0..operations.div_ceil(SEEDS as usize) {
            walk.operation();
            if number % 16 == 0 {
                walk.check();
            }
        }
        while !walk.running.is_empty() {
            walk.leave();
        }
        for _ in 0..200 {
            walk.land();
        }
        walk.check();
        assert_eq!(walk.cache.used(), 0);
        let (tally, counters) = (&walk.tally, walk.cache.tier_counters());
        sum.steps += tally.steps;
        sum.hits += tally.hits;
        sum.below += tally.below;
        sum.fetched += tally.fetched;
        sum.forks += tally.forks;
        sum.retired += tally.retired;
        sum.no_room += tally.no_room;
        sum.failed += tally.failed;
        sum.promises += tally.promises;
        tier = (tier.0 + counters.kept, tier.1 + counters.stores, tier.2 + counters.fetches, tier.3 + counters.lost);
    }
    let Tally { steps, hits, below, fetched, forks, retired, no_room, failed, promises } = sum;
    println!(
        "{operations} operations in {:.1?}: {steps} steps, {hits} blocks hit, {retired} left a window, {forks} forks, {no_room} times no room, \
         {failed} failed, {promises} promises kept; lower tier: {below} blocks seen, {fetched} hit after a fetch, {tier:?} kept, stored, fetched, lost",
        began.elapsed()
    );
    for (name, count) in [
        ("hits", hits),
        ("below", below),
        ("fetched", fetched),
        ("forks", forks),
        ("retired", retired),
        ("no room", no_room),
        ("failed", failed),
        ("promises", promises),
        ("kept", tier.0 as usize),
        ("stored", tier.1 as usize),
        ("lost", tier.3 as usize),
    ] {
        assert!(count > operations / 5_000, "the walks are too tame: {count} {name}");
    }
}
