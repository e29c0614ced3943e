//! Measures whole steps of a model of noise, and their products alone.

use std::time::Instant;

use baton_cuda::CudaError;
use baton_cuda_kernels::device::{KernelDevice, TimedDevice};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::noise::Noise;
use baton_kv_cache::{BlockId, BlockStorage};
use baton_model_spec::{
    Batch, BatchSequence, ExecuteError, Executor, SampledRow, SamplingExecutor, TokenSampling,
};

use super::ceilings::Ceilings;
use super::figure::{Amount, Finding, fits};
use super::sizes::{Sizes, attention_operations};
use super::timing::{median, middle};
use super::weights::{random_weights, weight_bytes};
use crate::error::StartError;
use crate::executor::DeviceExecutor;
use crate::inputs::{BatchLimits, Inputs};
use crate::multiply::ProductRule;
use crate::part::Part;
use crate::pool::PoolAddress;
use crate::weights::{DeviceLayer, DeviceMlp};

/// Memory for the buffers of the largest step, and for what libraries and graphs allocate.
const BUFFER_BYTES: usize = 4 << 30;

/// Measures decode steps with few and with many sequences, and a prompt.
pub fn measure<D: TimedDevice>(
    mut device: D,
    sizes: &Sizes,
    ceilings: &Ceilings,
    report: &mut dyn FnMut(&Finding),
) -> Result<(), StartError> {
    let Sizes { spec, context, batch, prompt, repetitions, .. } = sizes;
    let layout = sizes.layout();
    let num_blocks = (batch * layout.num_blocks_for(*context)).max(layout.num_blocks_for(*prompt));
    let needed_bytes = weight_bytes(spec) + num_blocks * layout.block_bytes() + BUFFER_BYTES;
    if !fits(&mut device, "steps of a whole model", needed_bytes, report)? {
        return Ok(());
    }
    let noise = Noise::new(&mut device)?;
    let weights = random_weights(&mut device, spec, &noise)?;
    let pool = noise.fill_new(&mut device, num_blocks * layout.block_bytes())?;
    let storage = BlockStorage::on_device(Box::new(PoolAddress(pool)), layout, num_blocks);
    let limits = BatchLimits {
        num_rows: *prompt,
        num_sequences: *batch,
        context_length: (*context).max(*prompt),
        num_blended: 0,
    };
    let mut executor =
        DeviceExecutor::with_weights(device, Part::whole(spec, layout), weights, limits, ProductRule::Bf16)?;

    let weight_bytes = (2 * num_multiplied(&executor)) as f64;
    for num_rows in [1, *batch] {
        let seconds = products(&mut executor, num_rows, *repetitions)?;
        let what = format!("decode products, {num_rows} rows");
        report(&ceilings.figure(what, seconds, Amount::Bytes(weight_bytes), Some(0.85)));
    }

    let blocks: Vec<BlockId> = (0..num_blocks as u32).map(BlockId).collect();
    let tokens: Vec<u32> = (0..*prompt).map(|idx| (idx * 7919 % spec.vocab_size) as u32).collect();
    for num_sequences in [1, *batch] {
        let sequences = blocks.chunks_exact(layout.num_blocks_for(*context)).zip(tokens.chunks_exact(1));
        let sequence =
            |(blocks, tokens)| BatchSequence { tokens, start_idx: context - 1, blocks, num_logits: 1 };
        let step = Batch { sequences: sequences.take(num_sequences).map(sequence).collect() };
        let bytes = Amount::Bytes(weight_bytes + (num_sequences * context * layout.token_bytes()) as f64);
        let what = format!("decode step, {num_sequences} x {context}");
        let seconds = as_the_engine_decodes(&mut executor, &step, &storage, *repetitions)?;
        report(&ceilings.figure(what.clone(), seconds, bytes, Some(0.85)));
        let seconds = on_the_device(&mut executor, &step, pool, *repetitions)?;
        report(&ceilings.figure(format!("{what}, device alone"), seconds, bytes, None));
    }

    let step = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &blocks, num_logits: 1 };
    let step = Batch { sequences: vec![step] };
    let seconds = as_the_engine_prefills(&mut executor, &step, &storage, repetitions.div_ceil(3))?;
    let head = spec.vocab_size * spec.hidden_size;
    let products = 2.0 * ((num_multiplied(&executor) - head) * prompt + head) as f64;
    let attention = spec.layers.len() as f64 * attention_operations(spec, *prompt);
    let what = format!("prefill, {prompt} tokens");
    report(&ceilings.figure(what, seconds, Amount::Operations(products + attention), Some(0.7)));
    Ok(())
}

/// Numbers in all matrices, including the head.
fn num_multiplied<D: KernelDevice>(executor: &DeviceExecutor<D>) -> usize {
    let of_layer = |layer: &DeviceLayer| {
        let DeviceMlp::Dense { gate_up, down } = &layer.mlp else { unreachable!("no experts here") };
        let matrices = [layer.qkv.weight, layer.output.weight, gate_up.weight, down.weight];
        matrices.iter().map(|matrix| matrix.num_out * matrix.num_in).sum::<usize>()
    };
    let head = executor.weights.head;
    executor.weights.layers.iter().map(of_layer).sum::<usize>() + head.num_out * head.num_in
}

