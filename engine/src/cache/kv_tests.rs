use quire_proto::block_hash::chain;

use super::*;

const B: usize = 4;

fn cache(blocks: usize) -> KvCache {
    cache_of(&[GroupKind::Full], blocks)
}

fn cache_of(groups: &[GroupKind], blocks: usize) -> KvCache {
    let footprint = Footprint { groups: groups.to_vec(), block_size: B, step_rows: 64 };
    let mut cache = KvCache::new(KvConfig { footprint, blocks, caching: true, epoch: 1 });
    cache.events().listen(true);
    cache
}

fn root() -> BlockHash {
    BlockHash::root("", b"")
}

fn run(cache: &mut KvCache, ids: &[u32]) -> (SequenceKv, usize) {
    let hashes = chain(root(), ids, B);
    let hit = cache.hit(&hashes, ids.len());
    let mut kv = SequenceKv::default();
    assert!(cache.fits(&hashes, hit, ids.len(), 0));
    cache.admit(&mut kv, &hashes, hit);
    assert!(cache.grow(&mut kv, hit * B, ids.len()));
    cache.register(&mut kv, root(), &hashes, ids.len(), &mut Vec::new());
    (kv, hit)
}

#[test]
fn a_hit_leaves_a_token_and_follows_the_chain() {
    let mut cache = cache(32);
    let ids: Vec<u32> = (0..14).collect();
    let (mut kv, hit) = run(&mut cache, &ids);
    assert_eq!(hit, 0);
    cache.release(&mut kv);
    assert_eq!(cache.used(), 0);
    // 14 tokens: three full blocks; 12 tokens: the last of three must be computed again.
    for (length, want) in [(14, 3), (13, 3), (12, 2), (4, 0), (5, 1)] {
        assert_eq!(cache.hit(&chain(root(), &ids[..length], B), length), want, "{length} tokens");
    }
    let mut other = ids.clone();
    other[9] = 99;
    assert_eq!(cache.hit(&chain(root(), &other, B), 14), 2);
    other[0] = 99;
    assert_eq!(cache.hit(&chain(root(), &other, B), 14), 0);
    assert_eq!(cache.hit(&chain(BlockHash::root("", b"salt"), &ids, B), 14), 0);
    assert_eq!(cache.hit(&chain(BlockHash::root("adapter", b""), &ids, B), 14), 0);
}

#[test]
fn the_tail_is_evicted_first_and_worthless_blocks_before_all() {
    let mut cache = cache(10);
    let ids: Vec<u32> = (0..22).collect();
    let (mut kv, _) = run(&mut cache, &ids);
    let table = kv.table(0).to_vec();
    cache.release(&mut kv);
    let order: Vec<BlockId> = cache.pool().eviction_order().collect();
    assert_eq!(order[0], table[5], "the partial block");
    assert_eq!(&order[5..], &[table[4], table[3], table[2], table[1], table[0]], "then, after the unused ones, tail to head");
}

#[test]
fn a_hit_revives_free_blocks_and_a_failed_grow_changes_nothing() {
    let mut cache = cache(6);
    let ids: Vec<u32> = (0..13).collect();
    let (mut first, _) = run(&mut cache, &ids);
    cache.release(&mut first);
    let hashes = chain(root(), &ids, B);
    assert!(!cache.fits(&hashes, 3, 25, 0), "three revived and four fresh blocks do not fit into six");
    assert!(cache.fits(&hashes, 3, 24, 0));
    let (mut second, hit) = run(&mut cache, &ids);
    assert_eq!((hit, cache.used()), (3, 4));
    let before = second.table(0).to_vec();
    assert!(!cache.grow(&mut second, 12, 25));
    assert_eq!(second.table(0), before);
    assert_eq!(cache.used(), 4);
    cache.release(&mut second);
    assert_eq!(cache.used(), 0);
}

#[test]
fn events_name_parents_and_follow_eviction() {
    let mut cache = cache(4);
    let ids: Vec<u32> = (0..9).collect();
    let hashes = chain(root(), &ids, B);
    let (mut kv, _) = run(&mut cache, &ids);
    let changes = cache.events().flush().unwrap();
    let stored: Vec<_> = changes.stored.iter().map(|s| (s.hash, s.parent)).collect();
    assert_eq!(stored, [(hashes[0], root()), (hashes[1], hashes[0])]);
    assert_eq!(cache.snapshot(), stored);
    cache.release(&mut kv);
    let mut other = SequenceKv::default();
    assert!(cache.grow(&mut other, 0, 3 * B));
    assert_eq!(cache.events().flush().unwrap().removed, [hashes[1]], "the tail goes first");
    assert_eq!(cache.snapshot(), [(hashes[0], root())]);
}

