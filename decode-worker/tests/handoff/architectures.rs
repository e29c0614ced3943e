//! Every architecture of `tests/parity/`, loaded as a worker loads it: the tokens of a remote prefill are
//! those that transformers computed, and with every type of KV those of a local one.

use std::{collections::HashMap, path::Path};

use baton_handoff::TransportKind;
use baton_kv_cache::{KvDtype, KvLayout};
use baton_worker::DrafterConfig;

use crate::harness::{Builder, decode, generate, prefill, request};

pub(crate) const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures");

#[tokio::test(flavor = "multi_thread")]
async fn remote_tokens_are_those_of_transformers_for_every_architecture() {
    let (mut num_fixtures, mut num_drafted) = (0, 0);
    for entry in std::fs::read_dir(FIXTURES).expect("the fixtures are part of the repository") {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let recorded = token_ids(&dir.join("expected.safetensors"));
        let (prompt, greedy) = (&recorded["prompt"], &recorded["greedy"]);

        let p = prefill().model(dir.clone()).start().await;
        // The model is its own draft model. Each draft token is accepted if a row does not depend on its batch.
        let drafter = DrafterConfig::Model(dir.clone());
        let d = decode().model(dir).with(|config| {
            config.drafter = Some(drafter);
            // The draft model computes a prompt in one step. How often drafting pays depends on the machine.
            config.token_budget = 512;
        });
        let d = d.start().await;
        let client = d.client().await;
        let num_tokens = greedy.len() as u32;
        let remote = generate(&client, request(prompt, num_tokens, Some(p.peer()))).await.unwrap();
        assert_eq!(remote.finished(), *greedy, "{name}, remote");
        let moved = d.moved(TransportKind::Shm);
        assert!(moved > 0, "{name}");
        // Once, or more often on a machine that is so busy that drafting never seems to pay.
        for salt in 0..8 {
            let mut local = request(prompt, num_tokens, None);
            local.cache_salt = format!("other{salt}");
            assert_eq!(generate(&client, local).await.unwrap().finished(), *greedy, "{name}, local");
            assert_eq!(d.moved(TransportKind::Shm), moved, "{name}");
            let (_, drafts) = d.worker.engine().drafts().expect("it has a drafter");
            assert_eq!(drafts.accepted, drafts.drafted, "{name}");
            num_drafted += drafts.drafted;
            if num_drafted > 0 {
                break;
            }
        }
        p.assert_all_free().await;
        d.assert_all_free().await;
        num_fixtures += 1;
    }
    assert!(num_drafted > 0, "some drafts are tried, even where they do not pay");
    assert!(num_fixtures >= 17, "only {num_fixtures} fixtures were found");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kv_format_is_handed_over_unchanged() {
    let dir = Path::new(FIXTURES).join("llama");
    let prompt = &token_ids(&dir.join("expected.safetensors"))["prompt"];
    for dtype in KvDtype::ALL {
        for kind in [TransportKind::Shm, TransportKind::Tcp] {
            let p = prefill().model(dir.clone()).kv_dtype(dtype).transport(kind).start().await;
            let d = decode().model(dir.clone()).kv_dtype(dtype).transport(kind).start().await;
            let client = d.client().await;
            let remote = generate(&client, request(prompt, 12, Some(p.peer()))).await.unwrap().finished();
            let format = d.worker.kv_format();
            let layout = KvLayout {
                block_size: format.block_size,
                num_layers: format.num_layers,
                num_kv_heads: format.num_kv_heads,
                head_dim: format.head_dim,
                dtype,
            };
            let expected = layout.num_blocks_for(prompt.len()) * layout.block_bytes();
            assert_eq!(d.moved(kind), expected as u64, "{}", dtype.name());
            let mut local = request(prompt, 12, None);
            local.cache_salt = "other".into();
            let local = generate(&client, local).await.unwrap().finished();
            assert_eq!(remote, local, "{} over {}", dtype.name(), kind.name());
            p.assert_all_free().await;
            d.assert_all_free().await;
        }
    }
}

/// The degrees of the prefill and the decode side. The KV of the whole model is handed over.
#[tokio::test(flavor = "multi_thread")]
async fn workers_of_different_tensor_parallel_degrees_hand_over_to_each_other() {
    let degrees = [("llama", 2, 1), ("gemma3", 1, 2), ("qwen3-moe", 4, 2), ("llama-bf16-sharded", 2, 4)];
    for (name, of_prefill, of_decode) in degrees {
        let dir = Path::new(FIXTURES).join(name);
        let recorded = token_ids(&dir.join("expected.safetensors"));
        let (prompt, greedy) = (&recorded["prompt"], &recorded["greedy"]);
        for kind in [TransportKind::Shm, TransportKind::Tcp] {
            let by = |builder: Builder, num_ranks: usize| {
                builder.model(dir.clone()).transport(kind).with(|config| {
                    config.tensor_parallel = num_ranks;
                    config.threads = Some(num_ranks);
                })
            };
            let p = by(prefill(), of_prefill).start().await;
            let d = by(decode(), of_decode).start().await;
            let client = d.client().await;
            let num_tokens = greedy.len() as u32;
            let remote = generate(&client, request(prompt, num_tokens, Some(p.peer()))).await.unwrap();
            assert_eq!(remote.finished(), *greedy, "{name} from {of_prefill} to {of_decode}");
            assert!(d.moved(kind) > 0, "{name}");
            p.assert_all_free().await;
            d.assert_all_free().await;
        }
    }
}

/// The i32 tensors of a safetensors file: a length, a header of JSON, the data.
pub(crate) fn token_ids(path: &Path) -> HashMap<String, Vec<u32>> {
    let file = std::fs::read(path).unwrap();
    let (length, rest) = file.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
    let ids = header.into_iter().filter(|(_, tensor)| tensor["dtype"] == "I32").map(|(name, tensor)| {
        let offset = |idx: usize| tensor["data_offsets"][idx].as_u64().unwrap() as usize;
        let words = data[offset(0)..offset(1)].chunks_exact(4);
        (name, words.map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect())
    });
    ids.collect()
}
