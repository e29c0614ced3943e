//! Parses valid and invalid GGUF files. No input may cause harm.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use baton_gguf::testing::Writer;
use baton_gguf::{Gguf, GgufError, TensorType, Value};
use proptest::prelude::*;

/// An allocator that records a thread's largest allocation: a false count in a file must not become one.
struct LargestAllocation;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for LargestAllocation {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no such cell any more.
        let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: LargestAllocation = LargestAllocation;

fn example() -> Writer {
    example_in(Writer::default())
}

fn example_in(writer: Writer) -> Writer {
    writer
        .text("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .f32("llama.rope.freq_base", 10_000.0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .value("a.byte", 0, &[200])
        .value("a.small", 3, &(-3i16).to_le_bytes())
        .value("a.large", 10, &u64::MAX.to_le_bytes())
        .value("a.double", 12, &0.1f64.to_le_bytes())
        .texts("tokenizer.ggml.tokens", ["<s>", "é", ""])
        .i32s("tokenizer.ggml.token_type", &[3, 1, -1])
        .f32s("empty", &[])
        .tensor("blk.0.norm", TensorType::F32, &[3], &[1; 12])
        .tensor("blk.0.q", TensorType::Q8_0, &[2, 64], &[2; 136])
        .tensor("blk.0.experts", TensorType::Bf16, &[2, 3, 5], &[3; 60])
}

#[test]
fn values_and_tensors_are_found() {
    for (version, alignment) in [(3, None), (2, None), (3, Some(8)), (3, Some(4096))] {
        let mut writer = Writer::default().version(version);
        if let Some(alignment) = alignment {
            writer = writer.alignment(alignment);
        }
        let bytes = example_in(writer).tensor("last", TensorType::F16, &[1, 1], &[4; 2]).finish();
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!(gguf.get("general.architecture"), Some(Value::Text("llama")));
        assert_eq!(gguf.get("llama.block_count"), Some(Value::Unsigned(2)));
        assert_eq!(gguf.get("llama.rope.freq_base"), Some(Value::Float(10_000.0)));
        assert_eq!(gguf.get("tokenizer.ggml.add_bos_token"), Some(Value::Bool(true)));
        assert_eq!(gguf.get("a.byte"), Some(Value::Unsigned(200)));
        assert_eq!(gguf.get("a.small"), Some(Value::Signed(-3)));
        assert_eq!(gguf.get("a.large"), Some(Value::Unsigned(u64::MAX)));
        assert_eq!(gguf.get("a.double"), Some(Value::Float(0.1)));
        assert_eq!(gguf.get("absent"), None);
        let array = |key: &str| gguf.get(key).unwrap().as_array().unwrap();
        let tokens: Vec<_> = array("tokenizer.ggml.tokens").iter().map(|value| value.as_text()).collect();
        assert_eq!(tokens, [Some("<s>"), Some("é"), Some("")]);
        let types: Vec<_> = array("tokenizer.ggml.token_type").iter().map(Value::as_float).collect();
        assert_eq!(types, [Some(3.0), Some(1.0), Some(-1.0)]);
        assert!(array("empty").is_empty());

        let names: Vec<_> = gguf.tensors().keys().copied().collect();
        assert_eq!(names, ["blk.0.experts", "blk.0.norm", "blk.0.q", "last"]);
        for (name, shape, size, filling) in [
            ("blk.0.norm", &[3][..], 12, 1),
            ("blk.0.q", &[2, 64], 136, 2),
            ("blk.0.experts", &[2, 3, 5], 60, 3),
            ("last", &[1, 1], 2, 4),
        ] {
            let tensor = &gguf.tensors()[name];
            assert_eq!(tensor.shape, shape, "{name}");
            assert_eq!(bytes[tensor.start..tensor.start + tensor.size_bytes], vec![filling; size], "{name}");
        }
        assert!(gguf.header().len() <= gguf.tensors()["blk.0.norm"].start);
    }
}

#[test]
fn types_have_the_sizes_of_their_blocks() {
    for tensor_type in TensorType::ALL {
        let len = tensor_type.block_len();
        let data = vec![0; 2 * tensor_type.block_bytes()];
        let bytes = Writer::default().tensor("t", *tensor_type, &[2, len], &data).finish();
        assert_eq!(Gguf::parse(&bytes).unwrap().tensors()["t"].size_bytes, data.len(), "{tensor_type:?}");
    }
}

#[test]
fn values_of_another_type_are_refused_with_the_key() {
    let bytes = example().text("long", &"x".repeat(100)).finish();
    let gguf = Gguf::parse(&bytes).unwrap();
    let count = |key: &str| gguf.read(key, "a whole number", Value::as_unsigned);
    assert_eq!(count("llama.block_count"), Ok(Some(2)));
    assert_eq!(count("absent"), Ok(None));
    for (key, found) in [
        ("general.architecture", "\"llama\""),
        ("a.small", "-3"),
        ("tokenizer.ggml.tokens", "an array of 3"),
        ("long", &format!("\"{}\"...", "x".repeat(57))),
    ] {
        let error = count(key).unwrap_err().to_string();
        assert_eq!(error, format!("{key} is {found}, expected a whole number"));
    }
}

#[track_caller]
fn check_refusal(bytes: &[u8], expected: &str) {
    let error = Gguf::parse(bytes).unwrap_err().to_string();
    assert_eq!(error, expected);
}

#[test]
fn other_files_are_refused() {
    check_refusal(b"", "the file starts with \"\", expected \"GGUF\"");
    check_refusal(b"PK\x03\x04....", "the file starts with \"PK\\u{3}\\u{4}\", expected \"GGUF\"");
    check_refusal(b"GGUF", "the file has 4 bytes, expected 8 for the header: truncated");
    let version = |version| Writer::default().version(version).finish();
    check_refusal(&version(1), "GGUF version is 1, expected 2 or 3 in little-endian order");
    check_refusal(
        &version(3u32.swap_bytes()),
        "GGUF version is 50331648, expected 2 or 3 in little-endian order",
    );
}

#[test]
fn false_counts_and_offsets_are_refused() {
    let long = u64::MAX.to_le_bytes();
    let with = |value_type, bytes: &[u8]| Writer::default().value("k", value_type, bytes).finish();
    let huge_array = Writer::default().array("k", 12, u64::MAX, &[]).finish();
    let tensor = |dimensions: &[u64]| Writer::default().raw_tensor("t", 0, dimensions, &[0; 64]).finish();
    let blocks = |dimensions: &[u64]| Writer::default().raw_tensor("t", 8, dimensions, &[0; 34]).finish();
    let dimensions = |found: &str, block: usize| {
        format!(
            "tensor t has dimensions {found}, expected 1 to 4 of at least 1, the first a multiple of {block}"
        )
    };
    let values = "expected a scalar, a string, or an array of these";
    let types = "expected one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, \
                 IQ4_NL, IQ4_XS";
    check_refusal(&with(13, &[0; 8]), &format!("k is of type 13, {values}"));
    check_refusal(
        &Writer::default().array("k", 9, 1, &[0; 32]).finish(),
        &format!("k is of type 9, {values}"),
    );
    check_refusal(&with(8, &[&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()), "k is not UTF-8");
    let twice = Writer::default().u32("k", 1).u32("k", 2).finish();
    check_refusal(&twice, "k occurs twice");
    let twice = Writer::default().tensor("t", TensorType::F32, &[1], &[0; 4]);
    check_refusal(&twice.tensor("t", TensorType::F32, &[1], &[0; 4]).finish(), "t occurs twice");
    check_refusal(&tensor(&[]), &dimensions("[]", 1));
    check_refusal(&tensor(&[1; 5]), &dimensions("[]", 1));
    check_refusal(&tensor(&[4, 0]), &dimensions("[4, 0]", 1));
    check_refusal(&tensor(&[1 << 40, 1 << 40]), &dimensions("[1099511627776, 1099511627776]", 1));
    check_refusal(&tensor(&[1 << 63]), &dimensions("[9223372036854775808]", 1));
    check_refusal(&blocks(&[33]), &dimensions("[33]", 32));
    check_refusal(
        &Writer::default().raw_tensor("t", 17, &[256], &[0; 74]).finish(),
        &format!("tensor t is of type IQ2_XS, {types}"),
    );
    check_refusal(
        &Writer::default().raw_tensor("t", 77, &[1], &[0]).finish(),
        &format!("tensor t is of type number 77, {types}"),
    );
    for alignment in [0, 3, 1 << 21] {
        let bytes = Writer::default().u32("general.alignment", alignment).finish();
        let expected = format!("general.alignment is {alignment}, expected a power of two up to 2^20");
        check_refusal(&bytes, &expected);
    }
    let narrow = Writer::default().tensor("s", TensorType::F32, &[1], &[0; 4]);
    let mut bytes = narrow.tensor("t", TensorType::F32, &[1], &[0; 4]).finish();
    let offset = bytes.windows(8).rposition(|word| word == 32u64.to_le_bytes()).unwrap();
    bytes[offset] = 4;
    check_refusal(&bytes, "tensor t starts at 4, expected a multiple of 32");

    let truncated = |bytes: &[u8]| matches!(Gguf::parse(bytes), Err(GgufError::Truncated { .. }));
    assert!(truncated(&with(8, &long)) && truncated(&huge_array));
    assert!(truncated(&Writer::default().array("k", 8, u64::MAX, &[0; 80]).finish()));
    assert!(truncated(&tensor(&[1 << 40])) && truncated(&tensor(&[17])));
    let mut counts = example().finish();
    for at in [8, 16] {
        let honest = counts.clone();
        counts[at..at + 8].copy_from_slice(&long);
        assert!(Gguf::parse(&counts).is_err());
        counts = honest;
    }
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let bytes = example().finish();
    for len in 0..bytes.len() {
        assert!(Gguf::parse(&bytes[..len]).is_err(), "{len} of {}", bytes.len());
    }
}

/// A change to a file, by damage or by malice.
#[derive(Clone, Debug)]
enum Mutation {
    Flip { at: prop::sample::Index, bit: u8 },
    Set { at: prop::sample::Index, byte: u8 },
    Number { at: prop::sample::Index, number: u64 },
    Cut { at: prop::sample::Index },
    Splice { from: prop::sample::Index, to: prop::sample::Index, len: usize },
}

fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    let at = any::<prop::sample::Index>;
    let numbers = prop_oneof![
        any::<u64>(),
        Just(u64::MAX),
        Just(u64::MAX / 2),
        Just(1 << 32),
        (0u64..64),
        (0u32..64).prop_map(|shift| 1 << shift)
    ];
    prop::collection::vec(
        prop_oneof![
            (at(), 0u8..8).prop_map(|(at, bit)| Mutation::Flip { at, bit }),
            (at(), any::<u8>()).prop_map(|(at, byte)| Mutation::Set { at, byte }),
            (at(), numbers).prop_map(|(at, number)| Mutation::Number { at, number }),
            at().prop_map(|at| Mutation::Cut { at }),
            (at(), at(), 1usize..64).prop_map(|(from, to, len)| Mutation::Splice { from, to, len }),
        ],
        1..6,
    )
}

fn apply(bytes: &mut Vec<u8>, mutation: &Mutation) {
    if bytes.is_empty() {
        return;
    }
    match mutation {
        Mutation::Flip { at, bit } => {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        Mutation::Set { at, byte } => {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        Mutation::Number { at, number } => {
            let at = at.index(bytes.len());
            let end = bytes.len().min(at + 8);
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
        }
        Mutation::Cut { at } => bytes.truncate(at.index(bytes.len())),
        Mutation::Splice { from, to, len } => {
            let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
            let piece = bytes[from..bytes.len().min(from + len)].to_vec();
            bytes.splice(to..to, piece);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 20_000,
        rng_seed: proptest::test_runner::RngSeed::Fixed(0x6775_6667),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// A changed file is parsed or refused. It never determines the size of an allocation.
    #[test]
    fn damaged_files_are_read_or_refused(mutations in mutations()) {
        let mut bytes = example().finish();
        mutations.iter().for_each(|mutation| apply(&mut bytes, mutation));
        LARGEST.set(0);
        let parsed = Gguf::parse(&bytes);
        prop_assert!(LARGEST.get() <= 16 * bytes.len().max(64), "{} for {}", LARGEST.get(), bytes.len());
        if let Ok(gguf) = parsed {
            for value in gguf.metadata().values() {
                let _ = value.to_string();
                if let Some(array) = value.as_array() {
                    prop_assert_eq!(array.iter().count(), array.len());
                }
            }
            for tensor in gguf.tensors().values() {
                prop_assert!(tensor.start + tensor.size_bytes <= bytes.len());
            }
        }
    }
}
