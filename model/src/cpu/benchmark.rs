//! Kernels on made-up data, for `cargo bench`. Not part of the crate's interface.

use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};

use super::attention::{AttentionShape, attend};
use super::panels::{Output, PanelsRef, multiply, packed_bytes};
use super::simd::{Dtype, Isa};
use super::{Aligned, Cpu};
use crate::BatchSequence;

/// `C[m][n] = A[m][k] W[n][k]^T` over packed weights.
pub struct Gemm {
    cpu: Cpu,
    m: usize,
    n: usize,
    k: usize,
    dtype: Dtype,
    a: Aligned,
    w: Aligned,
    out: Vec<f32>,
}

impl Gemm {
    /// A product on `threads` threads.
    pub fn new(m: usize, n: usize, k: usize, dtype: Dtype, threads: usize) -> Gemm {
        let cpu = Cpu::new(Isa::detect(), threads).expect("threads start");
        let mut w = Aligned::default();
        // Not zeroes, which the kernel might find in one page of memory that stands for all.
        w.grown(packed_bytes(dtype, n, k) / 4).fill(1.0);
        let mut a = Aligned::default();
        a.grown(m * k).fill(1.0);
        Gemm { cpu, m, n, k, dtype, a, w, out: vec![0.0; m * n] }
    }

    /// Multiplies once.
    pub fn run(&mut self) -> f32 {
        // SAFETY: any bytes are f32.
        let bytes = unsafe {
            std::slice::from_raw_parts(self.w.as_ptr().cast(), packed_bytes(self.dtype, self.n, self.k))
        };
        let w = PanelsRef::new(bytes, self.dtype, self.n, self.k);
        multiply(&mut self.cpu, self.m, &self.a, w, None, &mut self.out, Output::Store);
        self.out[0]
    }
}

/// One layer's attention of one sequence.
pub struct Attention {
    cpu: Cpu,
    shape: AttentionShape,
    storage: BlockStorage,
    blocks: Vec<BlockId>,
    tokens: Vec<u32>,
    start_idx: usize,
    queries: Vec<f32>,
    out: Vec<f32>,
}

impl Attention {
    /// `num_rows` rows that end a context of `context` tokens, with 32 heads of 128 and 8 kv heads.
    pub fn new(num_rows: usize, context: usize, dtype: KvDtype, threads: usize) -> Attention {
        let shape = AttentionShape {
            num_heads: 32,
            num_kv_heads: 8,
            head_dim: 128,
            scale: 0.1,
            soft_cap: None,
            window: None,
        };
        let layout = KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 8, head_dim: 128, dtype };
        let num_blocks = context.div_ceil(16);
        let width = shape.num_heads * shape.head_dim;
        Attention {
            cpu: Cpu::new(Isa::detect(), threads).expect("threads start"),
            shape,
            storage: BlockStorage::new(layout, num_blocks).expect("memory for the blocks"),
            blocks: (0..num_blocks as u32).map(BlockId).collect(),
            tokens: vec![0; num_rows],
            start_idx: context - num_rows,
            queries: vec![1.0; num_rows * width],
            out: vec![0.0; num_rows * width],
        }
    }

    /// Attends once.
    pub fn run(&mut self) -> f32 {
        let sequence = BatchSequence {
            tokens: &self.tokens,
            start_idx: self.start_idx,
            blocks: &self.blocks,
            num_logits: 0,
        };
        let stride = self.shape.num_heads * self.shape.head_dim;
        // SAFETY: nobody else uses the storage.
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
