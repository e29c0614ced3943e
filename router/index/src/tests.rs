//! The index as a whole.

use std::{
    collections::BTreeSet,
    iter,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    BatchKind, BlockKey, CacheEvent, CacheFeed, CacheLevel, CacheSource, EventBatch, FeedError, Holder,
    KvIndex, SourceState, testing,
};

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn chain(seed: u64, num: usize) -> Vec<BlockKey> {
    let mut state = seed;
    (0..num).map(|_| BlockKey(random(&mut state))).collect()
}

fn stored(parent: Option<BlockKey>, blocks: &[BlockKey]) -> CacheEvent {
    CacheEvent::stored(parent, blocks.to_vec())
}

fn events(first: u64, events: Vec<CacheEvent>) -> EventBatch {
    EventBatch { first, events, kind: BatchKind::Events }
}

fn dump(first: u64, events: Vec<CacheEvent>) -> EventBatch {
    EventBatch { first, events, kind: BatchKind::DumpEnd }
}

fn held(index: &KvIndex, chain: &[BlockKey]) -> Vec<(u32, usize)> {
    let mut holders: Vec<_> = index
        .lookup(chain, |key| key)
        .into_iter()
        .map(|Holder { owner, num_blocks }| (owner, num_blocks))
        .collect();
    holders.sort_unstable();
    holders
}

#[test]
fn any_stream_of_events_leads_to_what_a_plain_model_holds() {
    let mut state = 18;
    for _ in 0..400 {
        let script: Vec<u8> = (0..400).map(|_| random(&mut state) as u8).collect();
        testing::check(&script);
        testing::check_nonsense(&script);
        testing::check_beliefs(&script);
    }
}

