//! What happens next. Events of the same moment happen in the order in which they were added, so a run is the same every time.

use std::{cmp::Ordering, collections::BinaryHeap};

use crate::time::SimTime;

/// Events in the order of their time.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    num_pushed: u64,
    now: SimTime,
}

#[derive(Debug)]
struct Entry<E> {
    at: SimTime,
    number: u64,
    event: E,
}

impl<E> Default for EventQueue<E> {
    fn default() -> EventQueue<E> {
        EventQueue { heap: BinaryHeap::new(), num_pushed: 0, now: SimTime(0) }
    }
}

impl<E> EventQueue<E> {
    /// The time of the newest event that was popped.
    pub(crate) fn now(&self) -> SimTime {
        self.now
    }

    /// An event at a moment; at once, if that is over.
    pub(crate) fn push(&mut self, at: SimTime, event: E) {
        let entry = Entry { at: at.max(self.now), number: self.num_pushed, event };
        self.num_pushed += 1;
        self.heap.push(entry);
    }

    /// The next event; time goes on to it.
    pub(crate) fn pop(&mut self) -> Option<E> {
        let entry = self.heap.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }

    /// Events that wait.
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    /// Events that were popped or wait.
    pub(crate) fn num_pushed(&self) -> u64 {
        self.num_pushed
    }
}

impl<E> Ord for Entry<E> {
    /// The heap gives the greatest first: that is the earliest.
    fn cmp(&self, other: &Entry<E>) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Entry<E>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Entry<E>) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_in_the_order_in_which_they_were_added() {
        let mut queue = EventQueue::default();
        for (at, event) in [(5, 'a'), (3, 'b'), (5, 'c'), (3, 'd')] {
            queue.push(SimTime(at), event);
        }
        assert_eq!((queue.pop(), queue.pop(), queue.now()), (Some('b'), Some('d'), SimTime(3)));
        queue.push(SimTime(1), 'e');
        let rest: Vec<char> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(rest, ['e', 'a', 'c'], "what is late happens at once");
        assert_eq!(queue.now(), SimTime(5));
    }
}