#[test]
fn withdrawn_blocks_are_not_found_again() {
    let mut cache = cache(8);
    let ids: Vec<u32> = (0..9).collect();
    let (mut kv, _) = run(&mut cache, &ids);
    cache.withdraw_all(&kv, &[]);
    assert_eq!(cache.hit(&chain(root(), &ids, B), 9), 0);
    cache.release(&mut kv);
    assert_eq!(cache.free(), 8);
    assert_eq!(cache.events().flush(), None, "stored and removed between two flushes: nothing happened");
}

const LOCAL: GroupKind = GroupKind::Window { tokens: 6 };

/// Computes a sequence's tokens, `rows` a step.
fn compute(cache: &mut KvCache, ids: &[u32], rows: usize) -> (SequenceKv, usize) {
    let hashes = chain(root(), ids, B);
    let hit = cache.hit(&hashes, ids.len());
    let mut kv = SequenceKv::default();
    cache.admit(&mut kv, &hashes, hit);
    let mut done = hit * B;
    while done < ids.len() {
        let end = ids.len().min(done + rows);
        assert!(cache.grow(&mut kv, done, end));
        cache.register(&mut kv, root(), &hashes, end, &mut Vec::new());
        done = end;
    }
    (kv, hit)
}

#[test]
fn blocks_that_left_the_window_go_back_and_are_still_found() {
    let mut cache = cache_of(&[GroupKind::Full, LOCAL], 40);
    let ids: Vec<u32> = (0..41).collect();
    let (mut kv, _) = compute(&mut cache, &ids, 4);
    // The last step computed row 40, which sees 35 to 40: blocks 8, 9 and 10.
    assert_eq!((kv.blocks(), kv.dead(0), kv.dead(1)), (11, 0, 8));
    assert_eq!(kv.table(1)[..8], [BlockId::DEAD; 8]);
    assert_eq!((cache.used(), kv.owned_beyond(0)), (11 + 3, 14));
    let hashes = chain(root(), &ids, B);
    // Still running: a second one shares what it needs, also of what was given back.
    assert_eq!(cache.hit(&hashes[..5], 21), 5);
    let mut second = SequenceKv::default();
    cache.admit(&mut second, &hashes, 5);
    // Row 20 sees 15 to 20: block 3 on.
    assert_eq!((second.dead(1), second.owned_beyond(0), cache.used()), (3, 5 + 2, 14 + 2));
    cache.release(&mut second);
    cache.release(&mut kv);
    assert_eq!((cache.used(), cache.hit(&hashes, 41)), (0, 10));
}

#[test]
fn a_hit_is_as_long_as_all_groups_can_go_on_from() {
    let mut cache = cache_of(&[GroupKind::Full, LOCAL, GroupKind::Chunk { tokens: 16 }], 100);
    let ids: Vec<u32> = (0..41).collect();
    let hashes = chain(root(), &ids, B);
    let (mut kv, _) = compute(&mut cache, &ids, 41);
    cache.release(&mut kv);
    let gone = |cache: &mut KvCache, group: usize, i: usize| {
        let block = cache.index().get(&name(group, hashes[i])).unwrap();
        cache.withdraw(Registered { group: group as u32, block });
    };
    assert_eq!(cache.hit(&hashes, 41), 10);
    // The window needs blocks 8 and 9 for row 40, the chunk needs 8 and 9 too (rows 32 on).
    gone(&mut cache, 1, 7);
    gone(&mut cache, 2, 7);
    assert_eq!(cache.hit(&hashes, 41), 10);
    gone(&mut cache, 2, 9);
    // Row 36 is in the chunk from 32 on: block 8. The window wants 31 on: 7 is gone. Row 32 sees 27 on, and 7 again; row 28 is fine.
    assert_eq!(cache.hit(&hashes, 41), 7);
    gone(&mut cache, 2, 5);
    // Row 16 begins a chunk, so nothing of it is needed before; 20 needs block 4 only; 24 and 28 miss block 5.
    assert_eq!(cache.hit(&hashes, 41), 5);
    gone(&mut cache, 0, 1);
    assert_eq!(cache.hit(&hashes, 41), 1, "a full group needs everything");
    gone(&mut cache, 0, 0);
    assert_eq!(cache.hit(&hashes, 41), 0);
}

