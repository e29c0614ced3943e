//! What the search chooses.

/// Workers, and how they compute.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Deployment {
    pub(super) tensor_parallel: usize,
    pub(super) num_prefill: usize,
    pub(super) num_decode: usize,
    pub(super) token_budget: usize,
    pub(super) max_running: usize,
    /// Tokens of each worker's share of host memory for KV, if there is any.
    pub(super) host_tokens: Option<usize>,
}

impl Deployment {
    /// Who does what, whatever the limits of a step.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.tensor_parallel, self.num_prefill)
    }

    pub(super) fn describe(&self, num_gpus: usize) -> String {
        let Deployment { tensor_parallel, num_prefill, num_decode, token_budget, max_running, .. } = self;
        let idle = num_gpus - tensor_parallel * (num_prefill + num_decode);
        let idle = if idle > 0 { format!("; left over: {idle}") } else { String::new() };
        let gpus = if *tensor_parallel == 1 { "one GPU".into() } else { format!("{tensor_parallel} GPUs") };
        format!(
            "{num_prefill} prefill and {num_decode} decode workers of {gpus} each, token budget \
             {token_budget}, {max_running} sequences at a time{idle}"
        )
    }
}
