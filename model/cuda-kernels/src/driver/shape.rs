//! What the algorithm of a product depends on.

use crate::device::{Fp8Product, Fp8Scaling, Product};

/// Everything that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape {
    pub num_rows: u64,
    pub num_out: u64,
    pub num_in: u64,
    pub left_stride: u64,
    pub out_stride: u64,
    pub is_out_f32: bool,
    pub is_added: bool,
    pub numbers: Numbers,
}

/// Number format of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Numbers {
    Bf16,
    /// E4M3. Scales of rows and of blocks need CUDA 12.9 and Hopper.
    Fp8(Fp8Scaling),
}

impl Numbers {
    pub const ALL: [Numbers; 4] = [
        Numbers::Bf16,
        Numbers::Fp8(Fp8Scaling::None),
        Numbers::Fp8(Fp8Scaling::Rows),
        Numbers::Fp8(Fp8Scaling::Blocks),
    ];
}

impl Shape {
    pub fn of(product: &Product) -> Shape {
        Shape {
            num_rows: product.num_rows,
            num_out: product.num_out,
            num_in: product.num_in,
            left_stride: product.left_stride,
            out_stride: product.out_stride,
            is_out_f32: product.is_out_f32 != 0,
            is_added: product.beta != 0.0,
            numbers: Numbers::Bf16,
        }
    }

    pub fn of_fp8(product: &Fp8Product) -> Shape {
        Shape {
            num_rows: product.num_rows,
            num_out: product.num_out,
            num_in: product.num_in,
            left_stride: product.num_in,
            out_stride: product.num_out,
            is_out_f32: false,
            is_added: false,
            numbers: Numbers::Fp8(product.scaling),
        }
    }

    /// The shape whose algorithm serves this one: the next power of two of rows. A start runs steps of these sizes.
    pub fn padded(self) -> Shape {
        Shape { num_rows: self.num_rows.next_power_of_two(), ..self }
    }
}
