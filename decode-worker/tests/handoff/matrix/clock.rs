//! A clock that stops while the machine is paused.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Time during which this process ran: a pause of the whole machine counts as one tick.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(u64);

impl Clock {
    const TICK: Duration = Duration::from_millis(10);

    fn ticks() -> &'static AtomicU64 {
        static TICKS: LazyLock<Arc<AtomicU64>> = LazyLock::new(|| {
            let ticks = Arc::<AtomicU64>::default();
            let counted = Arc::clone(&ticks);
            // Until the process ends.
            std::thread::spawn(move || {
                loop {
                    std::thread::sleep(Clock::TICK);
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            });
            ticks
        });
        &TICKS
    }

    pub(super) fn now() -> Clock {
        Clock(Clock::ticks().load(Ordering::Relaxed))
    }

    pub(super) fn elapsed(self) -> Duration {
        Clock::TICK * (Clock::now().0 - self.0) as u32
    }
}
