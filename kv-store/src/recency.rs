//! Slots in the order of their use: a doubly linked list in two arrays, so that every change takes constant time.

/// The end of the list.
const NONE: u32 = u32::MAX;

/// Some of the slots of a tier, oldest use first.
#[derive(Debug)]
pub(crate) struct Recency {
    /// Of each slot, the one used before it and the one used after it.
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

impl Recency {
    /// None of `num_slots` slots.
    pub(crate) fn new(num_slots: u32) -> Recency {
        let unlinked = Link { older: NONE, newer: NONE };
        Recency { links: vec![unlinked; num_slots as usize], oldest: NONE, newest: NONE, len: 0 }
    }

    /// Slots in the list.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a slot that is not in the list.
    pub(crate) fn push_newest(&mut self, slot: u32) {
        self.links[slot as usize] = Link { older: self.newest, newer: NONE };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.links[newest as usize].newer = slot,
        }
        self.newest = slot;
        self.len += 1;
    }

    /// Removes a slot that is in the list.
    pub(crate) fn remove(&mut self, slot: u32) {
        let Link { older, newer } = self.links[slot as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.len -= 1;
    }

    /// Removes the slot that was used longest ago.
    pub(crate) fn pop_oldest(&mut self) -> Option<u32> {
        let slot = self.oldest;
        if slot == NONE {
            return None;
        }
        self.remove(slot);
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use baton_random::Random;

    use super::*;

    #[test]
    fn the_list_is_that_of_a_plain_queue() {
        let mut random = Random::new(1);
        let (mut recency, mut queue) = (Recency::new(20), VecDeque::new());
        for _ in 0..10_000 {
            let slot = random.below(20) as u32;
            let place = queue.iter().position(|&queued| queued == slot);
            match (random.below(3), place) {
                (0, _) => assert_eq!(recency.pop_oldest(), queue.pop_front()),
                (_, Some(place)) => {
                    recency.remove(slot);
                    queue.remove(place);
                }
                (_, None) => {
                    recency.push_newest(slot);
                    queue.push_back(slot);
                }
            }
            assert_eq!(recency.len(), queue.len());
        }
    }
}
