//! How many prefill workers there are where `--prefill` does not say it. Pure: it is told what the machine has.

/// Processors from which on prompts get a worker of their own by default. Of a model of 1.24 B parameters on two, first tokens then came
/// 1.30 to 1.45 times as late, the others in 0.6 of the time, and the end at 1.00 to 1.05 of it
/// (docs/benchmarks/2026-11-23-planning-live.md). More than two were not measured.
const MIN_PROCESSORS: usize = 4;

/// What the default depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Separation {
    /// GPUs compute, or are simulated.
    pub(super) has_gpu: bool,
    /// The embedded model takes next to nothing, and shows what Baton does.
    pub(super) is_embedded: bool,
    /// A flag says how KV travels between workers.
    pub(super) asks_for_handoffs: bool,
    /// Processors that the workers may use together.
    pub(super) num_processors: usize,
}

impl Separation {
    /// Prefill workers to start.
    pub(super) fn num_prefill(&self) -> usize {
        let shares_few = !self.has_gpu && self.num_processors < MIN_PROCESSORS;
        usize::from(!shares_few || self.is_embedded || self.asks_for_handoffs)
    }

    /// What to say where there is none beside so many decode workers.
    pub(super) fn why_none(&self, num_decode: usize) -> String {
        let processors = if self.num_processors == 1 { "processor" } else { "processors" };
        let workers = if num_decode == 1 { "worker" } else { "workers" };
        format!(
            "no prefill worker: it would share {} {processors} with the decode {workers}, and first tokens would come later; \
             --prefill 1 starts one",
            self.num_processors
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_processors_are_not_shared_unless_a_prefill_worker_is_of_use() {
        let on = |num_processors| Separation {
            has_gpu: false,
            is_embedded: false,
            asks_for_handoffs: false,
            num_processors,
        };
        for (separation, expected) in [
            (on(1), 0),
            (on(2), 0),
            (on(3), 0),
            (on(4), 1),
            (on(64), 1),
            (Separation { has_gpu: true, ..on(2) }, 1),
            (Separation { is_embedded: true, ..on(1) }, 1),
            (Separation { asks_for_handoffs: true, ..on(2) }, 1),
        ] {
            assert_eq!(separation.num_prefill(), expected, "{separation:?}");
        }
        for (num_processors, num_decode, expected) in [
            (1, 1, "share 1 processor with the decode worker,"),
            (2, 1, "share 2 processors with the decode worker,"),
            (2, 2, "share 2 processors with the decode workers,"),
        ] {
            let why = on(num_processors).why_none(num_decode);
            assert!(why.contains(expected), "{why}");
        }
    }
}
