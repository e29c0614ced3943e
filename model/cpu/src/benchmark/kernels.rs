//! Kernels on generated data.

use baton_cpu_attention::{AttentionShape, attend};
use baton_cpu_kernels::{Cpu, Isa, Output, PanelFormat, PanelsRef, has_pairs, multiply};
use baton_cpu_threads::Aligned;
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_model_spec::{BatchSequence, FloatDtype, Quantisation};
use memmap2::MmapMut;

use super::peaks::{Peak, memory};

/// A format of packed weights to measure.
#[derive(Clone, Copy, Debug)]
pub struct Weights(PanelFormat);

impl Weights {
    /// The formats that this CPU has kernels for, with their names.
    pub fn available(isa: Isa) -> Vec<(&'static str, Weights)> {
        let integers = |text: &str| text.parse::<Quantisation>().expect("one of ours").format();
        let mut all = vec![("bf16", PanelFormat::Floats(FloatDtype::Bf16))];
        if has_pairs(isa) {
            all.push(("bf16_pairs", PanelFormat::Bf16Pairs));
        }
        all.push(("int8", PanelFormat::Integers(integers("int8"))));
        all.push(("int8:256", PanelFormat::Integers(integers("int8:256"))));
        all.push(("int4", PanelFormat::Integers(integers("int4"))));
        all.into_iter().map(|(name, format)| (name, Weights(format))).collect()
    }

    /// The peak rate that bounds their products from 8 rows on.
    pub fn peak(self, isa: Isa) -> Peak {
        Peak::of_products(isa, self.0)
    }

    /// Bytes of a matrix.
    pub fn matrix_bytes(self, n: usize, k: usize) -> usize {
        self.0.matrix_bytes(n, k)
    }
}

/// `C[m][n] = A[m][k] W[n][k]^T` over packed weights.
pub struct Gemm {
    cpu: Cpu,
    m: usize,
    n: usize,
    k: usize,
    weights: Weights,
    a: Aligned,
    /// The matrices, one after the other.
    w: MmapMut,
    out: Aligned,
}

impl Gemm {
    /// Products with `num` matrices on `threads` threads.
    pub fn new(
        isa: Isa,
        (m, n, k): (usize, usize, usize),
        weights: Weights,
        num: usize,
        threads: usize,
    ) -> Gemm {
        let cpu = Cpu::new(isa, threads).expect("threads start");
        let w = memory(num * weights.matrix_bytes(n, k));
        let mut a = Aligned::default();
        a.grown(m * k).fill(1.0);
        Gemm { cpu, m, n, k, weights, a, w, out: Aligned::default() }
    }

    /// Multiplies with each matrix once.
    pub fn run(&mut self) -> f32 {
        let matrix_bytes = self.weights.matrix_bytes(self.n, self.k);
        for matrix in self.w.chunks_exact(matrix_bytes) {
            let w = PanelsRef::new(matrix, self.weights.0, self.n, self.k);
            multiply(&mut self.cpu, self.m, &self.a, w, None, self.out.grown(self.m * self.n), Output::Store);
        }
        self.out[0]
    }
}

/// Attention of one sequence in one layer.
pub struct AttentionRun {
    cpu: Cpu,
    shape: AttentionShape,
    storage: BlockStorage,
    blocks: Vec<BlockId>,
    tokens: Vec<u32>,
    start_idx: usize,
    queries: Vec<f32>,
    out: Vec<f32>,
}

impl AttentionRun {
    /// Attention of the last `num_rows` rows of a context of `context` tokens, with 32 heads of 64 and 8 KV heads.
    /// `pairs` of bf16 need a CPU that has [weights](Weights::available) of that kind.
    pub fn new(
        isa: Isa,
        num_rows: usize,
        context: usize,
        dtype: KvDtype,
        pairs: bool,
        threads: usize,
    ) -> AttentionRun {
        let shape = AttentionShape {
            num_heads: 32,
            num_kv_heads: 8,
            first_kv_head: 0,
            head_dim: 64,
            scale: 0.1,
            soft_cap: None,
            window: None,
            bf16_pairs: pairs,
        };
        let layout = KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 8, head_dim: 64, dtype };
        assert!(!pairs || has_pairs(isa), "this CPU does not multiply bf16");
        let num_blocks = context.div_ceil(16);
        let width = shape.num_heads * shape.head_dim;
        let storage = BlockStorage::new(layout, num_blocks).expect("memory for the blocks");
        // As workers do with their pools: small pages would cost a third of the rate.
        storage.populate_all().expect("memory for the blocks");
        AttentionRun {
            cpu: Cpu::new(isa, threads).expect("threads start"),
            shape,
            storage,
            blocks: (0..num_blocks as u32).map(BlockId).collect(),
            tokens: vec![0; num_rows],
            start_idx: context - num_rows,
            queries: vec![1.0; num_rows * width],
            out: vec![0.0; num_rows * width],
        }
    }

    /// Runs attention once.
    pub fn run(&mut self) -> f32 {
        let sequence = BatchSequence {
            tokens: &self.tokens,
            start_idx: self.start_idx,
            blocks: &self.blocks,
            num_logits: 0,
        };
        let stride = self.shape.num_heads * self.shape.head_dim;
        // SAFETY: no other code uses the storage, and `new` has checked that the CPU has pairs if they are multiplied.
        unsafe {
            attend(
                &mut self.cpu,
                &self.shape,
                &self.storage,
                0,
                &[sequence],
                &[0],
                &self.queries,
                stride,
                &mut self.out,
            );
        }
        self.out[0]
    }
}
