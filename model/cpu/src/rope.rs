//! Cosines and sines of a batch's positions.

use baton_cpu_kernels::{Cpu, rotate};
use baton_cpu_threads::Aligned;
use baton_model_spec::RopeSpec;

/// Computed once per batch and shared by all layers.
pub(crate) struct RopeTables {
    tables: Vec<RopeTable>,
}

struct RopeTable {
    frequencies: Vec<f32>,
    factor: f32,
    /// `[rows][2][frequencies]`: cosines, then sines.
    cos_sin: Aligned,
}

impl RopeTables {
    pub(crate) fn new(specs: &[RopeSpec]) -> RopeTables {
        let table = |spec: &RopeSpec| RopeTable {
            frequencies: spec.inverse_frequencies(),
            factor: spec.attention_factor(),
            cos_sin: Aligned::default(),
        };
        RopeTables { tables: specs.iter().map(table).collect() }
    }

    /// Computes the tables for rows at these positions.
    pub(crate) fn prepare(&mut self, positions: &[usize]) {
        for table in &mut self.tables {
            let half = table.frequencies.len();
            let cos_sin = table.cos_sin.grown(positions.len() * 2 * half);
            for (row, &position) in cos_sin.chunks_exact_mut(2 * half).zip(positions) {
                let (cos, sin) = row.split_at_mut(half);
                for i in 0..half {
                    // The angle is rounded to f32 as in the models' training code.
                    let angle = f64::from(position as f32 * table.frequencies[i]);
                    let (s, c) = angle.sin_cos();
                    cos[i] = c as f32 * table.factor;
                    sin[i] = s as f32 * table.factor;
                }
            }
        }
    }

    /// Rotates heads of `head_dim` numbers of a row in place.
    pub(crate) fn rotate(
        &self,
        cpu: &Cpu,
        rope_idx: usize,
        row_idx: usize,
        heads: &mut [f32],
        head_dim: usize,
    ) {
        let table = &self.tables[rope_idx];
        let half = table.frequencies.len();
        let (cos, sin) = table.cos_sin[row_idx * 2 * half..(row_idx + 1) * 2 * half].split_at(half);
        rotate(cpu, heads, head_dim, cos, sin);
    }
}
