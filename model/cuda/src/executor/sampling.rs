//! Samples on the device, asynchronously. `launch` queues a step with its sampling and returns, so that the host can
//! do other work and even launch the next step while the device computes. The next step takes the sampled tokens from
//! the device's memory. Where masks restrict tokens, the sampling is queued when they are given, which may be
//! while the step is computed.

use std::time::Duration;

use baton_cuda::CudaError;
use baton_cuda_kernels::device::{KernelDevice, NUM_RETURNS};
use baton_cuda_kernels::sample::TakeTokens;
use baton_kv_cache::BlockStorage;
use baton_model_spec::{
    Batch, ExecuteError, RankError, SampledRow, SamplingExecutor, SamplingRank, TokenSampling,
};

use super::device_executor::{DeviceExecutor, of_rank};
use super::launched::{Collected, Launched};
use crate::samplings::SamplingBuffers;

impl<D: KernelDevice + 'static> SamplingExecutor for DeviceExecutor<D> {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError> {
        // SAFETY: the caller has the same duties.
        let launched = unsafe { SamplingRank::launch(self, batch, samplings, follows, storage, on_layer) };
        launched.map_err(|error| self.failed(error))
    }

    fn mask(&mut self, masks: &[u32]) -> Result<(), ExecuteError> {
        SamplingRank::mask(self, masks).map_err(|error| self.failed(error))
    }

    fn least_left(&mut self) -> Result<Duration, ExecuteError> {
        let &Launched { place, reported, .. } = self.launched.front().expect("a step is in flight");
        // Layers that a transfer waits for are reported by `collect`.
        let is_computed = reported.is_marked
            || self.device.has_returned(place).map_err(|error| self.failed(of_rank(error)))?;
        // The device does not say how long. A look costs less than being late.
        Ok(if is_computed { Duration::ZERO } else { Duration::from_nanos(1) })
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError> {
        match SamplingRank::collect(self, on_layer) {
            Ok(()) => Ok(self.answers()),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl<D: KernelDevice + 'static> SamplingRank for DeviceExecutor<D> {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, RankError> {
        assert!(self.launched.len() < NUM_RETURNS, "two steps are in flight");
        assert_eq!(self.launched.is_empty(), follows.is_empty(), "a second step follows the first");
        let num_logits: usize = batch.sequences.iter().map(|it| it.num_logits).sum();
        assert_eq!(num_logits, samplings.len(), "a sampling for each row");
        self.take(batch, storage).map_err(RankError::Failed)?;
        self.begin(samplings, follows, on_layer).map_err(of_rank)
    }

    fn mask(&mut self, masks: &[u32]) -> Result<(), RankError> {
        let SamplingBuffers { masks: at, max_masked, .. } = self.buffers.samplings;
        let num_words = self.part.spec().vocab_size.div_ceil(32);
        assert_eq!(masks.len(), self.samplings.num_masked() * num_words, "a mask for each masked row");
        if self.launched.back().is_none_or(|newest| newest.unsampled.is_none()) {
            return Ok(());
        }
        let masks = &masks[..masks.len().min(max_masked * num_words)];
        // SAFETY: there is room for this many masks. Kernels that read those of the step before are queued.
        unsafe { self.device.upload(at, bytemuck::cast_slice(masks)) }.map_err(of_rank)?;
        self.sample().map_err(of_rank)
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<(), RankError> {
        let Launched { place, results, reported, unsampled, .. } =
            self.launched.pop_front().expect("a step is in flight");
        assert!(unsampled.is_none(), "a step without its masks");
        if reported.is_marked {
            self.report(reported, on_layer).map_err(of_rank)?;
        }
        let mut bytes = std::mem::take(&mut self.collected.bytes);
        bytes.clear();
        bytes.extend_from_slice(self.device.returned(place).map_err(of_rank)?);
        self.collected = Collected { place, results, bytes };
        if !reported.is_marked {
            self.report(reported, on_layer).map_err(of_rank)?;
        }
        Ok(())
    }

    fn answers(&self) -> Vec<SampledRow<'_>> {
        let Collected { place, results, bytes } = &self.collected;
        results.read(bytes, &self.logits[*place], self.part.spec().vocab_size)
    }
}

impl<D: KernelDevice> DeviceExecutor<D> {
    /// Samples from the first row of logits, whatever it holds.
    pub fn warm_up_sampling(&mut self) -> Result<(), CudaError> {
        let results = self.samplings.fill(&[TokenSampling::default()], true, 0);
        let parts = self.samplings.append_to(&mut self.inputs);
        let sources = self.inputs.append(&[0]);
        self.upload()?;
        let base = self.buffers.inputs;
        let (logits, vocab_size) = (self.buffers.logits, self.part.spec().vocab_size);
        let sampled = self.buffers.samplings.results;
        if self.part.rank().is_first() {
            let sample =
                self.samplings.kernel(&parts, base, &self.buffers.samplings, logits, vocab_size, (0, 1));
            // SAFETY: the row and its sampling are in the buffers.
            unsafe { self.device.launch(&sample) }?;
        }
        self.take_tokens(sources, 1, 1)?;
        // SAFETY: its token is in the buffers, and its list of counts is empty.
        unsafe {
            self.device.launch(&self.samplings.count_sampled(&parts, base, sources, sampled))?;
            self.device.send_back(sampled, results.num_bytes(), 0)?;
        }
        self.device.returned(0).map(drop)
    }

    /// Fills in the tokens of the first `num` input rows. Row `i` takes the token that the previous step sampled
    /// after its row `sources[i]`. The first of several ranks has the `num_sampled` tokens and sends them to the
    /// others.
    fn take_tokens(&mut self, sources: usize, num: usize, num_sampled: usize) -> Result<(), CudaError> {
        let (base, sampled) = (self.buffers.inputs, self.buffers.samplings.results);
        let (tokens, sources) = (self.inputs.at(base).tokens, base.offset_by(sources));
        // SAFETY: the previous step has all of these rows. It and this step read the inputs in the order of the
        // queue.
        unsafe {
            if self.part.rank().num_ranks > 1 {
                self.device.broadcast(sampled, num_sampled)?;
            }
            self.device.launch(&TakeTokens { tokens, sources, sampled, num: num as u64 })
        }
    }

    /// Queues a step, and the sampling of its wanted rows unless masks are to come.
    fn begin(
        &mut self,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<bool, CudaError> {
        let is_first = self.part.rank().is_first();
        // Other ranks do not wait for masks, and more rows meet once more. The host samples them.
        let is_in_one = samplings.len() <= self.buffers.logit_rows;
        let max_masked = if is_in_one { self.buffers.samplings.max_masked } else { 0 };
        let sampled_here = if is_first { samplings } else { &[] };
        let results = self.samplings.fill(sampled_here, !follows.is_empty(), max_masked);
        let parts = self.samplings.append_to(&mut self.inputs);
        let sources = (!follows.is_empty()).then(|| self.inputs.append_sources(follows));
        self.upload()?;
        let base = self.buffers.inputs;
        if let Some(sources) = sources {
            let before = self.launched.back().expect("it follows a step");
            self.take_tokens(sources, follows.len(), before.num_sampled)?;
            if self.samplings.has_counts() {
                let sampled = self.buffers.samplings.results;
                let count = self.samplings.count_sampled(&parts, base, sources, sampled);
                // SAFETY: as for the tokens.
                unsafe { self.device.launch(&count) }?;
            }
        }
        let reported = self.forward(on_layer)?;
        let samples_all = results.left().next().is_none();
        let (place, num_sampled) = (self.next_place, samplings.len());
        self.next_place = (place + 1) % NUM_RETURNS;
        self.launched.push_back(Launched { place, results, unsampled: Some(parts), num_sampled, reported });
        if self.samplings.num_masked() == 0 || max_masked == 0 {
            self.sample()?;
        }
        Ok(samples_all)
    }

    /// Queues the sampling of the newest step, which the first rank does.
    fn sample(&mut self) -> Result<(), CudaError> {
        let is_first = self.part.rank().is_first();
        let (base, vocab_size) = (self.buffers.inputs, self.part.spec().vocab_size);
        let mut launched = self.launched.pop_back().expect("a step is in flight");
        let Launched { place, results, unsampled, num_sampled, .. } = &mut launched;
        let parts = unsampled.take().expect("sampled once");
        let mut left = std::mem::take(&mut self.logits[*place]);
        left.clear();
        let sampling_inputs = std::mem::take(&mut self.samplings);
        let (device, pass) = self.pass();
        let logits = pass.buffers.logits;
        for first in (0..*num_sampled).step_by(pass.buffers.logit_rows) {
            let num_rows = pass.buffers.logit_rows.min(*num_sampled - first);
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
                // SAFETY: this many rows were just queued.
                unsafe { device.download(logits.offset_by((row_idx - first) * vocab_size * 4), row) }?;
            }
            let range = (first, num_rows);
            let kernel =
                sampling_inputs.kernel(&parts, base, &pass.buffers.samplings, logits, vocab_size, range);
            // SAFETY: there is room for the rows and lists that `SamplingInputs` accepts.
            unsafe { device.launch(&kernel) }?;
        }
        // SAFETY: the kernel writes these bytes. Bytes of rows without log-probabilities are not read.
        unsafe { device.send_back(pass.buffers.samplings.results, results.num_bytes(), *place) }?;
        (self.samplings, self.logits[*place]) = (sampling_inputs, left);
        self.launched.push_back(launched);
        Ok(())
    }
}