#[test]
fn writers_at_the_same_time_leave_what_each_of_them_said() {
    // Four prompts that diverge after 10, 20 and 30 blocks.
    let trunk = chain(1, 60);
    let prompts: Vec<Vec<BlockKey>> =
        (0..4).map(|idx| [&trunk[..10 + 10 * idx], &chain(10 + idx as u64, 20)].concat()).collect();
    let num_held = |prompt: &[BlockKey], held: &BTreeSet<BlockKey>| {
        prompt.iter().take_while(|key| held.contains(*key)).count()
    };
    let write = |index: &Arc<KvIndex>, owner: u32, mut state: u64| {
        let mut feed = CacheFeed::new(index.clone(), owner, 1000);
        let (mut held, mut number) = (BTreeSet::new(), 0);
        for _ in 0..400 {
            let prompt = &prompts[random(&mut state) as usize % prompts.len()];
            let first = random(&mut state) as usize % prompt.len();
            let num_held = num_held(prompt, &held);
            let event = if random(&mut state).is_multiple_of(2) {
                let blocks = &prompt[num_held..first.max(num_held)];
                held.extend(blocks);
                stored(num_held.checked_sub(1).map(|last| prompt[last]), blocks)
            } else {
                let blocks: Vec<BlockKey> =
                    prompt[first.min(num_held)..num_held].iter().rev().copied().collect();
                held.retain(|key| !blocks.contains(key));
                CacheEvent::removed(blocks)
            };
            feed.take(&events(number, vec![event])).unwrap();
            number += 1;
        }
        (feed, held)
    };
    for round in 0..150 {
        let index = Arc::new(KvIndex::new(8));
        let done: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|owner| {
                    let (index, write) = (&index, &write);
                    scope.spawn(move || write(index, owner, 100 * round + u64::from(owner)))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for prompt in &prompts {
            let all = (0..).zip(done.iter().map(|(_, held)| num_held(prompt, held)));
            let expected: Vec<_> = all.filter(|&(_, num)| num > 0).collect();
            assert_eq!(held(&index, prompt), expected, "round {round}");
        }
        drop(done);
        index.sweep(usize::MAX);
        assert_eq!((index.size().num_blocks, index.size().num_memberships), (0, 0));
    }
}

#[test]
fn a_thousand_workers_hold_prefixes_of_any_length() {
    let index = Arc::new(KvIndex::new(2000));
    let prompt = chain(1, 3000);
    let mut feeds = Vec::new();
    let mut expected = Vec::new();
    let mut state = 3;
    for owner in 0..1000 {
        let mut feed = CacheFeed::new(index.clone(), owner, 4000);
        let num = match owner % 4 {
            0 => 125,
            1 => 126 + (random(&mut state) % 2800) as usize,
            2 => 3000,
            _ => 0,
        };
        let other = chain(u64::from(owner) + 100, 20);
        feed.take(&events(0, vec![stored(None, &other), stored(None, &prompt[..num.max(1)])])).unwrap();
        if num == 0 {
            feed.take(&events(2, vec![CacheEvent::removed(prompt[..1].to_vec())])).unwrap();
        } else {
            expected.push((owner, num));
        }
        feeds.push(feed);
    }
    assert_eq!(held(&index, &prompt), expected);
    assert_eq!(held(&index, &prompt[..1]), expected.iter().map(|&(owner, _)| (owner, 1)).collect::<Vec<_>>());
    assert_eq!(held(&index, &[]), []);
    assert_eq!(held(&index, &chain(2, 500)), []);

    // A dead worker's entries go at once, swept or not.
    feeds.retain(|feed| feed.num_blocks() < 3000);
    expected.retain(|&(_, num)| num < 3000);
    assert!(!index.is_swept());
    assert_eq!(held(&index, &prompt), expected);
    while !index.is_swept() {
        index.sweep(10_000);
        assert_eq!(held(&index, &prompt), expected);
    }
    drop(feeds);
    index.sweep(usize::MAX);
    assert_eq!(index.size().num_memberships, 0);
}

#[test]
fn a_worker_with_tiers_tells_what_its_pool_has_of_it() {
    let index = Arc::new(KvIndex::new(8));
    let source = CacheSource::new(&index, 7, 10);
    let (prompt, sent) = (chain(5, 30), chain(6, 4));
    let tokens_held = |chain: &[BlockKey]| {
        let found = index.tokens_held(iter::once((16, chain)), |key| key);
        found.get(&7).map(|held| (held.num_tokens / 16, held.above[0] / 16))
    };
    let pooled = |blocks: &[BlockKey]| stored(None, blocks).at(CacheLevel::POOL);
    // More than its pool, and no more than pool and tiers together. Nothing is in the pool.
    let said = source.report(Some(dump(0, vec![stored(None, &prompt), pooled(&[])])), [20, 0]);
    assert_eq!((said.news, source.state(), source.num_tiers()), (None, SourceState::Exact, 1));
    assert_eq!(tokens_held(&prompt), Some((30, 0)));
    let unpooled = CacheEvent::removed(prompt[4..8].to_vec()).at(CacheLevel::POOL);
    source.report(Some(events(0, vec![pooled(&prompt[..8]), unpooled])), [20, 0]);
    assert_eq!(tokens_held(&prompt), Some((30, 4)));
    // What is sent to it will be in its pool.
    source.expect(sent.iter().copied());
    assert_eq!(tokens_held(&sent), Some((4, 4)));
    source.report(Some(events(2, vec![CacheEvent::removed(prompt[2..].to_vec())])), [20, 0]);
    assert_eq!(tokens_held(&prompt).map(|(num, _)| num), Some(4), "the pool still has them, as it says");
    // The pool's own room is that of a pool.
    let said = source.report(Some(events(3, vec![stored(None, &prompt), pooled(&prompt)])), [20, 0]);
    assert!(matches!(said.news, Some(FeedError::Refused { num: 20, .. })), "{said:?}");
    // A dump is all there is.
    let silent = source.report(Some(dump(9, vec![stored(None, &prompt[..3])])), [0, 0]);
    assert_eq!((silent.news, source.num_tiers(), tokens_held(&prompt)), (None, 0, Some((3, 0))));
    drop(source);
    index.sweep(usize::MAX);
    assert_eq!(index.size().num_memberships, 0);
}

#[test]
fn a_worker_with_two_tiers_tells_them_apart() {
    let index = Arc::new(KvIndex::new(8));
    let source = CacheSource::new(&index, 7, 10);
    let prompt = chain(5, 30);
    let tokens_held = || {
        let found = index.tokens_held(iter::once((16, &prompt[..])), |key| key);
        found.get(&7).map(|held| (held.num_tokens / 16, held.above.map(|num| num / 16)))
    };
    let in_memory = CacheLevel::above(1);
    let all = stored(None, &prompt);
    let of_each =
        vec![all, stored(None, &prompt[..3]).at(CacheLevel::POOL), stored(None, &prompt[..9]).at(in_memory)];
    let said = source.report(Some(dump(0, of_each)), [20, 40]);
    assert_eq!((said.news, source.state(), source.num_tiers()), (None, SourceState::Exact, 2));
    assert_eq!(tokens_held(), Some((30, [3, 9])));
    // What is in the pool is in memory, and all of it is cached.
    source.expect(prompt[..10].iter().copied());
    assert_eq!(tokens_held(), Some((30, [10, 10])));
    // Pool and memory have room for 30 blocks together.
    let other = chain(6, 30);
    let said = source.report(Some(events(0, vec![stored(None, &other).at(in_memory)])), [20, 40]);
    assert!(matches!(said.news, Some(FeedError::Refused { num: 9, .. })), "{said:?}");
    // Another level than there can be.
    let said = source.report(Some(events(1, vec![stored(None, &other).at(CacheLevel(9))])), [20, 40]);
    assert_eq!((said.news, source.num_tiers()), (None, 2));
    drop(source);
    index.sweep(usize::MAX);
    assert_eq!(index.size().num_memberships, 0);
}

#[test]
fn a_missing_block_hides_what_follows_until_it_is_stored_again() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 7, 100);
    let prompt = chain(5, 10);
    let branch = chain(6, 3);
    feed.take(&events(0, vec![stored(None, &prompt), stored(Some(prompt[4]), &branch)])).unwrap();
    let other = [&prompt[..5], &branch].concat();
    assert_eq!((held(&index, &prompt), held(&index, &other)), (vec![(7, 10)], vec![(7, 8)]));
    feed.take(&events(2, vec![CacheEvent::removed(vec![prompt[3]])])).unwrap();
    assert_eq!((held(&index, &prompt), held(&index, &other)), (vec![(7, 3)], vec![(7, 3)]));
    assert_eq!(feed.num_blocks(), 12);
    feed.take(&events(3, vec![stored(Some(prompt[2]), &prompt[3..4])])).unwrap();
    assert_eq!((held(&index, &prompt), held(&index, &other)), (vec![(7, 10)], vec![(7, 8)]));
    // What comes before its beginning waits for it.
    let late = chain(8, 4);
    feed.take(&events(4, vec![stored(Some(late[1]), &late[2..])])).unwrap();
    assert_eq!(held(&index, &late), []);
    feed.take(&events(5, vec![stored(None, &late[..2])])).unwrap();
    assert_eq!(held(&index, &late), [(7, 4)]);
}

