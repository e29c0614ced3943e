//! The order in which the requests of a load are sent. It knows neither their lengths nor their prompts.

use std::{collections::VecDeque, iter};

use super::workload::Planned;

/// The requests of a load that are still to be sent.
pub(crate) struct Plan {
    listed: VecDeque<Planned>,
    /// What follows them if only time ends the load. It has no planned times.
    endless: Option<Box<dyn Iterator<Item = Planned> + Send>>,
}

impl Plan {
    /// These and no others.
    pub(crate) fn of(requests: Vec<Planned>) -> Self {
        Self { listed: requests.into(), endless: None }
    }

    /// As many as time allows, made one by one.
    pub(crate) fn endless(requests: impl Iterator<Item = Planned> + Send + 'static) -> Self {
        Self { listed: VecDeque::new(), endless: Some(Box::new(requests)) }
    }

    /// `None`: only time ends the load.
    pub(crate) fn num_left(&self) -> Option<usize> {
        self.endless.is_none().then_some(self.listed.len())
    }

    /// The first requests: `num` of an endless plan, all of a list.
    pub(crate) fn first(&mut self, num: usize) -> impl Iterator<Item = &Planned> {
        if let Some(endless) = &mut self.endless {
            let num_missing = num.saturating_sub(self.listed.len());
            self.listed.extend(endless.by_ref().take(num_missing));
        }
        self.listed.iter()
    }

    /// Whether the requests have planned times (an open loop).
    pub(crate) fn is_timed(&self) -> bool {
        self.listed.front().is_some_and(|planned| planned.at.is_some())
    }
}

impl Iterator for Plan {
    type Item = Planned;

    fn next(&mut self) -> Option<Planned> {
        self.listed.pop_front().or_else(|| self.endless.as_mut()?.next())
    }
}

/// Each wave of requests twice, once to either target, with different text (see also [`Planned::for_target`]): the second
/// must not profit from the first one's prefix cache.
pub(crate) fn twice(
    mut requests: impl Iterator<Item = Planned> + Send,
    num_per_wave: usize,
) -> impl Iterator<Item = Planned> + Send {
    let waves = iter::from_fn(move || {
        let wave: Vec<Planned> = requests.by_ref().take(num_per_wave).collect();
        (!wave.is_empty()).then(|| [wave.clone(), wave].concat())
    });
    waves.flatten().enumerate().map(|(idx, planned)| Planned { id: idx as u64, ..planned })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Lengths, Synthetic};

    #[test]
    fn each_wave_comes_twice_with_other_ids() {
        let requests = Synthetic::new(None, Lengths::Uniform(1, 1000), Lengths::Fixed(1), 1);
        let lengths: Vec<usize> = requests.clone().take(5).map(|planned| planned.input_tokens).collect();
        let plan: Vec<Planned> = twice(requests.take(5), 3).collect();
        let expected = [&lengths[..3], &lengths[..3], &lengths[3..], &lengths[3..]].concat();
        assert_eq!(plan.iter().map(|planned| planned.input_tokens).collect::<Vec<_>>(), expected);
        assert!(plan.iter().map(|planned| planned.id).eq(0..10));
    }

    #[test]
    fn a_look_at_the_first_requests_takes_none() {
        let requests = Synthetic::new(None, Lengths::Fixed(1), Lengths::Fixed(1), 1);
        let mut plan = Plan::endless(requests);
        assert_eq!(plan.first(3).count(), 3);
        assert_eq!(plan.num_left(), None);
        assert!(plan.take(5).map(|planned| planned.id).eq(0..5));
    }
}