/// Seconds of all products of a step, without anything else.
fn products<D: TimedDevice>(
    executor: &mut DeviceExecutor<D>,
    num_rows: usize,
    repetitions: usize,
) -> Result<f64, CudaError> {
    let DeviceExecutor { device, weights, buffers, scratch, .. } = executor;
    let mut work = |device: &mut D| {
        for layer in &weights.layers {
            let DeviceMlp::Dense { gate_up, down } = &layer.mlp else { unreachable!("no experts here") };
            for (linear, from, to) in [
                (&layer.qkv, buffers.hidden, buffers.qkv),
                (&layer.output, buffers.attended, buffers.added),
                (gate_up, buffers.hidden, buffers.gate_up),
                (down, buffers.gated, buffers.added),
            ] {
                // SAFETY: weights and buffers are allocated for this many rows.
                unsafe { scratch.apply(device, linear, from, to, num_rows) }?;
            }
        }
        // SAFETY: as above.
        unsafe { scratch.multiply_exactly(device, weights.head, buffers.hidden, buffers.logits, num_rows) }
    };
    // Smaller than the keys of steps, whose upper half is the number of sequences.
    median(repetitions, device, &mut |device| device.repeat(num_rows as u64, &mut work))
}

/// Seconds from the tokens of one step to the tokens of the next, as an engine decodes: the device samples, and the
/// host launches the next step before it waits for the tokens of the current one.
///
/// All steps are at one position, so that all have the same context length.
fn as_the_engine_decodes<D: TimedDevice>(
    executor: &mut DeviceExecutor<D>,
    step: &Batch<'_>,
    storage: &BlockStorage,
    repetitions: usize,
) -> Result<f64, CudaError> {
    let samplings = vec![
        TokenSampling { temperature: 0.7, random: 0.5, ..TokenSampling::default() };
        step.sequences.len()
    ];
    let follows: Vec<usize> = (0..samplings.len()).collect();
    let launch = |executor: &mut DeviceExecutor<D>, follows: &[usize]| {
        // SAFETY: nothing else uses the storage.
        let samples_all = unsafe { executor.launch(step, &samplings, follows, storage, &mut |_| {}) };
        samples_all.map_err(failed).map(|samples_all| assert!(samples_all, "these are sampled on the device"))
    };
    launch(executor, &[])?;
    let (mut seconds, mut last) = (Vec::with_capacity(repetitions), Instant::now());
    for repetition in 0..repetitions + 3 {
        launch(executor, &follows)?;
        are_sampled(executor)?;
        let elapsed = last.elapsed().as_secs_f64();
        last = Instant::now();
        if repetition >= 3 {
            seconds.push(elapsed);
        }
    }
    are_sampled(executor)?;
    Ok(middle(seconds))
}

/// Waits for a step, which must sample a token for every row.
fn are_sampled<D: TimedDevice>(executor: &mut DeviceExecutor<D>) -> Result<(), CudaError> {
    let answers = executor.collect(&mut |_| {}).map_err(failed)?;
    match answers.iter().all(|answer| matches!(answer, SampledRow::Sampled(Ok(_)))) {
        true => Ok(()),
        false => Err(not_finite()),
    }
}

fn failed(error: ExecuteError) -> CudaError {
    CudaError::Failed { call: "a step", why: error.message }
}

fn not_finite() -> CudaError {
    CudaError::Failed { call: "a step", why: "logits that are not finite".into() }
}

/// Seconds of `execute`: copies, launches, and the wait for the logits in host memory.
fn as_the_engine_prefills<D: TimedDevice>(
    executor: &mut DeviceExecutor<D>,
    step: &Batch<'_>,
    storage: &BlockStorage,
    repetitions: usize,
) -> Result<f64, CudaError> {
    let mut seconds = Vec::with_capacity(repetitions);
    for repetition in 0..repetitions + 3 {
        let start = Instant::now();
        // SAFETY: nothing else uses the storage.
        let logits = unsafe { executor.execute(step, storage, &mut |_| {}) };
        let elapsed = start.elapsed().as_secs_f64();
        if !logits.map_err(failed)?.iter().all(|logit| logit.is_finite()) {
            return Err(not_finite());
        }
        if repetition >= 3 {
            seconds.push(elapsed);
        }
    }
    Ok(middle(seconds))
}

/// Seconds of the launches of a repeated step.
fn on_the_device<D: TimedDevice>(
    executor: &mut DeviceExecutor<D>,
    step: &Batch<'_>,
    pool: Address,
    repetitions: usize,
) -> Result<f64, CudaError> {
    let DeviceExecutor { device, part, weights, buffers, scratch, shape, tables, .. } = executor;
    let mut inputs = Inputs::default();
    // The steps before this one had the same blocks.
    inputs.fill(step, shape, tables);
    // SAFETY: there is room for the largest batch.
    unsafe { device.upload(buffers.inputs, inputs.bytes()) }?;
    let pass = part.pass(weights, buffers, scratch, &inputs, pool);
    let mut work = |device: &mut D| {
        pass.begin(device)?;
        for layer_idx in 0..pass.spec.layers.len() {
            pass.store(device, layer_idx)?;
            pass.finish(device, layer_idx)?;
        }
        pass.norm_wanted(device)?;
        pass.logits(device, 0, inputs.num_wanted)
    };
    let key = inputs.key.expect("a token of each sequence");
    median(repetitions, device, &mut |device| device.repeat(key, &mut work))
}
