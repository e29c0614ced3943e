//! Tokens that a device samples, against the logits of the same steps.

use baton_cuda_emulator::test_device::TestDevice;
use baton_cuda_kernels::device::Fp8Products;
use baton_kv_cache::{BlockId, KvDtype};
use baton_model_cuda::executor::DeviceExecutor;
use baton_model_spec::{
    Batch, BatchSequence, DraftedCount, Executor, InvalidLogits, SampledRow, SampledToken, TokenCount,
    TokenSampling,
};

use super::whole::{Machine, argmax, loaded, prompt};

type OnDevice = Machine<DeviceExecutor<TestDevice>>;

fn on_device() -> OnDevice {
    Machine::device(loaded("qwen3", KvDtype::Bf16, 8), 64, Fp8Products::None)
}

fn launch(
    machine: &mut OnDevice,
    sequences: &[BatchSequence<'_>],
    samplings: &[TokenSampling<'_>],
    follows: &[usize],
) -> bool {
    let batch = Batch { sequences: sequences.to_vec() };
    let executor = machine.executor.sampling().unwrap();
    // SAFETY: nothing else uses the storage.
    unsafe { executor.launch(&batch, samplings, follows, &machine.storage, &mut |_| {}) }.unwrap()
}

fn collect(machine: &mut OnDevice) -> Vec<SampledRow<'_>> {
    machine.executor.sampling().unwrap().collect(&mut |_| {}).unwrap()
}

fn one<'a>(token: &'a u32, start_idx: usize, blocks: &'a [BlockId]) -> BatchSequence<'a> {
    BatchSequence { tokens: std::slice::from_ref(token), start_idx, blocks, num_logits: 1 }
}

fn token(answer: &SampledRow<'_>) -> u32 {
    match answer {
        SampledRow::Sampled(Ok(SampledToken { id, .. })) => *id,
        other => panic!("no token: {other:?}"),
    }
}

#[test]
fn tokens_match_the_logits() {
    let mut machine = on_device();
    let (tokens, blocks) = (prompt(30, 1), machine.place(30));
    // More rows than the buffer of logits holds.
    let sequence = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &blocks, num_logits: 12 };
    let logits = machine.run(vec![sequence]);
    let mut samplings = vec![TokenSampling::default(); 12];
    samplings[5].logprobs = Some(3);
    samplings[11].logprobs = Some(0);
    let likeliest = [argmax(&logits[6]) as u32];
    samplings[6].masked = likeliest[..].into();
    assert!(launch(&mut machine, &[sequence], &samplings, &[]));
    let mut layers = Vec::new();
    let executor = machine.executor.sampling().unwrap();
    let answers = executor.collect(&mut |layer_idx| layers.push(layer_idx)).unwrap();
    assert!(layers.is_sorted(), "those that were not told of before: {layers:?}");
    for (row_idx, (answer, logits)) in answers.iter().zip(&logits).enumerate() {
        let mut logits = logits.clone();
        let SampledRow::Sampled(Ok(sampled)) = answer else { panic!("row {row_idx}: {answer:?}") };
        assert_eq!(
            sampled.logprobs.as_ref().map(|it| it.top.len()),
            [None, Some(3), Some(0)][match row_idx {
                5 => 1,
                11 => 2,
                _ => 0,
            }]
        );
        if let Some(logprobs) = &sampled.logprobs {
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let expected = f64::from(logits[sampled.id as usize]) - sum.ln();
            assert!((f64::from(logprobs.logprob) - expected).abs() < 1e-4, "{logprobs:?}: {expected}");
            assert!(logprobs.top.first().is_none_or(|top| top.0 == sampled.id));
        }
        if row_idx == 6 {
            logits[likeliest[0] as usize] = f32::NEG_INFINITY;
        }
        assert_eq!(sampled.id as usize, argmax(&logits), "row {row_idx}");
    }

    // Rows with unsupported settings come back as logits.
    let twice = [(3, 1.0), (3, 1.0)];
    let many: Vec<_> = (0..600_000).map(|_| 7).collect();
    (samplings[2].logit_bias, samplings[10].logprobs) = (twice[..].into(), Some(21));
    (samplings[3].masked, samplings[9].masked) = (many[..].into(), many[..].into());
    // A row that the host reads.
    samplings[4].on_host = true;
    assert!(!launch(&mut machine, &[sequence], &samplings, &[]));
    for (row_idx, (answer, logits)) in collect(&mut machine).iter().zip(&logits).enumerate() {
        let is_left = [2, 4, 9, 10].contains(&row_idx);
        assert_eq!(matches!(answer, SampledRow::Logits(row) if *row == logits), is_left, "row {row_idx}");
        assert_eq!(matches!(answer, SampledRow::Sampled(Ok(_))), !is_left, "row {row_idx}: {answer:?}");
    }
    // The likeliest token of row 7 that a mask allows; no mask allows a token of row 8. These rows fit into the buffer of logits.
    let num_words = logits[0].len().div_ceil(32);
    let few = BatchSequence { num_logits: 6, ..sequence };
    let mut samplings = vec![TokenSampling::default(); 6];
    (samplings[1].is_masked, samplings[2].is_masked) = (true, true);
    samplings[1].logprobs = Some(2);
    assert!(launch(&mut machine, &[few], &samplings, &[]));
    let masks = [vec![0xcccc_cccc; num_words], vec![0; num_words]].concat();
    machine.executor.sampling().unwrap().mask(&masks).unwrap();
    let answers = collect(&mut machine);
    let mut allowed = logits[7].clone();
    allowed
        .iter_mut()
        .enumerate()
        .filter(|(token, _)| token % 4 < 2)
        .for_each(|(_, it)| *it = f32::NEG_INFINITY);
    let SampledRow::Sampled(Ok(sampled)) = &answers[1] else { panic!("{:?}", answers[1]) };
    assert_eq!(sampled.id as usize, argmax(&allowed));
    assert_eq!(sampled.logprobs.as_ref().unwrap().top[0].0 as usize, argmax(&logits[7]), "before the mask");
    assert_eq!(answers[2], SampledRow::Sampled(Err(InvalidLogits)));
    assert_eq!(token(&answers[3]) as usize, argmax(&logits[9]));
    // More rows than that come back: the host has the masks.
    let mut samplings = vec![TokenSampling::default(); 12];
    samplings[7].is_masked = true;
    assert!(!launch(&mut machine, &[sequence], &samplings, &[]));
    machine.executor.sampling().unwrap().mask(&masks[..num_words]).unwrap();
    assert_eq!(collect(&mut machine)[7], SampledRow::Logits(&logits[7]));

    // Row 1 excludes all tokens.
    let all: Vec<u32> = (0..logits[0].len() as u32).collect();
    let mut samplings = vec![TokenSampling::default(); 12];
    samplings[1].masked = all[..].into();
    assert!(launch(&mut machine, &[sequence], &samplings, &[]));
    assert_eq!(collect(&mut machine)[1], SampledRow::Sampled(Err(InvalidLogits)));
}

