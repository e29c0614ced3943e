//! A communicator for threads of one process. Each reads and writes the others' memory between two barriers.
//!
//! ```text
//! all-reduce    publish the buffer -- barrier -- each sums its share of the numbers and writes it to all -- barrier
//! gather        publish the part   -- barrier -- the first copies                                        -- barrier
//! barrier                             barrier
//! ```
//! Between the two barriers only these operations access the buffers: the threads that own them are inside the call.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

use super::barrier::Barrier;
use super::contract::{Communicator, CommunicatorError};
use crate::shard::Rank;

/// Numbers that are summed in registers and the first-level cache before they are written.
const CHUNK: usize = 256;
/// A rank's share starts at a multiple of this many numbers, so a cache line has one writer.
const LINE: usize = 16;

/// The end of one rank, a thread of this process.
pub struct ThreadCommunicator {
    rank: Rank,
    group: Arc<Group>,
    /// Operations so far: equal on all ranks at every barrier.
    num_operations: usize,
}

struct Group {
    barrier: Barrier,
    /// Each rank's buffer, for even and for odd operations. The first rank to leave an operation may publish its
    /// buffer for the next while others still read this one, but not for the one after the next.
    offers: [Box<[Offer]>; 2],
}

#[derive(Default)]
struct Offer {
    operation: AtomicU8,
    memory: AtomicPtr<f32>,
    len: AtomicUsize,
}

#[derive(Clone, Copy)]
enum Operation {
    Barrier,
    AllReduce,
    Gather,
}

impl ThreadCommunicator {
    /// The ends of a group of `num_ranks` ranks, in rank order.
    pub fn group(num_ranks: usize) -> Vec<ThreadCommunicator> {
        let offers = [0, 1].map(|_| (0..num_ranks).map(|_| Offer::default()).collect());
        let group = Arc::new(Group { barrier: Barrier::new(num_ranks), offers });
        let ends = Rank::all(num_ranks).map(|rank| ThreadCommunicator {
            rank,
            group: Arc::clone(&group),
            num_operations: 0,
        });
        ends.collect()
    }

    /// Publishes this rank's buffer, waits for the others and returns all buffers.
    fn exchange(
        &mut self,
        operation: Operation,
        memory: *mut f32,
        len: usize,
    ) -> Result<&[Offer], CommunicatorError> {
        let offers = &self.group.offers[self.num_operations % 2];
        self.num_operations += 1;
        let own = &offers[self.rank.idx];
        own.operation.store(operation as u8, Ordering::Relaxed);
        own.memory.store(memory, Ordering::Relaxed);
        own.len.store(len, Ordering::Relaxed);
        self.group.barrier.wait()?;
        let what =
            |offer: &Offer| (offer.operation.load(Ordering::Relaxed), offer.len.load(Ordering::Relaxed));
        // All ranks see the same offers, so all return the error and none accesses another's memory.
        match offers.iter().position(|offer| what(offer) != what(&offers[0])) {
            Some(rank) => Err(CommunicatorError::Differs { rank }),
            None => Ok(offers),
        }
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn all_reduce_sum(&mut self, buffer: &mut [f32]) -> Result<(), CommunicatorError> {
        let (rank, len) = (self.rank, buffer.len());
        let offers = self.exchange(Operation::AllReduce, buffer.as_mut_ptr(), len)?;
        let lines = rank.part_of(len.div_ceil(LINE));
        let (mut start, end) = (lines.start * LINE, len.min(lines.end * LINE));
        let mut sums = [0.0; CHUNK];
        while start < end {
            let sums = &mut sums[..CHUNK.min(end - start)];
            for (idx, offer) in offers.iter().enumerate() {
                // SAFETY: every rank offers `len` numbers and stays inside until the second barrier. These numbers
                // are this rank's share, which no other rank reads or writes before that.
                let numbers = unsafe {
                    std::slice::from_raw_parts(offer.memory.load(Ordering::Relaxed).add(start), sums.len())
                };
                if idx == 0 {
                    sums.copy_from_slice(numbers);
                } else {
                    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
                }
            }
            for offer in offers {
                // SAFETY: as above.
                let numbers = unsafe {
                    std::slice::from_raw_parts_mut(
                        offer.memory.load(Ordering::Relaxed).add(start),
                        sums.len(),
                    )
                };
                numbers.copy_from_slice(sums);
            }
            start += sums.len();
        }
        self.group.barrier.wait()
    }

    fn gather(&mut self, part: &[f32], all: Option<&mut [f32]>) -> Result<(), CommunicatorError> {
        let (rank, len) = (self.rank, part.len());
        assert_eq!(
            all.as_deref().map(<[f32]>::len),
            rank.is_first().then_some(rank.num_ranks * len),
            "the first rank needs room for exactly all parts"
        );
        let offers = self.exchange(Operation::Gather, part.as_ptr().cast_mut(), len)?;
        let room = all.into_iter().flat_map(|all| all.chunks_exact_mut(len.max(1)));
        for (room, offer) in room.zip(offers) {
            // SAFETY: every rank offers `len` numbers and stays inside until the second barrier. No rank writes them
            // before that.
            let part = unsafe { std::slice::from_raw_parts(offer.memory.load(Ordering::Relaxed), len) };
            room.copy_from_slice(part);
        }
        self.group.barrier.wait()
    }

    fn barrier(&mut self) -> Result<(), CommunicatorError> {
        self.exchange(Operation::Barrier, std::ptr::null_mut(), 0).map(drop)
    }
}

impl Drop for ThreadCommunicator {
    fn drop(&mut self) {
        self.group.barrier.mark_lost(self.rank.idx);
    }
}
