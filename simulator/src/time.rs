//! The virtual clock.

use std::{
    fmt,
    ops::{Add, Sub},
};

/// A moment of a simulation, or a span, in nanoseconds since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SimTime(pub u64);

impl SimTime {
    /// So many seconds. What is no number, or negative, is the start.
    pub fn from_seconds(seconds: f64) -> SimTime {
        // A cast of a float saturates, and takes NaN to 0.
        SimTime((seconds * 1e9).round() as u64)
    }

    /// In seconds.
    pub fn seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl Add for SimTime {
    type Output = SimTime;

    fn add(self, other: SimTime) -> SimTime {
        SimTime(self.0.saturating_add(other.0))
    }
}

impl Sub for SimTime {
    type Output = SimTime;

    fn sub(self, other: SimTime) -> SimTime {
        SimTime(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for SimTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} s", self.seconds())
    }
}