#[test]
fn a_gap_degrades_a_source_until_what_is_missing_or_a_dump_comes() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 1, 100);
    assert_eq!((feed.state(), feed.resume_from()), (SourceState::Approximate, None));
    let (a, b, c) = (chain(1, 4), chain(2, 4), chain(3, 4));
    assert_eq!(feed.take(&events(5, vec![stored(None, &a)])), Err(FeedError::NoBeginning { first: 5 }));
    assert_eq!(feed.state(), SourceState::Approximate);
    feed.take(&dump(5, vec![stored(None, &a)])).unwrap();
    assert_eq!((feed.state(), feed.resume_from()), (SourceState::Exact, Some(5)));

    let gap = feed.take(&events(6, vec![stored(None, &c)])).unwrap_err();
    assert_eq!(gap, FeedError::Gap { expected: 5, first: 6 });
    assert!(gap.wants_replay());
    assert_eq!((feed.state(), feed.resume_from()), (SourceState::Degraded, Some(5)));
    assert_eq!((held(&index, &a), held(&index, &c)), (vec![(1, 4)], vec![]));
    // The replay, with something that is known already.
    feed.take(&events(4, vec![stored(None, &a), stored(None, &b), stored(None, &c)])).unwrap();
    assert_eq!((feed.state(), feed.resume_from()), (SourceState::Exact, Some(7)));
    assert_eq!((held(&index, &b), held(&index, &c)), (vec![(1, 4)], vec![(1, 4)]));

    feed.take(&events(9, vec![stored(None, &c)])).unwrap_err();
    feed.take(&events(9, vec![stored(None, &c)])).unwrap_err();
    assert_eq!(feed.resume_from(), None, "asked once in vain: a dump is needed");
    let part = EventBatch { kind: BatchKind::DumpPart, ..dump(12, vec![stored(None, &a[..2])]) };
    feed.take(&part).unwrap();
    assert_eq!(feed.state(), SourceState::Degraded, "a part is not the whole");
    feed.take(&dump(12, vec![stored(Some(a[1]), &a[2..])])).unwrap();
    assert_eq!((feed.state(), feed.resume_from()), (SourceState::Exact, Some(12)));
    assert_eq!((held(&index, &a), held(&index, &b)), (vec![(1, 4)], vec![]));
}