#[test]
fn drafts_are_counted_where_the_list_has_their_tokens_or_after_it() {
    let mut machine = on_device();
    let (tokens, blocks) = (prompt(30, 1), machine.place(30));
    let sequence = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &blocks, num_logits: 4 };
    let logits = machine.run(vec![sequence]);
    let likeliest: Vec<u32> = logits.iter().map(|row| argmax(row) as u32).collect();
    let row = |listed: &[u32], drafted: &[(usize, u32)]| TokenSampling {
        frequency_penalty: 1000.0,
        counts: listed.iter().map(|&token| TokenCount { token, num_output: 0 }).collect(),
        drafted: drafted
            .iter()
            .map(|&(idx, token)| DraftedCount { idx, count: TokenCount { token, num_output: 1 } })
            .collect(),
        ..TokenSampling::default()
    };
    // A token that is no row's likeliest.
    let other = (0..).find(|token| !likeliest.contains(token)).unwrap();
    let samplings = [
        row(&[other, likeliest[0]], &[(1, likeliest[0])]),
        row(&[other], &[(0, other), (1, likeliest[1])]),
        row(&[], &[(0, likeliest[2])]),
        row(&[other, likeliest[3]], &[]),
    ];
    assert!(launch(&mut machine, &[sequence], &samplings, &[]));
    let sampled: Vec<usize> = collect(&mut machine).iter().map(|row| token(row) as usize).collect();
    let mut expected = logits;
    for (row_idx, row) in expected.iter_mut().enumerate().take(3) {
        samplings[row_idx].drafted.iter().for_each(|it| row[it.count.token as usize] -= 1000.0);
    }
    assert_eq!(sampled, expected.iter().map(|row| argmax(row)).collect::<Vec<_>>());
}

#[test]
fn a_step_is_launched_before_the_last_one_is_collected() {
    let mut machine = on_device();
    let prompts = [prompt(13, 1), prompt(22, 2), prompt(9, 3)];
    let blocks: Vec<Vec<BlockId>> = prompts.iter().map(|_| machine.place(40)).collect();
    let all = prompts.iter().zip(&blocks);
    let sequences: Vec<_> = all
        .clone()
        .map(|(tokens, blocks)| BatchSequence { tokens, start_idx: 0, blocks, num_logits: 1 })
        .collect();
    assert!(launch(
        &mut machine,
        &sequences,
        &[TokenSampling::default(), TokenSampling::default(), TokenSampling::default()],
        &[]
    ));
    let mut last: Vec<u32> = collect(&mut machine).iter().map(token).collect();
    let mut starts = [13, 22, 9];
    // The third sequence ends after a while.
    let mut members: Vec<usize> = vec![0, 1, 2];
    let mut found = vec![];
    let first: Vec<_> = members.iter().map(|&it| one(&last[it], starts[it], &blocks[it])).collect();
    assert!(launch(&mut machine, &first, &vec![TokenSampling::default(); 3], &[]));
    for step in 0..6 {
        let next: Vec<usize> = if step < 3 { members.iter().rev().copied().collect() } else { vec![1, 0] };
        let follows: Vec<usize> =
            next.iter().map(|it| members.iter().position(|member| member == it).unwrap()).collect();
        let sequences: Vec<_> = next.iter().map(|&it| one(&u32::MAX, starts[it] + 1, &blocks[it])).collect();
        assert!(launch(&mut machine, &sequences, &vec![TokenSampling::default(); next.len()], &follows));
        let tokens: Vec<u32> = collect(&mut machine).iter().map(token).collect();
        found.push((members.clone(), starts, tokens));
        next.iter().for_each(|&it| starts[it] += 1);
        members = next;
    }
    let tokens: Vec<u32> = collect(&mut machine).iter().map(token).collect();
    found.push((members, starts, tokens));

    // One step after the other, sampled by the host.
    for (members, starts, tokens) in found {
        let sequences: Vec<_> = members.iter().map(|&it| one(&last[it], starts[it], &blocks[it])).collect();
        let logits = machine.run(sequences);
        let expected: Vec<u32> = logits.iter().map(|row| argmax(row) as u32).collect();
        assert_eq!(tokens, expected);
        members.iter().zip(&tokens).for_each(|(&it, &token)| last[it] = token);
    }
}
