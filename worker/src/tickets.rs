//! Which of a router's requests this worker's load reports count: the numbers that the router gave them, echoed.
//!
//! A request is covered once the engine counts it, or once it is gone. Until then its router counts it itself, so that
//! nothing is counted twice or not at all.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_proto::{v1, worker::Ticket};

/// Routers that are remembered. Of more, the one that sent nothing for longest is forgotten: its requests end by
/// themselves.
const MAX_ROUTERS: usize = 64;
/// Numbers that are remembered for one router, above those that have ended. The lowest is forgotten first.
const MAX_NUMBERS: usize = 4096;

/// The covered requests of every router. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Tickets {
    routers: Arc<Mutex<Routers>>,
}

#[derive(Debug, Default)]
struct Routers {
    by_name: HashMap<u64, Covered>,
    /// Counts uses.
    now: u64,
}

#[derive(Debug, Default)]
struct Covered {
    below: u64,
    numbers: BTreeSet<u64>,
    used: u64,
}

/// A request that no load report counts yet. Dropping it says that reports from now on do, or that the request is gone.
#[derive(Debug)]
pub struct Uncovered {
    tickets: Tickets,
    ticket: Ticket,
}

impl Tickets {
    /// Takes a request's ticket; `None` when its router wants no echo.
    pub fn take(&self, ticket: Option<Ticket>) -> Option<Uncovered> {
        let ticket = ticket.filter(|ticket| ticket.router != 0)?;
        Some(Uncovered { tickets: self.clone(), ticket })
    }

    /// What the next report to this router covers. Read before the load, so that it claims no more than that counts.
    pub(crate) fn covered(&self, router: u64) -> Option<v1::Covered> {
        if router == 0 {
            return None;
        }
        let routers = self.lock();
        let covered = routers.by_name.get(&router);
        Some(covered.map_or_else(v1::Covered::default, |covered| v1::Covered {
            below: covered.below,
            numbers: covered.numbers.iter().copied().collect(),
        }))
    }

    fn cover(&self, ticket: Ticket) {
        let mut routers = self.lock();
        routers.now += 1;
        let now = routers.now;
        if !routers.by_name.contains_key(&ticket.router) && routers.by_name.len() >= MAX_ROUTERS {
            let oldest =
                routers.by_name.iter().min_by_key(|(_, covered)| covered.used).map(|(&name, _)| name);
            oldest.and_then(|name| routers.by_name.remove(&name));
        }
        let covered = routers.by_name.entry(ticket.router).or_default();
        covered.used = now;
        covered.below = covered.below.max(ticket.settled_below);
        covered.numbers = covered.numbers.split_off(&covered.below);
        if ticket.number >= covered.below {
            covered.numbers.insert(ticket.number);
        }
        while covered.numbers.remove(&covered.below) {
            covered.below = covered.below.saturating_add(1);
        }
        if covered.numbers.len() > MAX_NUMBERS {
            covered.numbers.pop_first();
        }
    }

    /// No user code runs under the lock, so a poisoned one holds whole data.
    fn lock(&self) -> MutexGuard<'_, Routers> {
        self.routers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Uncovered {
    fn drop(&mut self) {
        self.tickets.cover(self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(router: u64, number: u64, settled_below: u64) -> Option<Ticket> {
        Some(Ticket { router, number, settled_below })
    }

    fn covered(tickets: &Tickets, router: u64) -> (u64, Vec<u64>) {
        let covered = tickets.covered(router).expect("a router with a name");
        (covered.below, covered.numbers)
    }

    #[test]
    fn a_request_is_covered_when_its_guard_is_dropped_in_whatever_order() {
        let tickets = Tickets::default();
        let mut guards: Vec<_> = (0..4).map(|number| tickets.take(ticket(7, number, 0))).collect();
        assert_eq!(covered(&tickets, 7), (0, vec![]));
        drop(guards.remove(2));
        assert_eq!(covered(&tickets, 7), (0, vec![2]));
        drop(guards.remove(0));
        assert_eq!(covered(&tickets, 7), (1, vec![2]));
        drop(guards.remove(0));
        assert_eq!(covered(&tickets, 7), (3, vec![]));
        assert_eq!(covered(&tickets, 8), (0, vec![]), "another router's");
    }

    #[test]
    fn what_never_arrived_holds_nothing_back() {
        let tickets = Tickets::default();
        drop(tickets.take(ticket(7, 5, 0)));
        assert_eq!(covered(&tickets, 7), (0, vec![5]));
        drop(tickets.take(ticket(7, 9, 8)));
        assert_eq!(covered(&tickets, 7), (8, vec![9]));
        drop(tickets.take(ticket(7, 1, 0)));
        assert_eq!(covered(&tickets, 7), (8, vec![9]), "a late one has ended already");
    }

    #[test]
    fn routers_and_numbers_are_bounded_and_a_reader_without_a_name_gets_no_echo() {
        let tickets = Tickets::default();
        assert!(tickets.take(ticket(0, 1, 0)).is_none() && tickets.take(None).is_none());
        assert_eq!(tickets.covered(0), None);
        for router in 1..=2 * MAX_ROUTERS as u64 {
            drop(tickets.take(ticket(router, u64::MAX, 0)));
        }
        assert_eq!(tickets.lock().by_name.len(), MAX_ROUTERS);
        assert_eq!(covered(&tickets, 1), (0, vec![]), "the oldest is forgotten");
        for number in 0..2 * MAX_NUMBERS as u64 {
            drop(tickets.take(ticket(500, 2 * number + 1, 0)));
        }
        assert_eq!(tickets.lock().by_name[&500].numbers.len(), MAX_NUMBERS);
    }
}