#[test]
fn all_groups_take_from_one_pool_and_a_window_stops_growing() {
    let mut cache = cache_of(&[GroupKind::Full, LOCAL, LOCAL], 24);
    let ids: Vec<u32> = (0..60).collect();
    let hashes = chain(root(), &ids, B);
    let footprint = Footprint { step_rows: 4, ..cache.footprint().clone() };
    assert_eq!(footprint.peak(60), 15 + 3 + 3);
    cache.footprint = footprint;
    assert!(cache.fits(&hashes, 0, 60, 3) && !cache.fits(&hashes, 0, 60, 4));
    let (mut kv, _) = compute(&mut cache, &ids, 4);
    assert_eq!((cache.used(), cache.still_to_take(&kv, 60)), (15 + 2 * 3, 0));
    assert_eq!(cache.still_to_take(&kv, 80), 5, "full groups grow, windows don't");
    cache.release(&mut kv);
}

#[test]
fn what_was_computed_again_is_evicted_last() {
    let mut cache = cache_of(&[GroupKind::Full, LOCAL], 40);
    let ids: Vec<u32> = (0..17).collect();
    let hashes = chain(root(), &ids, B);
    let (mut kv, _) = compute(&mut cache, &ids, 17);
    cache.release(&mut kv);
    let old = cache.index().get(&name(0, hashes[0])).unwrap();
    // The window lost a block, so everything is computed again although the full group has it.
    for hash in &hashes {
        let block = cache.index().get(&name(1, *hash)).unwrap();
        cache.withdraw(Registered { group: 1, block });
    }
    cache.events().flush();
    let (mut kv, hit) = compute(&mut cache, &ids, 17);
    assert_eq!(hit, 0);
    let new = cache.index().get(&name(0, hashes[0])).unwrap();
    assert_eq!(new, kv.table(0)[0]);
    assert_ne!(new, old);
    assert_eq!(cache.pool().state(old), super::super::BlockState::Free);
    assert_eq!(cache.events().flush(), None, "what can be found has not changed");
    cache.release(&mut kv);
}

#[test]
fn a_failed_sequence_takes_the_names_of_what_it_gave_back_with_it() {
    let mut cache = cache_of(&[LOCAL], 20);
    let ids: Vec<u32> = (0..41).collect();
    let hashes = chain(root(), &ids, B);
    let (mut kv, _) = compute(&mut cache, &ids, 4);
    assert_eq!(cache.hit(&hashes[..3], 13), 3);
    cache.withdraw_all(&kv, &hashes);
    cache.release(&mut kv);
    assert!(cache.index().is_empty());
    assert_eq!(cache.pool().eviction_order().filter(|block| cache.pool().state(*block) == super::super::BlockState::Cached).count(), 0);
}

#[test]
fn a_fork_shares_all_but_the_last_block_while_the_window_is_there() {
    let mut cache = cache_of(&[GroupKind::Full, LOCAL], 40);
    let ids: Vec<u32> = (0..30).collect();
    let (mut kv, _) = compute(&mut cache, &ids, 30);
    let mut fork = SequenceKv::default();
    assert!(cache.can_fork(&kv, 22) && cache.fork(&kv, &mut fork, 22));
    // Row 21 sees 16 to 21: block 4 is shared, 5 is its own.
    assert_eq!((fork.dead(1), fork.blocks(), cache.used()), (4, 6, 16 + 2));
    assert_eq!((&fork.table(0)[..5], fork.table(1)[4]), (&kv.table(0)[..5], kv.table(1)[4]));
    assert!(fork.table(0)[5] != kv.table(0)[5] && fork.table(1)[5] != kv.table(1)[5]);
    assert!(cache.grow(&mut kv, 30, 31));
    assert!(!cache.can_fork(&kv, 22) && !cache.fork(&kv, &mut SequenceKv::default(), 22), "its window has moved on");
    assert!(cache.can_fork(&kv, 30));
    cache.release(&mut fork);
    cache.release(&mut kv);
    assert_eq!(cache.used(), 0);
}
