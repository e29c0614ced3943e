//! The thread that compares the blocks' checksums with the sender's. It is a thread of its own because hashing
//! at memory speed must not block the async runtime.

use std::{
    future::Future,
    io,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

use baton_handoff::{Generation, KvFault, Piece};
use tokio::sync::oneshot;
use tracing::error;

use super::grants::Grants;
use crate::checksum::{Hasher, SumOf};

/// Pieces that are hashed in one turn. A revocation waits for the end of the turn.
const HASHED_AT_A_TIME: usize = 64;

pub(super) struct Verifier {
    // Unbounded: a handoff has few jobs outstanding, and their number is bounded by its pieces.
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Job {
    generation: Generation,
    pieces: Vec<Piece>,
    reply: oneshot::Sender<Result<(), KvFault>>,
}

impl Verifier {
    pub(super) fn start(grants: Arc<Grants>) -> io::Result<Verifier> {
        let (sender, jobs) = mpsc::channel::<Job>();
        let thread = thread::Builder::new().name("kv-verify".into()).spawn(move || {
            for job in jobs {
                let result = verify(&grants, job.generation, &job.pieces);
                // Fails when the handoff has ended: then the result is not needed.
                let _ = job.reply.send(result);
            }
        })?;
        Ok(Verifier { jobs: Some(sender), thread: Some(thread) })
    }

    pub(super) fn verify(
        &self,
        generation: Generation,
        pieces: Vec<Piece>,
    ) -> impl Future<Output = Result<(), KvFault>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let jobs = self.jobs.as_ref().expect("there until the drop");
        // If the thread has ended, no answer comes, and the grant counts as revoked below.
        let _ = jobs.send(Job { generation, pieces, reply });
        async { answer.await.unwrap_or(Err(KvFault::WrongGeneration)) }
    }
}

impl Drop for Verifier {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// Compares checksums. A grant that is revoked meanwhile fails with `WrongGeneration`.
fn verify(grants: &Grants, generation: Generation, pieces: &[Piece]) -> Result<(), KvFault> {
    let grant = grants.find(generation).ok_or(KvFault::WrongGeneration)?;
    let storage = grants.storage();
    let (mut hasher, sum_of) = (Hasher::default(), SumOf::new(storage.layout(), storage.num_ranks()));
    for group in pieces.chunks(HASHED_AT_A_TIME) {
        let places = group.iter().map(|&Piece { block_idx, layer_idx, .. }| {
            let block = grant.block(block_idx).filter(|_| (layer_idx as usize) < storage.layout().num_layers);
            let block = block.ok_or(KvFault::UnknownPiece { block_idx, layer_idx })?;
            Ok((block, layer_idx as usize))
        });
        let places = places.collect::<Result<Vec<_>, KvFault>>()?;
        let sums = grant
            // SAFETY: the grant holds the blocks, and the writer has said that the pieces are written. A writer that
            // goes on writing changes the checksum, and the comparison finds it.
            .with_fence(|| unsafe { hasher.checksums(storage, &places, grant.generation(), sum_of) })
            .ok_or(KvFault::WrongGeneration)?
            .map_err(|error| {
                let Piece { block_idx, layer_idx, .. } = group[0];
                error!(%error, block_idx, layer_idx, "kv rejected: the device did not return a granted block");
                KvFault::Unreadable { block_idx, layer_idx }
            })?;
        // Invariant 4: the checksum covers the generation, so KV of an older grant does not match either.
        if let Some((piece, _)) = group.iter().zip(sums).find(|(piece, sum)| piece.checksum != *sum) {
            return Err(KvFault::Checksum { block_idx: piece.block_idx, layer_idx: piece.layer_idx });
        }
    }
    if let Some(kind) = grant.one_sided() {
        // This side does not see one-sided writes. Verification is the first proof that they arrived, so count them
        // here.
        let num_bytes = pieces.len() * storage.layout().layer_bytes();
        grants.counters().of(kind).placed(pieces.len(), num_bytes);
    }
    Ok(())
}
