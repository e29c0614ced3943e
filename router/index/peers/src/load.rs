//! The events of many workers and the prompts that are looked up: a system prompt, documents, conversations, and pools that
//! evict what was used longest ago.

use std::collections::{HashMap, VecDeque};

use dynamo_kv_router::protocols::{LocalBlockHash, compute_next_seq_hash};

/// Blocks of the system prompt: 2,000 tokens.
const SYSTEM: usize = 125;
const DOCUMENT: usize = 64;
const TURN: usize = 64;
/// Blocks that one step stores.
const STEP: usize = 32;
const NUM_PROMPTS: usize = 20_000;

/// A block by the hash of its tokens, and by that of all tokens so far.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub local: u64,
    pub sequence: u64,
}

/// What happens at a worker.
pub enum Change {
    Stored { parent: Option<u64>, blocks: Vec<Block> },
    Removed(Vec<u64>),
}

/// Events and lookups.
pub struct Load {
    pub num_workers: usize,
    pub pool: usize,
    pub changes: Vec<(usize, Change)>,
    pub prompts: Vec<Vec<Block>>,
    pub num_block_ops: usize,
    pub num_held: usize,
}

#[derive(Default)]
struct Worker {
    num_held: usize,
    /// Uses of documents by requests that are held.
    documents: HashMap<u64, usize>,
    requests: VecDeque<(u64, u64)>,
    has_system: bool,
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Blocks after `parent`, by a seed.
fn extend(parent: Option<u64>, seed: u64, num: usize) -> Vec<Block> {
    let mut state = seed;
    let mut before = parent;
    (0..num)
        .map(|_| {
            let local = random(&mut state);
            let sequence =
                before.map_or(local, |before| compute_next_seq_hash(before, LocalBlockHash(local)));
            before = Some(sequence);
            Block { local, sequence }
        })
        .collect()
}

fn system() -> Vec<Block> {
    extend(None, 1, SYSTEM)
}

impl Load {
    /// Until every pool was filled twice.
    pub fn new(num_workers: usize, pool: usize) -> Load {
        let system = system();
        let end_of_system = system.last().map(|block| block.sequence);
        let num_documents = 4 * num_workers as u64;
        let mut load = Load {
            num_workers,
            pool,
            changes: Vec::new(),
            prompts: Vec::new(),
            num_block_ops: 0,
            num_held: 0,
        };
        let mut workers: Vec<Worker> = (0..num_workers).map(|_| Worker::default()).collect();
        let mut state = 7;
        let num_requests = 2 * num_workers * pool / (DOCUMENT / 2 + TURN);
        for request in 0..num_requests as u64 {
            let idx = random(&mut state) as usize % num_workers;
            let worker = &mut workers[idx];
            let document = 1000 + random(&mut state) % num_documents;
            let turn = 1_000_000_000 + request;
            if !std::mem::replace(&mut worker.has_system, true) {
                load.store(idx, None, &system);
                worker.num_held += SYSTEM;
            }
            let of_document = extend(end_of_system, document, DOCUMENT);
            let end = of_document.last().map(|block| block.sequence);
            let of_turn = extend(end, turn, TURN);
            let uses = worker.documents.entry(document).or_default();
            *uses += 1;
            if *uses == 1 {
                load.store(idx, end_of_system, &of_document);
                worker.num_held += DOCUMENT;
            }
            load.store(idx, end, &of_turn);
            worker.num_held += TURN;
            worker.requests.push_back((document, turn));
            while worker.num_held > pool - DOCUMENT - TURN {
                let (document, turn) = worker.requests.pop_front().expect("something is held");
                let of_document = extend(end_of_system, document, DOCUMENT);
                let end = of_document.last().map(|block| block.sequence);
                load.remove(idx, &extend(end, turn, TURN));
                worker.num_held -= TURN;
                let uses = worker.documents.get_mut(&document).expect("it is held");
                *uses -= 1;
                if *uses == 0 {
                    worker.documents.remove(&document);
                    load.remove(idx, &of_document);
                    worker.num_held -= DOCUMENT;
                }
            }
        }
        load.num_held = workers.iter().map(|worker| worker.num_held).sum();
        for prompt in 0..NUM_PROMPTS as u64 {
            // Half continue a conversation, the others begin one.
            let document = 1000 + random(&mut state) % num_documents;
            let worker = &workers[random(&mut state) as usize % num_workers];
            let known = worker.requests.get(random(&mut state) as usize % worker.requests.len().max(1));
            let (document, turn) = match known {
                Some(&known) if prompt % 2 == 0 => known,
                _ => (document, 5_000_000_000 + prompt),
            };
            let mut blocks = system.clone();
            blocks.extend(extend(end_of_system, document, DOCUMENT));
            blocks.extend(extend(blocks.last().map(|block| block.sequence), turn, TURN));
            blocks.extend(extend(blocks.last().map(|block| block.sequence), 9_000_000_000 + prompt, 32));
            load.prompts.push(blocks);
        }
        load
    }

    fn store(&mut self, worker: usize, parent: Option<u64>, blocks: &[Block]) {
        let mut parent = parent;
        for step in blocks.chunks(STEP) {
            self.num_block_ops += step.len();
            self.changes.push((worker, Change::Stored { parent, blocks: step.to_vec() }));
            parent = step.last().map(|block| block.sequence);
        }
    }

    /// The end first.
    fn remove(&mut self, worker: usize, blocks: &[Block]) {
        self.num_block_ops += blocks.len();
        self.changes
            .push((worker, Change::Removed(blocks.iter().rev().map(|block| block.sequence).collect())));
    }
}
