//! Settings of a policy: those that the flags name, and the grid that `--tune` tries.

use super::args::{ParsedPolicy, SimulateArgs};
use crate::{
    cluster::PolicyName,
    policies::{Baseline, BaselineChoice},
};

/// One setting.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Variant {
    pub(super) policy: ParsedPolicy,
    pub(super) num_prefill: usize,
    pub(super) num_decode: usize,
    pub(super) token_budget: usize,
}

/// Token budgets of steps.
const BUDGETS: [usize; 3] = [512, 2048, 8192];
/// Shares of the workers that compute prompts, in eighths.
const PREFILL_EIGHTHS: [usize; 5] = [2, 3, 4, 5, 6];
const IMBALANCES: [f64; 3] = [1.25, 2.0, 4.0];

impl Variant {
    /// What the flags say. Where prompts are not separated, every worker serves whole requests.
    pub(super) fn of_args(args: &SimulateArgs, policy: &ParsedPolicy) -> Variant {
        let (num_prefill, num_decode) = match is_colocated(policy) {
            true => (0, args.prefill + args.decode),
            false => (args.prefill, args.decode),
        };
        Variant { policy: policy.clone(), num_prefill, num_decode, token_budget: args.token_budget }
    }

    pub(super) fn name(&self) -> String {
        let Variant { policy, num_prefill, num_decode, token_budget } = self;
        let parameter = match policy.policy {
            PolicyName::Baseline(Baseline {
                choice: BaselineChoice::PrefixOnly { most_imbalance }, ..
            }) => {
                format!(", imbalance {most_imbalance}")
            }
            _ => String::new(),
        };
        format!("{} {num_prefill}P {num_decode}D, budget {token_budget}{parameter}", policy.name)
    }
}

/// The settings of a policy on so many workers.
pub(super) fn variants(args: &SimulateArgs, policy: &ParsedPolicy, num_workers: usize) -> Vec<Variant> {
    let own = Variant::of_args(args, policy);
    let mut shares: Vec<usize> = match policy.policy {
        PolicyName::Baseline(Baseline { is_separated: false, .. }) => vec![0],
        PolicyName::Baseline(_) => PREFILL_EIGHTHS.map(|share| share * num_workers / 8).into(),
        PolicyName::Baton | PolicyName::Constants => {
            [0].into_iter().chain(PREFILL_EIGHTHS.map(|share| share * num_workers / 8)).collect()
        }
    };
    shares.retain(|&num| num < num_workers && (num > 0 || !is_separated(policy)));
    shares.dedup();
    let policies: Vec<ParsedPolicy> = match policy.policy {
        PolicyName::Baseline(Baseline { choice: BaselineChoice::PrefixOnly { .. }, is_separated }) => {
            let with = |most_imbalance| ParsedPolicy {
                policy: PolicyName::Baseline(Baseline {
                    choice: BaselineChoice::PrefixOnly { most_imbalance },
                    is_separated,
                }),
                ..policy.clone()
            };
            IMBALANCES.map(with).into()
        }
        _ => vec![policy.clone()],
    };
    let mut all = Vec::new();
    for policy in &policies {
        for &num_prefill in &shares {
            for token_budget in BUDGETS {
                let num_decode = num_workers - num_prefill;
                all.push(Variant { policy: policy.clone(), num_prefill, num_decode, token_budget });
            }
        }
    }
    if all.is_empty() { vec![own] } else { all }
}

fn is_colocated(policy: &ParsedPolicy) -> bool {
    matches!(policy.policy, PolicyName::Baseline(Baseline { is_separated: false, .. }))
}

fn is_separated(policy: &ParsedPolicy) -> bool {
    matches!(policy.policy, PolicyName::Baseline(Baseline { is_separated: true, .. }))
}
