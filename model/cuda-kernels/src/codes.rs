//! Codes pieces of KV for their way, and decodes them: `kernels/codes.cu`, what [`WireCodec`] does on processors.

use baton_kv_cache::{INT4_GROUP, KvDtype, KvLayout, WireCodec, WireFormat};

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};
use crate::kv_type;

/// For pools of this layout.
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

/// Of pools of sixteen bits, and of eight, which INT4 makes smaller.
pub fn sources() -> Vec<KernelSource> {
    let layout = |dtype| KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim: 128, dtype };
    [KvDtype::Bf16, KvDtype::Fp8].map(|dtype| source(&layout(dtype))).into()
}

/// Which way pieces go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CodeDirection {
    /// From the pool.
    Encoded,
    /// To the pool.
    Decoded,
}

/// What pieces are coded as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CodeFormat {
    Int8 = 1,
    Int4 = 2,
}

impl CodeFormat {
    /// `None`: there is no kernel for it, so that processors do it.
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

/// Codes pieces that lie anywhere in a pool to others that lie one behind the other, or the reverse. The bytes are those that
/// [`WireCodec`] gives; of NaN they may differ.
///
/// Moves the elements of both forms once: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CodePieces {
    pub pool: Address,
    /// `[pieces]`, u64: where each begins, counted from `pool`.
    pub offsets: Address,
    /// `[pieces]`, as long as [`WireCodec::piece_bytes`] says.
    pub coded: Address,
    pub num_pieces: u32,
    /// Of a piece, of K and V: twice the kv heads.
    pub num_heads: u32,
    pub form: CodeFormat,
    pub direction: CodeDirection,
}

// SAFETY: as `CodePieces` in the file.
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
        // A block of threads goes round a head: of heads there are enough.
        LaunchShape { grid: [self.num_pieces, self.num_heads, 1], threads: 128, shared_bytes: 0 }
    }
}
