//! How a thread polls for an event that does not wake it, such as the end of a device's copy. Small transfers end in
//! microseconds, so it polls without a pause at first. Large transfers must not cost a core, so it pauses later.

use std::{thread, time::Duration};

/// The number of polls without a pause, and the length of the pauses afterwards.
const NUM_SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(50);

/// See above.
#[derive(Debug, Default)]
pub struct Pace {
    num_idle: u32,
}

impl Pace {
    /// Starts again without pauses: an event has happened, and more may follow soon.
    pub fn moved(&mut self) {
        self.num_idle = 0;
    }

    /// How long to wait before the next poll, after a poll without an event.
    pub fn pause(&mut self) -> Duration {
        self.num_idle = self.num_idle.saturating_add(1);
        if self.num_idle > NUM_SPINS { PAUSE } else { Duration::ZERO }
    }

    /// Waits until the next poll.
    pub fn wait(&mut self) {
        match self.pause() {
            Duration::ZERO => thread::yield_now(),
            pause => thread::sleep(pause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_begin_when_nothing_has_happened_for_long() {
        let mut pace = Pace::default();
        let num_looks = |pace: &mut Pace| (0..).take_while(|_| pace.pause().is_zero()).count();
        assert_eq!(num_looks(&mut pace), NUM_SPINS as usize);
        assert_eq!(pace.pause(), PAUSE);
        pace.moved();
        assert_eq!(num_looks(&mut pace), NUM_SPINS as usize);
    }
}