#[test]
fn a_dump_that_broke_off_is_no_part_of_the_next_one() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 1, 100);
    let (a, b) = (chain(1, 4), chain(2, 4));
    let part = EventBatch { kind: BatchKind::DumpPart, ..dump(12, vec![stored(None, &a)]) };
    feed.take(&part).unwrap();
    // The stream ended. Meanwhile the worker has evicted the first prompt.
    feed.take(&dump(20, vec![stored(None, &b)])).unwrap();
    assert_eq!((feed.state(), feed.resume_from()), (SourceState::Exact, Some(20)));
    assert_eq!((held(&index, &a), held(&index, &b)), (vec![], vec![(1, 4)]));
}

#[test]
fn a_worker_that_holds_more_than_its_pool_is_not_exact() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 1, 10);
    let prompt = chain(1, 12);
    let refused = feed.take(&events(0, vec![stored(None, &prompt)])).unwrap_err();
    assert_eq!(refused, FeedError::Refused { num: 2, max: 10 });
    assert!(!refused.wants_replay());
    assert_eq!(held(&index, &prompt), [(1, 10)]);
    feed.take(&events(1, vec![CacheEvent::removed(prompt[5..].to_vec())])).unwrap();
    assert_eq!(feed.state(), SourceState::Degraded);
    feed.take(&dump(2, vec![stored(None, &prompt[..5])])).unwrap();
    assert_eq!(feed.state(), SourceState::Exact);
}

#[test]
fn a_silent_worker_is_believed_to_hold_what_was_sent_to_it_last() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 1, 8);
    let (a, b, c) = (chain(1, 6), chain(2, 4), chain(3, 16));
    feed.expect(a.iter().copied()).unwrap();
    feed.expect(b.iter().copied()).unwrap();
    assert_eq!((held(&index, &a), held(&index, &b)), (vec![(1, 4)], vec![(1, 4)]), "the end goes first");
    for _ in 0..100 {
        feed.expect(b.iter().copied()).unwrap();
        feed.on_report();
    }
    assert_eq!(held(&index, &a), [(1, 4)], "reuse of others evicts nothing");
    feed.finished(c.iter().copied()).unwrap();
    assert_eq!(held(&index, &c), [(1, 8)], "of a long prompt, its beginning");
    assert_eq!(feed.state(), SourceState::Approximate);
}

#[test]
fn what_was_sent_is_believed_until_events_or_some_reports_have_come() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 1, 100);
    let (a, b) = (chain(1, 6), chain(2, 4));
    feed.expect(b.iter().copied()).unwrap();
    feed.take(&dump(0, vec![])).unwrap();
    assert_eq!(held(&index, &b), [], "it says what it holds");
    feed.expect(a.iter().copied()).unwrap();
    feed.expect(b.iter().copied()).unwrap();
    feed.on_report();
    feed.finished(a.iter().copied()).unwrap();
    assert_eq!((held(&index, &a), held(&index, &b)), (vec![(1, 6)], vec![(1, 4)]));
    for _ in 0..3 {
        feed.on_report();
    }
    assert_eq!((held(&index, &a), held(&index, &b)), (vec![], vec![(1, 4)]));
    for _ in 0..64 {
        feed.on_report();
    }
    assert_eq!((held(&index, &b), index.size().num_blocks), (vec![], 0));
    assert_eq!(feed.state(), SourceState::Exact);
}

#[test]
fn what_was_sent_to_a_full_pool_between_two_reports_is_not_believed_for_ever() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 1, 8);
    feed.take(&dump(0, vec![])).unwrap();
    let (a, b) = (chain(1, 6), chain(2, 6));
    feed.expect(a.iter().copied()).unwrap();
    feed.expect(b.iter().copied()).unwrap();
    assert_eq!((held(&index, &a), held(&index, &b)), (vec![(1, 2)], vec![(1, 6)]), "the older makes room");
    // What ends sooner than all others does not make room for itself.
    let answered = [&a[..2], &chain(3, 5)].concat();
    feed.finished(answered.iter().copied()).unwrap();
    assert_eq!((held(&index, &answered), held(&index, &b)), (vec![(1, 7)], vec![(1, 1)]));
    (0..70).for_each(|_| feed.on_report());
    assert_eq!((held(&index, &a), held(&index, &b), feed.num_blocks()), (vec![], vec![], 0));
    assert_eq!(index.size().num_memberships, 0);
    feed.expect(a.iter().copied()).unwrap();
    assert_eq!(held(&index, &a), [(1, 6)], "what is sent later is believed");
}

