//! Encodes pieces of KV for the transfer and decodes them: `kernels/codes.cu`. [`WireCodec`] does the same on
//! processors.

use baton_kv_cache::{INT4_GROUP, KvDtype, KvLayout, WireCodec, WireFormat};

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};
use crate::kv_type;

/// The kernels for pools of this layout.
pub fn source(layout: &KvLayout) -> KernelSource {
    KernelSource {
        file: "codes.cu",
        defines: vec![
            ("HEAD_DIM", layout.head_dim as u64),
            ("BLOCK_SIZE", layout.block_size as u64),
            ("OWN", kv_type::number_of(layout.dtype)),
        ],
    }
}

/// The kernels for pools of 16-bit elements, and of 8-bit elements, which INT4 halves.
pub fn sources() -> Vec<KernelSource> {
    let layout = |dtype| KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim: 128, dtype };
    [KvDtype::Bf16, KvDtype::Fp8].map(|dtype| source(&layout(dtype))).into()
}

/// Whether pieces are encoded or decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CodeDirection {
    /// Pieces are read from the pool.
    Encoded,
    /// Pieces are written to the pool.
    Decoded,
}

/// The format of an encoded piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CodeFormat {
    Int8 = 1,
    Int4 = 2,
}

impl CodeFormat {
    /// Returns `None` where there is no kernel. Processors then do the work.
    pub fn of(codec: &WireCodec) -> Option<CodeFormat> {
        match codec.format() {
            WireFormat::AsIs => None,
            WireFormat::Int8 => Some(CodeFormat::Int8),
            WireFormat::Int4 => {
                codec.layout().head_dim.is_multiple_of(INT4_GROUP).then_some(CodeFormat::Int4)
            }
        }
    }
}

/// Encodes pieces from anywhere in a pool into consecutive pieces, or decodes them back. The bytes equal those of
/// [`WireCodec`], except for NaN.
///
/// Moves the elements of both forms once: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CodePieces {
    pub pool: Address,
    /// `[pieces]`, u64: the start of each piece, counted from `pool`.
    pub offsets: Address,
    /// `[pieces][WireCodec::piece_bytes]`.
    pub coded: Address,
    pub num_pieces: u32,
    /// Heads of a piece, of keys and values together: twice the kv heads.
    pub num_heads: u32,
    pub form: CodeFormat,
    pub direction: CodeDirection,
}

// SAFETY: the fields are those of `CodePieces` in the kernel file.
unsafe impl Kernel for CodePieces {
    const NAME: &'static str = "code_pieces";

    fn name(&self) -> &'static str {
        match (self.direction, self.form) {
            (CodeDirection::Encoded, CodeFormat::Int8) => "encode_int8",
            (CodeDirection::Encoded, CodeFormat::Int4) => "encode_int4",
            (CodeDirection::Decoded, CodeFormat::Int8) => "decode_int8",
            (CodeDirection::Decoded, CodeFormat::Int4) => "decode_int4",
        }
    }

    fn shape(&self) -> LaunchShape {
        // One block of threads per head: there are enough heads to fill a device.
        LaunchShape { grid: [self.num_pieces, self.num_heads, 1], threads: 128, shared_bytes: 0 }
    }
}
