//! Draws on the device, and comes back before it is done: a step is asked for with all that it ends with, so that the
//! device has work while the host does something else, and perhaps asks for the next step. What that one takes from this
//! one, its tokens, is on the device already.

use baton_cuda::CudaError;
use baton_kv_cache::BlockStorage;

use super::super::device::{Device, NUM_RETURNS};
use super::super::draws::Results;
use super::super::sample::TakeTokens;
use super::{DeviceExecutor, Told, rank_error};
use baton_model_spec::{Batch, ExecuteError, SampledRow, SamplingExecutor, TokenSampling};
use baton_model_spec::{RankError, SamplingRank};

/// A step under way.
pub(super) struct Launched {
    /// That its tokens are sent to.
    place: usize,
    results: Results,
    /// Rows after which tokens are drawn, by whichever rank.
    num_drawn: usize,
    told: Told,
}

/// What came of a step.
#[derive(Default)]
pub(super) struct Collected {
    place: usize,
    results: Results,
    bytes: Vec<u8>,
}

impl<D: Device + 'static> SamplingExecutor for DeviceExecutor<D> {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        draws: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError> {
        // SAFETY: passed on to the caller.
        let launched = unsafe { SamplingRank::launch(self, batch, draws, follows, storage, on_layer) };
        launched.map_err(|error| self.failed(error))
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError> {
        match SamplingRank::collect(self, on_layer) {
            Ok(()) => Ok(self.answers()),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl<D: Device + 'static> SamplingRank for DeviceExecutor<D> {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        draws: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, RankError> {
        assert!(self.launched.len() < NUM_RETURNS, "two steps are under way");
        assert_eq!(self.launched.is_empty(), follows.is_empty(), "a second step follows the first");
        let num_logits: usize = batch.sequences.iter().map(|it| it.num_logits).sum();
        assert_eq!(num_logits, draws.len(), "a draw for each row");
        self.take(batch, storage).map_err(RankError::Failed)?;
        self.begin(draws, follows, on_layer).map_err(rank_error)
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<(), RankError> {
        let Launched { place, results, told, .. } = self.launched.pop_front().expect("a step is under way");
        if told.is_marked {
            self.tell(told, on_layer).map_err(rank_error)?;
        }
        let mut bytes = std::mem::take(&mut self.collected.bytes);
        bytes.clear();
        bytes.extend_from_slice(self.device.returned(place).map_err(rank_error)?);
        self.collected = Collected { place, results, bytes };
        if !told.is_marked {
            self.tell(told, on_layer).map_err(rank_error)?;
        }
        Ok(())
    }

    fn answers(&self) -> Vec<SampledRow<'_>> {
        let Collected { place, results, bytes } = &self.collected;
        results.read(bytes, &self.logits[*place], self.part.spec().vocab_size)
    }
}

impl<D: Device> DeviceExecutor<D> {
    /// Draws from the first row of logits, whatever it is.
    pub(super) fn warm_up_sampling(&mut self) -> Result<(), CudaError> {
        let results = self.draws.fill(&[TokenSampling::default()], true);
        let parts = self.draws.append_to(&mut self.inputs);
        let sources = self.inputs.append(&[0]);
        self.upload()?;
        let base = self.buffers.inputs;
        let (logits, vocab_size) = (self.buffers.logits, self.part.spec().vocab_size);
        let drawn = self.buffers.draws.results;
        if self.part.rank().is_first() {
            let sample = self.draws.kernel(&parts, base, &self.buffers.draws, logits, vocab_size, (0, 1));
            // SAFETY: a row and its draw are there.
            unsafe { self.device.launch(&sample) }?;
        }
        self.take_tokens(sources, 1, 1)?;
        // SAFETY: its token is there; the list of tokens before is empty.
        unsafe {
            self.device.launch(&self.draws.count_drawn(&parts, base, sources, drawn))?;
            self.device.send_back(drawn, results.num_bytes(), 0)?;
        }
        self.device.returned(0).map(drop)
    }

    /// Puts tokens that the step before drew after `num_drawn` rows in their places: of each of the inputs' first `num`
    /// rows that of the row that `sources` says. Of several ranks the first has them, and hands them to the others.
    fn take_tokens(&mut self, sources: usize, num: usize, num_drawn: usize) -> Result<(), CudaError> {
        let (base, drawn) = (self.buffers.inputs, self.buffers.draws.results);
        let (tokens, sources) = (self.inputs.at(base).tokens, base.add(sources));
        // SAFETY: so many are there, and the step before has the rows that this one follows; both it and this one read the
        // inputs in their turn.
        unsafe {
            if self.part.rank().num_ranks > 1 {
                self.device.hand_on(drawn, num_drawn)?;
            }
            self.device.launch(&TakeTokens { tokens, sources, drawn, num: num as u64 })
        }
    }

    /// Asks for a step, and for the tokens after its wanted rows, which the first rank draws.
    fn begin(
        &mut self,
        draws: &[TokenSampling<'_>],
        follows: &[usize],
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, CudaError> {
        let is_first = self.part.rank().is_first();
        let results = self.draws.fill(if is_first { draws } else { &[] }, !follows.is_empty());
        let parts = self.draws.append_to(&mut self.inputs);
        let sources = (!follows.is_empty()).then(|| self.inputs.append_sources(follows));
        self.upload()?;
        let base = self.buffers.inputs;
        if let Some(sources) = sources {
            let before = self.launched.back().expect("it follows a step");
            self.take_tokens(sources, follows.len(), before.num_drawn)?;
            if self.draws.has_counts() {
                let drawn = self.buffers.draws.results;
                let count = self.draws.count_drawn(&parts, base, sources, drawn);
                // SAFETY: as of the tokens.
                unsafe { self.device.launch(&count) }?;
            }
        }
        let told = self.forward(on_layer)?;
        let place = self.next_place;
        let vocab_size = self.part.spec().vocab_size;
        let mut left = std::mem::take(&mut self.logits[place]);
        left.clear();
        let draw_inputs = std::mem::take(&mut self.draws);
        let (device, pass) = self.pass();
        let logits = pass.buffers.logits;
        for first in (0..draws.len()).step_by(pass.buffers.logit_rows) {
            let num_rows = pass.buffers.logit_rows.min(draws.len() - first);
            if first > 0 {
                pass.logits(device, first, num_rows)?;
            }
            if !is_first {
                continue;
            }
            for row_idx in results.left().filter(|row_idx| (first..first + num_rows).contains(row_idx)) {
                let start = left.len();
                left.resize(start + vocab_size, 0.0);
                let row = bytemuck::cast_slice_mut(&mut left[start..]);
                // SAFETY: so many rows were just asked for.
                unsafe { device.download(logits.add((row_idx - first) * vocab_size * 4), row) }?;
            }
            let range = (first, num_rows);
            let kernel = draw_inputs.kernel(&parts, base, &pass.buffers.draws, logits, vocab_size, range);
            // SAFETY: there is room for as many rows and lists as `DrawInputs` takes.
            unsafe { device.launch(&kernel) }?;
        }
        // SAFETY: so much was just written, or is of rows that want none.
        unsafe { device.send_back(pass.buffers.draws.results, results.num_bytes(), place) }?;
        (self.draws, self.logits[place]) = (draw_inputs, left);
        self.next_place = (place + 1) % NUM_RETURNS;
        let draws_all = results.left().next().is_none();
        self.launched.push_back(Launched { place, results, num_drawn: draws.len(), told });
        Ok(draws_all)
    }
}