#[test]
fn what_finishes_does_not_end_the_belief_in_the_beginning_of_another_prompt_on_its_way() {
    let index = Arc::new(KvIndex::new(4));
    let mut feed = CacheFeed::new(index.clone(), 1, 100);
    feed.take(&dump(0, vec![])).unwrap();
    let [a, b] = [11, 12].map(|seed| [&chain(1, 3)[..], &chain(seed, 4)].concat());
    feed.expect(a.iter().copied()).unwrap();
    feed.expect(b.iter().copied()).unwrap();
    feed.finished(a.iter().copied()).unwrap();
    (0..60).for_each(|_| feed.on_report());
    assert_eq!((held(&index, &a), held(&index, &b)), (vec![(1, 3)], vec![(1, 7)]));
    feed.finished(b.iter().copied()).unwrap();
    (0..3).for_each(|_| feed.on_report());
    assert_eq!((held(&index, &b), index.size().num_blocks), (vec![], 0));
}

#[test]
fn numbers_of_workers_that_are_gone_are_given_again_and_never_mistaken() {
    let index = Arc::new(KvIndex::new(3));
    let prompt = chain(1, 50);
    for owner in 0..100 {
        let mut feed = CacheFeed::new(index.clone(), owner, 100);
        feed.take(&events(0, vec![stored(None, &prompt)])).unwrap();
        assert_eq!(held(&index, &prompt), [(owner, 50)]);
    }
    let mut feeds: Vec<_> = (0..3).map(|owner| CacheFeed::new(index.clone(), owner, 100)).collect();
    for feed in &mut feeds {
        feed.take(&events(0, vec![stored(None, &prompt)])).unwrap();
    }
    let mut fourth = CacheFeed::new(index.clone(), 3, 100);
    assert!(matches!(fourth.take(&events(0, vec![stored(None, &prompt)])), Err(FeedError::Full(_))));
    assert_eq!(fourth.state(), SourceState::Approximate);
    drop(feeds);
    fourth.take(&events(0, vec![stored(None, &prompt)])).unwrap();
    assert_eq!(held(&index, &prompt), [(3, 50)]);
}

#[test]
fn a_long_run_of_stores_and_removals_does_not_grow() {
    let index = Arc::new(KvIndex::new(8));
    let mut feeds: Vec<_> = (0..4).map(|owner| CacheFeed::new(index.clone(), owner, 2000)).collect();
    let mut most = 0;
    for round in 0..300_u64 {
        for (idx, feed) in feeds.iter_mut().enumerate() {
            // Of four prompts that all store and remove, each at another time.
            let prompt = chain(round + 3 - idx as u64, 400);
            let next = feed.resume_from().unwrap_or(0);
            let old = chain(round.wrapping_sub(idx as u64), 400);
            let batch = vec![stored(None, &prompt), CacheEvent::removed(old.into_iter().rev().collect())];
            feed.take(&events(next, batch)).unwrap();
        }
        let size = index.size();
        if round == 30 {
            most = size.num_bytes * 2;
        }
        assert!(round < 30 || size.num_bytes <= most, "{round}: {size:?} above {most}");
    }
}

#[test]
fn readers_see_what_is_always_there_while_everything_else_changes() {
    let index = Arc::new(KvIndex::new(64));
    let prompt = chain(1, 500);
    let mut steady: Vec<_> = (0..5).map(|owner| CacheFeed::new(index.clone(), owner, 1000)).collect();
    for (idx, feed) in steady.iter_mut().enumerate() {
        feed.take(&events(0, vec![stored(None, &prompt[..100 * (idx + 1)])])).unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..400_u32 {
                let mut feed = CacheFeed::new(index.clone(), 100 + round, 3000);
                let own = chain(u64::from(round) + 50, 800);
                feed.take(&events(0, vec![stored(None, &prompt), stored(None, &own)])).unwrap();
                if round % 2 == 0 {
                    let blocks = prompt.iter().rev().copied().collect();
                    feed.take(&events(2, vec![CacheEvent::removed(blocks)])).unwrap();
                }
            }
            done.store(true, Ordering::Release);
        });
        let mut num = 0;
        while !done.load(Ordering::Acquire) || num == 0 {
            let mut holders = held(&index, &prompt);
            holders.retain(|&(owner, _)| owner < 100);
            assert_eq!(holders, [(0, 100), (1, 200), (2, 300), (3, 400), (4, 500)]);
            num += 1;
        }
    });
}
