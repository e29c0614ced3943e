//! Passages that no client has marked: sections of a prompt that earlier prompts had, too.
//!
//! - A section is a passage only when it was **seen before**: a passage that no later prompt has costs a computation of its own.
//! - What the prompt has in common with an earlier one **from its beginning** is as it was there: there the prefix cache, or that
//!   of blended heads, has its KV, and another decision would lose it. Seen sections after that are passages only if they have more
//!   than [`MORE_THAN_PREFIX`] times its tokens.
//! - The decision is made once, when the request is prepared; retries have it.

use std::{
    collections::HashMap,
    mem,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use baton_kv_cache::HashRoot;

use crate::sections::sections;

/// Blending computes a prefix again that a cache may have, with all its tokens, and saves most of a passage's, not all.
const MORE_THAN_PREFIX: usize = 2;

/// Sections that are remembered for certain; at most twice as many are. A section is about 65 tokens.
const CAPACITY: usize = 1 << 17;

/// The sections of the newest prompts.
#[derive(Debug)]
pub(crate) struct SeenSections(Mutex<Seen>);

#[derive(Debug)]
struct Seen {
    sections: Recent<()>,
    /// Of each beginning of a prompt that ends with a section: whether that section was a passage.
    beginnings: Recent<bool>,
}

/// What was noted lately.
#[derive(Debug)]
struct Recent<T> {
    newer: HashMap<u64, T>,
    older: HashMap<u64, T>,
    capacity: usize,
}

impl Default for SeenSections {
    fn default() -> SeenSections {
        SeenSections::with_capacity(CAPACITY)
    }
}

impl SeenSections {
    fn with_capacity(capacity: usize) -> SeenSections {
        SeenSections(Mutex::new(Seen { sections: Recent::new(capacity), beginnings: Recent::new(capacity) }))
    }

    /// The passages of a prompt, in order; takes note of its sections. Prompts of different salts have nothing in common.
    pub(crate) fn passages(
        &self,
        salt: &str,
        tokens: &[u32],
        ends_paragraph: impl Fn(usize) -> bool,
    ) -> Vec<Range<usize>> {
        let sections = sections(tokens, ends_paragraph);
        let root = HashRoot::new("", "section", salt).hash();
        let hashes: Vec<u64> =
            sections.iter().map(|section| root.child(&tokens[section.clone()]).short()).collect();
        let mut beginning = root;
        // A section stands in it as its hash, so that each token is hashed once.
        let beginnings: Vec<u64> = hashes
            .iter()
            .map(|&section| {
                beginning = beginning.child(&[section as u32, (section >> 32) as u32]);
                beginning.short()
            })
            .collect();

        // Locked for a few look-ups for each section.
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_passage: Vec<bool> =
            beginnings.iter().map_while(|hash| seen.beginnings.get(*hash)).collect();
        let num_known = is_passage.len();
        is_passage.extend(hashes[num_known..].iter().map(|&hash| seen.sections.get(hash).is_some()));
        // The last token of a prompt is in no passage.
        if let Some(last) = is_passage.last_mut() {
            *last = false;
        }
        let num_tokens = |sections: &[Range<usize>]| sections.iter().map(Range::len).sum::<usize>();
        let found = sections.iter().zip(&is_passage).skip(num_known).filter(|(_, is_passage)| **is_passage);
        let num_found: usize = found.map(|(section, _)| section.len()).sum();
        if num_found <= MORE_THAN_PREFIX * num_tokens(&sections[..num_known]) {
            is_passage[num_known..].fill(false);
        }
        hashes.iter().for_each(|&hash| seen.sections.note(hash, ()));
        beginnings.iter().zip(&is_passage).for_each(|(&hash, &is)| seen.beginnings.note(hash, is));
        drop(seen);
        sections.into_iter().zip(is_passage).filter_map(|(section, is)| is.then_some(section)).collect()
    }
}

impl<T: Copy> Recent<T> {
    fn new(capacity: usize) -> Recent<T> {
        Recent { newer: HashMap::new(), older: HashMap::new(), capacity }
    }

    fn get(&self, hash: u64) -> Option<T> {
        self.newer.get(&hash).or_else(|| self.older.get(&hash)).copied()
    }

    fn note(&mut self, hash: u64, value: T) {
        if self.newer.len() == self.capacity && !self.newer.contains_key(&hash) {
            self.older = mem::take(&mut self.newer);
        }
        self.newer.insert(hash, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends a paragraph.
    const BREAK: u32 = 0;

    /// So many random tokens.
    fn text(seed: u32, num_tokens: usize) -> Vec<u32> {
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        let next = || {
            for shift in [13, -17i32, 5] {
                state ^= if shift > 0 { state << shift } else { state >> -shift };
            }
            1 + state % 30_000
        };
        std::iter::repeat_with(next).take(num_tokens).collect()
    }

    fn find(seen: &SeenSections, salt: &str, tokens: &[u32]) -> Vec<Range<usize>> {
        let passages = seen.passages(salt, tokens, |idx| tokens[idx] == BREAK);
        assert!(passages.windows(2).all(|pair| pair[0].end <= pair[1].start), "{passages:?}");
        assert!(passages.last().is_none_or(|last| last.end < tokens.len()), "{passages:?}");
        passages
    }

    fn num_tokens(passages: &[Range<usize>]) -> usize {
        passages.iter().map(Range::len).sum()
    }

    #[test]
    fn a_text_is_a_passage_when_it_is_met_again_elsewhere_and_by_the_same_tenant() {
        let seen = SeenSections::default();
        let (one, two, question) = (text(1, 600), text(2, 600), text(3, 20));
        let first = [&one[..], &two, &question].concat();
        assert!(find(&seen, "a", &first).is_empty());
        let second = [&two[..], &one, &question].concat();
        assert!(find(&seen, "b", &second).is_empty(), "another tenant learns nothing");
        let passages = find(&seen, "a", &second);
        assert!(num_tokens(&passages) > 700, "{passages:?}");
        for passage in &passages {
            let tokens = &second[passage.clone()];
            assert!(first.windows(tokens.len()).any(|window| window == tokens), "{passage:?}");
        }
        // The same prompt again is blended alike: the cache has the KV of its blended head.
        assert_eq!(find(&seen, "a", &second), passages);
        assert!(find(&seen, "a", &first).is_empty(), "and this one was computed in full");
        for short in [&[][..], &[5], &[5, 5]] {
            assert!(find(&seen, "a", short).is_empty());
        }
    }

    #[test]
    fn a_conversation_that_goes_on_keeps_its_prefix() {
        let seen = SeenSections::default();
        let mut conversation = text(1, 900);
        for turn in 2..9 {
            assert!(find(&seen, "", &conversation).is_empty(), "turn {turn}");
            conversation.extend(text(turn, 200));
        }
        // Neither does a turn that quotes what was said before, less than there is before it.
        let said = conversation[100..800].to_vec();
        conversation.extend(said);
        assert!(find(&seen, "", &conversation).is_empty());

        // The same documents behind a common beginning are passages if there are enough of them.
        let (system, one, two) = (text(20, 200), text(21, 900), text(22, 900));
        assert!(find(&seen, "", &[&system[..], &one, &two, &[1; 9]].concat()).is_empty());
        let passages = find(&seen, "", &[&system[..], &two, &one, &[1; 9]].concat());
        assert!(passages[0].start >= 100 && num_tokens(&passages) > 1000, "{passages:?}");
    }

    #[test]
    fn what_was_seen_is_bounded_and_the_newest() {
        let mut recent = Recent::new(100);
        for hash in 0..1000 {
            recent.note(hash, hash);
            recent.note(hash, hash + 1);
            assert!(recent.newer.len() + recent.older.len() <= 200);
        }
        assert!((900..1000).all(|hash| recent.get(hash) == Some(hash + 1)));
        assert_eq!(recent.get(700), None);
    }

    /// `cargo test -p baton-router-core found_share -- --nocapture`
    #[test]
    fn found_share_of_documents_in_other_orders() {
        const NUM_DOCUMENTS: usize = 40;
        const NUM_IN_PROMPT: usize = 8;
        for (size, paragraph) in [(2048, None), (512, None), (512, Some(90)), (256, Some(40)), (128, None)] {
            let document = |nth: usize| {
                let mut tokens = text(100 + nth as u32, size);
                if let Some(paragraph) = paragraph {
                    tokens.iter_mut().skip(paragraph - 1).step_by(paragraph).for_each(|token| *token = BREAK);
                    *tokens.last_mut().expect("it has tokens") = BREAK;
                }
                tokens
            };
            let documents: Vec<Vec<u32>> = (0..NUM_DOCUMENTS).map(document).collect();
            let seen = SeenSections::default();
            let (mut num_found, mut num_passages, mut num_all) = (0, 0, 0);
            for prompt in 0..100 {
                // Any eight of them in any order: hardly any two follow each other twice.
                let mut order: Vec<usize> = (0..NUM_DOCUMENTS).collect();
                let ranks = text(5000 + prompt, NUM_DOCUMENTS);
                order.sort_by_key(|&nth| ranks[nth]);
                let mut tokens: Vec<u32> = text(1, 30);
                order.iter().take(NUM_IN_PROMPT).for_each(|&nth| tokens.extend(&documents[nth]));
                tokens.extend(text(1000 + prompt, 20));
                let passages = find(&seen, "", &tokens);
                // By then all were met.
                if prompt >= 50 {
                    num_found += num_tokens(&passages);
                    num_passages += passages.len();
                    num_all += NUM_IN_PROMPT * size;
                }
            }
            let share = num_found as f64 / num_all as f64;
            let mean = num_found / num_passages.max(1);
            println!(
                "documents of {size}, paragraphs of {paragraph:?}: {:.1} % found, {mean} tokens each",
                share * 100.0
            );
            assert!(share > if size < 200 { 0.2 } else { 0.6 }, "{size} {paragraph:?}: {share}");
        }
    }
}
