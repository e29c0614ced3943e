//! How long a stream may be silent.

use std::{future::poll_fn, pin::Pin, task::Poll, time::Duration};

use tokio::time::{Instant, Sleep, sleep};

/// Bounds the silence before each item of a stream. It has one timer for all of them: another one for each item would lock the
/// runtime's timers twice.
#[derive(Debug)]
pub struct Patience {
    limit: Duration,
    /// Ends at the deadline of some earlier item, or at that of this one.
    timer: Pin<Box<Sleep>>,
}

impl Patience {
    /// Nothing may take longer than `limit`.
    pub fn new(limit: Duration) -> Patience {
        Patience { limit, timer: Box::pin(sleep(limit)) }
    }

    /// The longest silence.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Waits for `item`; `None` when it did not come in time. Like a timeout of its own, but for its cost.
    pub async fn wait<F: Future>(&mut self, item: F) -> Option<F::Output> {
        self.wait_by(&mut None, item).await
    }

    /// The same for items that end a silence only together: the first one that has not come yet sets their `deadline`.
    pub async fn wait_by<F: Future>(&mut self, deadline: &mut Option<Instant>, item: F) -> Option<F::Output> {
        let mut item = std::pin::pin!(item);
        poll_fn(|context| {
            if let Poll::Ready(item) = item.as_mut().poll(context) {
                return Poll::Ready(Some(item));
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.limit);
            while self.timer.as_mut().poll(context).is_ready() {
                if self.timer.deadline() >= deadline {
                    return Poll::Ready(None);
                }
                self.timer.as_mut().reset(deadline);
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    /// Holds on a machine that is late: an item that has come is taken, however late.
    #[tokio::test]
    async fn each_item_has_the_whole_time() {
        let [limit, item] = [50, 30].map(Duration::from_millis);
        let mut patience = Patience::new(limit);
        let began = Instant::now();
        for _ in 0..4 {
            assert_eq!(patience.wait(sleep(item)).await, Some(()));
        }
        assert!(began.elapsed() >= item * 4);
        for _ in 0..2 {
            let began = Instant::now();
            assert_eq!(patience.wait(pending::<()>()).await, None);
            assert!(began.elapsed() >= limit);
        }
        assert_eq!(patience.wait(async { 7 }).await, Some(7));
    }

    #[tokio::test]
    async fn items_with_one_deadline_have_the_time_together() {
        let [limit, item] = [50, 30].map(Duration::from_millis);
        let mut patience = Patience::new(limit);
        for _ in 0..2 {
            let (began, mut deadline, mut num_items) = (Instant::now(), None, 0);
            while num_items < 20 && patience.wait_by(&mut deadline, sleep(item)).await.is_some() {
                num_items += 1;
            }
            assert!(began.elapsed() >= limit && num_items < 20);
        }
    }
}
