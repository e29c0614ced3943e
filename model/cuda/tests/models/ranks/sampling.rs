//! The first of several emulated devices samples tokens, and all devices use them. The tokens are compared with the
//! host's samples from the same logits.

use baton_cuda_emulator::emulated_device::Sums;
use baton_cuda_emulator::models::devices;
use baton_kv_cache::{BlockId, KvDtype};
use baton_model_cuda::inputs::BatchLimits;
use baton_model_spec::{Batch, BatchSequence, SampledRow, SampledToken, TokenSampling};

use super::{GROUPED, Machine, NUM_LAYERS, TIED, Tiny, argmax, load_parts, prompt};

const LIMITS: BatchLimits =
    BatchLimits { num_rows: 12, num_sequences: 3, context_length: 64, num_blended: 0 };

fn machine(tiny: Tiny, num_ranks: usize) -> Machine {
    let dir = tiny.write();
    Machine::new(devices(load_parts(dir.path(), num_ranks, KvDtype::Bf16), Sums::Late), LIMITS)
}

/// The layers that were reported during a step.
fn launch(
    machine: &mut Machine,
    sequences: &[BatchSequence<'_>],
    samplings: &[TokenSampling<'_>],
    follows: &[usize],
) -> (bool, Vec<usize>) {
    let batch = Batch { sequences: sequences.to_vec() };
    let executor = machine.executor.sampling().expect("ranks sample");
    let mut layers = Vec::new();
    let mut on_layer = |layer_idx| layers.push(layer_idx);
    // SAFETY: nothing else uses the storage.
    let launched = unsafe { executor.launch(&batch, samplings, follows, &machine.storage, &mut on_layer) };
    (launched.unwrap(), layers)
}

/// The remaining layers are reported.
fn collect(machine: &mut Machine, mut layers: Vec<usize>) -> Vec<SampledRow<'_>> {
    let answers = machine.executor.sampling().expect("ranks sample").collect(&mut |idx| layers.push(idx));
    assert_eq!(layers, (0..NUM_LAYERS).collect::<Vec<_>>(), "layers, in order and once");
    answers.unwrap()
}

fn token(answer: &SampledRow<'_>) -> u32 {
    match answer {
        SampledRow::Sampled(Ok(SampledToken { id, .. })) => *id,
        other => panic!("no token: {other:?}"),
    }
}

/// More rows than the buffer of logits holds, and one row that the host samples.
#[test]
fn tokens_of_ranks_match_their_logits() {
    let mut machine = machine(GROUPED, 2);
    let (tokens, blocks) = (prompt(12, 1), machine.place(12));
    let sequence = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &blocks, num_logits: 12 };
    let logits = machine.run(vec![sequence]).unwrap();
    let mut samplings = vec![TokenSampling::default(); 12];
    samplings[5].logprobs = Some(3);
    let likeliest = [argmax(&logits[11])];
    samplings[11].masked = likeliest[..].into();
    let (samples_all, layers) = launch(&mut machine, &[sequence], &samplings, &[]);
    assert!(samples_all);
    for (row_idx, (answer, logits)) in collect(&mut machine, layers).iter().zip(&logits).enumerate() {
        let SampledRow::Sampled(Ok(sampled)) = answer else { panic!("row {row_idx}: {answer:?}") };
        assert_eq!(sampled.logprobs.as_ref().map(|it| it.top.len()), (row_idx == 5).then_some(3));
        let mut logits = logits.clone();
        if row_idx == 11 {
            logits[likeliest[0] as usize] = f32::NEG_INFINITY;
        }
        assert_eq!(sampled.id, argmax(&logits), "row {row_idx}");
    }
    let twice = [(3, 1.0), (3, 1.0)];
    samplings[7].logit_bias = twice[..].into();
    let (samples_all, layers) = launch(&mut machine, &[sequence], &samplings, &[]);
    assert!(!samples_all);
    for (row_idx, (answer, logits)) in collect(&mut machine, layers).iter().zip(&logits).enumerate() {
        let is_left = matches!(answer, SampledRow::Logits(row) if *row == logits);
        assert_eq!(is_left, row_idx == 7, "row {row_idx}: {answer:?}");
    }
}

/// Each step follows the one before in another order, and then without its last row. A rank with other tokens would
/// add wrong parts to the sums.
#[test]
fn ranks_step_ahead_of_the_host() {
    for (tiny, num_ranks) in [(GROUPED, 2), (TIED, 2)] {
        let mut machine = machine(tiny, num_ranks);
        let prompts = [prompt(4, 1), prompt(5, 2), prompt(3, 3)];
        let blocks: Vec<Vec<BlockId>> = prompts.iter().map(|_| machine.place(16)).collect();
        let sequences: Vec<_> = prompts
            .iter()
            .zip(&blocks)
            .map(|(tokens, blocks)| BatchSequence { tokens, start_idx: 0, blocks, num_logits: 1 })
            .collect();
        let (_, mut layers) = launch(&mut machine, &sequences, &vec![TokenSampling::default(); 3], &[]);
        let mut starts = [4, 5, 3];
        let mut members: Vec<usize> = vec![0, 1, 2];
        let mut found = vec![];
        for step in 0..4 {
            let next: Vec<usize> =
                if step < 2 { members.iter().rev().copied().collect() } else { vec![1, 0] };
            let follows: Vec<usize> =
                next.iter().map(|it| members.iter().position(|member| member == it).unwrap()).collect();
            let unknown = [u32::MAX];
            let sequences: Vec<_> = next
                .iter()
                .map(|&it| BatchSequence {
                    tokens: &unknown,
                    start_idx: starts[it],
                    blocks: &blocks[it],
                    num_logits: 1,
                })
                .collect();
            let (samples_all, told) =
                launch(&mut machine, &sequences, &vec![TokenSampling::default(); next.len()], &follows);
            assert!(samples_all);
            let tokens: Vec<u32> =
                collect(&mut machine, std::mem::replace(&mut layers, told)).iter().map(token).collect();
            found.push((members, starts, tokens));
            next.iter().for_each(|&it| starts[it] += 1);
            members = next;
        }
        let tokens: Vec<u32> = collect(&mut machine, layers).iter().map(token).collect();
        found.push((members, starts, tokens));

        // One step after the other, sampled by the host, on the same ranks.
        let mut last: [Vec<u32>; 3] = prompts;
        for (members, ends, tokens) in found {
            let sequences = members.iter().map(|&it| BatchSequence {
                tokens: &last[it],
                start_idx: ends[it] - last[it].len(),
                blocks: &blocks[it],
                num_logits: 1,
            });
            let logits = machine.run(sequences.collect()).unwrap();
            let expected: Vec<u32> = logits.iter().map(|row| argmax(row)).collect();
            assert_eq!(tokens, expected, "{tiny:?}");
            members.iter().zip(&tokens).for_each(|(&it, &token)| last[it] = vec![token]);
        }
    }
}
