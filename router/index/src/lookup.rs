//! How much of a prompt each worker holds.
//!
//! A prompt is followed from run to run: within a run, blocks that are the same are found by halving. Who holds a run holds what
//! it begins after. So the members of later runs are named first, and a run with no other members than those is passed over.

use baton_kv_events::BlockKey;

use crate::{
    index::KvIndex,
    run::{Mark, Run, Spot},
    runs::shard_of,
    table::KeyHash,
};

/// A worker that holds the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Whose it is, as it was told when its source joined.
    pub owner: u32,
    /// Blocks at the front that it holds; not 0.
    pub num_blocks: usize,
}

/// Memory for lookups; used again, a lookup allocates nothing.
#[derive(Debug, Default)]
pub struct LookupScratch {
    path: Vec<Step>,
    /// Members that were found, by number.
    found: Vec<u64>,
}

/// A run on the way of a prompt.
#[derive(Clone, Copy, Debug)]
struct Step {
    run: u32,
    serial: u64,
    /// Where the run begins in the prompt, and how many of its blocks are the prompt's.
    first: usize,
    num: usize,
}

impl KvIndex {
    /// Who holds how much of a prompt, in no order. An owner is named twice if it is believed to hold more, or less, than it
    /// says. `chain` has the prompt's blocks, and `key` names one. What changes meanwhile may be seen or not. It never waits.
    pub fn lookup<T: Copy>(&self, chain: &[T], key: impl Fn(T) -> BlockKey) -> Vec<Holder> {
        let mut holders = Vec::new();
        self.lookup_into(chain, key, &mut LookupScratch::default(), &mut holders);
        holders
    }

    /// As [`lookup`](Self::lookup), with memory of an earlier one. `holders` is cleared first.
    pub fn lookup_into<T: Copy>(
        &self,
        chain: &[T],
        key: impl Fn(T) -> BlockKey,
        scratch: &mut LookupScratch,
        holders: &mut Vec<Holder>,
    ) {
        holders.clear();
        let num_joins = self.num_joins();
        let LookupScratch { path, found } = scratch;
        path.clear();
        found.clear();
        found.resize(self.max_members().div_ceil(u64::BITS as usize), 0);
        self.follow(chain, key, path);
        let mut seen: Option<Mark> = None;
        for step in path.iter().rev() {
            // A run that is gone has no member that was there all the time.
            let Some(run) = self.runs().run(step.run) else { continue };
            let Some(run) = run.as_ref().filter(|run| run.serial == step.serial) else { continue };
            let mark = run.mark();
            if seen == Some(mark) {
                continue;
            }
            run.for_each(|holding| {
                let member = holding.member();
                let bit = 1 << (member % u64::BITS);
                // A place without a member names none that there can be.
                let Some(word) = found.get_mut((member / u64::BITS) as usize) else { return };
                if *word & bit == 0
                    && let Some(owner) = self.owner(member, num_joins)
                {
                    *word |= bit;
                    let num_blocks = step.first + holding.num_blocks().min(step.num);
                    holders.push(Holder { owner, num_blocks });
                }
            });
            // If nothing changed meanwhile, these are all members of this mark.
            seen = Some(mark).filter(|mark| *mark == run.mark());
        }
    }

    /// The runs of a prompt, from its beginning on.
    fn follow<T: Copy>(&self, chain: &[T], key: impl Fn(T) -> BlockKey, path: &mut Vec<Step>) {
        let tables = self.runs().tables();
        let (mut first, mut after) = (0, Spot::default());
        while let Some(&block) = chain.get(first) {
            let block = key(block).0;
            let hash = KeyHash::of(block);
            let step = tables[shard_of(hash)].find(hash, |spot| {
                if spot.offset() != 0 {
                    return None;
                }
                let run = self.runs().run(spot.run())?;
                let run = run.as_ref()?;
                if run.after != after || run.key(0) != block {
                    return None;
                }
                let num = num_same(run, &chain[first..], &key);
                Some(Step { run: spot.run(), serial: run.serial, first, num })
            });
            let Some(step) = step else { return };
            path.push(step);
            first += step.num;
            after = Spot::new(step.run, step.num - 1);
        }
    }
}

/// How many blocks of a run the prompt begins with. The first one is the same. A block's name covers those before it.
fn num_same<T: Copy>(run: &Run, chain: &[T], key: &impl Fn(T) -> BlockKey) -> usize {
    let is_same = |offset: usize| run.key(offset) == key(chain[offset]).0;
    let (mut same, mut other) = (1, run.len().min(chain.len()).max(1) + 1);
    if is_same(other - 2) {
        return other - 1;
    }
    while same + 1 < other {
        let middle = usize::midpoint(same, other);
        if is_same(middle - 1) {
            same = middle;
        } else {
            other = middle;
        }
    }
    same
}
