//! Draws on the device, and comes back before it is done: a step is asked for with all that it ends with, so that the
//! device has work while the host does something else, and perhaps asks for the next step. What that one takes from this
//! one, its tokens, is on the device already.

use baton_cuda::CudaError;
use baton_kv_cache::BlockStorage;

use super::super::device::{Device, NUM_RETURNS};
use super::super::draws::Results;
use super::super::sample::TakeTokens;
use super::{DeviceExecutor, Told};
use crate::{Answer, Batch, Draw, DrawingExecutor, ExecuteError};

/// A step under way.
pub(super) struct Launched {
    /// That its tokens are sent to.
    place: usize,
    results: Results,
    told: Told,
}

impl<D: Device + 'static> DrawingExecutor for DeviceExecutor<D> {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        draws: &[Draw<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError> {
        assert!(self.launched.len() < NUM_RETURNS, "two steps are under way");
        assert_eq!(self.launched.is_empty(), follows.is_empty(), "a second step follows the first");
        let num_logits: usize = batch.sequences.iter().map(|it| it.num_logits).sum();
        assert_eq!(num_logits, draws.len(), "a draw for each row");
        self.take(batch, storage).map_err(|error| self.failed(error))?;
        self.begin(draws, follows, on_layer).map_err(|error| self.failed(error))
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<Answer<'_>>, ExecuteError> {
        let Launched { place, results, .. } = self.end(on_layer).map_err(|error| self.failed(error))?;
        let vocab_size = self.part.spec().vocab_size;
        let DeviceExecutor { device, logits, .. } = self;
        match device.returned(place) {
            Ok(bytes) => Ok(results.read(bytes, &logits[place], vocab_size)),
            Err(error) => Err(ExecuteError { device: device.name().to_owned(), message: error.to_string() }),
        }
    }
}

impl<D: Device> DeviceExecutor<D> {
    /// Draws from the first row of logits, whatever it is.
    pub(super) fn warm_up_drawing(&mut self) -> Result<(), CudaError> {
        let results = self.draws.fill(&[Draw::default()], true);
        let parts = self.draws.append_to(&mut self.inputs);
        let sources = self.inputs.append(&[0]);
        self.upload()?;
        let base = self.buffers.inputs;
        let (logits, vocab_size) = (self.buffers.logits, self.part.spec().vocab_size);
        let sample = self.draws.kernel(&parts, base, &self.buffers.draws, logits, vocab_size, (0, 1));
        let drawn = self.buffers.draws.results;
        let take =
            TakeTokens { tokens: self.inputs.at(base).tokens, sources: base.add(sources), drawn, num: 1 };
        // SAFETY: a row, its draw and its token are there; the list of tokens before is empty.
        unsafe {
            self.device.launch(&sample)?;
            self.device.launch(&take)?;
            self.device.launch(&self.draws.count_drawn(&parts, base, sources, drawn))?;
            self.device.send_back(drawn, results.num_bytes(), 0)?;
        }
        self.device.returned(0).map(drop)
    }

    /// Asks for a step, and for the tokens after its wanted rows.
    fn begin(
        &mut self,
        draws: &[Draw<'_>],
        follows: &[usize],
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, CudaError> {
        let results = self.draws.fill(draws, !follows.is_empty());
        let parts = self.draws.append_to(&mut self.inputs);
        let sources = (!follows.is_empty()).then(|| self.inputs.append_sources(follows));
        self.upload()?;
        let base = self.buffers.inputs;
        if let Some(sources) = sources {
            let drawn = self.buffers.draws.results;
            let take = TakeTokens {
                tokens: self.inputs.at(base).tokens,
                sources: base.add(sources),
                drawn,
                num: follows.len() as u64,
            };
            let count = self.draws.has_counts().then(|| self.draws.count_drawn(&parts, base, sources, drawn));
            // SAFETY: so many are there, and the step before has the rows that this one follows; both it and this one read
            // the inputs in their turn.
            unsafe {
                self.device.launch(&take)?;
                count.map_or(Ok(()), |count| self.device.launch(&count))?;
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
        self.launched.push_back(Launched { place, results, told });
        Ok(draws_all)
    }

    fn end(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Launched, CudaError> {
        let launched = self.launched.pop_front().expect("a step is under way");
        if launched.told.is_marked {
            self.tell(launched.told, on_layer)?;
        }
        self.device.returned(launched.place)?;
        if !launched.told.is_marked {
            self.tell(launched.told, on_layer)?;
        }
        Ok(launched)
    }
}
