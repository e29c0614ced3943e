//! How a thread waits for what nothing wakes it for, such as a device that copies: small transfers end in microseconds,
//! large ones need not cost a core.

use std::{thread, time::Duration};

/// How often it looks without a pause, and how long the pauses are afterwards.
const NUM_SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(50);

/// See above.
#[derive(Debug, Default)]
pub struct Pace {
    num_idle: u32,
}

impl Pace {
    /// Something has happened, and more may soon.
    pub fn moved(&mut self) {
        self.num_idle = 0;
    }

    /// For how long to wait for something else before the next look, when nothing has happened at this one.
    pub fn pause(&mut self) -> Duration {
        self.num_idle = self.num_idle.saturating_add(1);
        if self.num_idle > NUM_SPINS { PAUSE } else { Duration::ZERO }
    }

    /// Waits until the next look.
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
