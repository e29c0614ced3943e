//! Compressed KV on the wire: the encoding of a piece where the link between two workers is the bottleneck.
//!
//! ```text
//! encoded piece [k|v][kv_head]   each | [token] codes | [token] scales, bf16 |
//!
//! int8          a code for each number, a scale for each vector: as in memory
//! int4          two codes in a byte, a scale for each 32 numbers of a vector
//! ```
//!
//! Codes are of numbers in the destination's type, so they do not depend on the source's type. Encoding rounds; decoding
//! gives the same bytes everywhere, so the sender can compute the checksum of the block that the destination will hold.

use std::ops::Range;

use crate::{
    KvDtype, KvLayout,
    quantise::{INT4_GROUP, Isa},
};

/// Numbers that are dequantised at a time: 8 KiB.
const VECTOR_FLOATS: usize = 2048;

/// The encoding of pieces on the wire. The numbers are those of frames over TCP. 1 was FP8, which has the size of INT8 and
/// costs more quality.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum WireFormat {
    /// As in the destination's memory.
    #[default]
    AsIs = 0,
    /// Eight bits, a scale for each head and token.
    Int8 = 2,
    /// Four bits, a scale for each 32 numbers of a head and token.
    Int4 = 3,
}

impl WireFormat {
    /// All formats.
    pub const ALL: [WireFormat; 3] = [WireFormat::AsIs, WireFormat::Int8, WireFormat::Int4];

    /// "as-is", "int8" or "int4".
    pub fn name(self) -> &'static str {
        match self {
            WireFormat::AsIs => "as-is",
            WireFormat::Int8 => "int8",
            WireFormat::Int4 => "int4",
        }
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<WireFormat> {
        WireFormat::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The format that a decode worker and a prefill worker agree on; `None` means no preference. The decode worker
    /// decides, unless the prefill worker does not encode.
    pub fn agreed(decode: Option<WireFormat>, prefill: Option<WireFormat>) -> WireFormat {
        match (decode, prefill) {
            (_, Some(WireFormat::AsIs)) => WireFormat::AsIs,
            (Some(format), _) | (None, Some(format)) => format,
            (None, None) => WireFormat::AsIs,
        }
    }

    /// All names, as a message lists them.
    pub fn names() -> String {
        WireFormat::ALL.map(WireFormat::name).join(", ")
    }

    /// Bytes of the codes and of the scales of one head's key (or value) of one token.
    fn vector_bytes(self, layout: &KvLayout) -> (usize, usize) {
        let KvLayout { head_dim, dtype, .. } = *layout;
        match self {
            WireFormat::AsIs => (head_dim * dtype.size_bytes(), dtype.scale_bytes()),
            WireFormat::Int8 => (head_dim, 2),
            WireFormat::Int4 => (head_dim.div_ceil(2), head_dim.div_ceil(INT4_GROUP) * 2),
        }
    }
}

/// Encodes and decodes pieces of one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireCodec {
    layout: KvLayout,
    format: WireFormat,
}

/// Scratch memory of a codec, kept between calls.
#[derive(Debug, Default)]
pub struct WireScratch(Vec<f32>);

impl WireCodec {
    /// A codec for pieces of `layout`; `None` where pieces are sent unchanged, because `format` says so or is not
    /// smaller.
    pub fn new(layout: &KvLayout, format: WireFormat) -> Option<WireCodec> {
        let bytes = |format: WireFormat| {
            let (codes, scales) = format.vector_bytes(layout);
            codes + scales
        };
        (bytes(format) < bytes(WireFormat::AsIs)).then_some(WireCodec { layout: *layout, format })
    }

    /// The encoding.
    pub fn format(&self) -> WireFormat {
        self.format
    }

    /// The layout of pieces in memory.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Bytes of an encoded piece.
    pub fn piece_bytes(&self) -> usize {
        2 * self.layout.num_kv_heads * self.head_bytes()
    }

    /// Encodes a piece.
    ///
    /// # Panics
    /// When `piece` or `coded` has another length.
    pub fn encode(&self, piece: &[u8], coded: &mut [u8], scratch: &mut WireScratch) {
        self.check_lengths(piece.len(), coded.len());
        let isa = Isa::detect();
        let KvLayout { head_dim, dtype, .. } = self.layout;
        for (head, coded) in self.heads(piece).zip(coded.chunks_exact_mut(self.head_bytes())) {
            for tokens in self.chunks() {
                let [elements, scales] = self.memory(&tokens);
                let vectors = scratch.of(tokens.len() * head_dim);
                isa.dequantise(dtype, &head[elements], &head[scales], head_dim, vectors);
                let [codes, scales] = self.wire(&tokens);
                let (front, back) = coded.split_at_mut(scales.start);
                let (codes, scales) = (&mut front[codes], &mut back[..scales.len()]);
                match self.format {
                    WireFormat::AsIs => unreachable!("has no codec"),
                    WireFormat::Int8 => isa.quantise(KvDtype::Int8, vectors, head_dim, codes, scales),
                    WireFormat::Int4 => isa.quantise_int4(vectors, head_dim, codes, scales),
                }
            }
        }
    }

    /// The inverse of [`encode`](Self::encode), except for the rounding error.
    ///
    /// # Panics
    /// As [`encode`](Self::encode).
    pub fn decode(&self, coded: &[u8], piece: &mut [u8], scratch: &mut WireScratch) {
        self.check_lengths(piece.len(), coded.len());
        let isa = Isa::detect();
        let KvLayout { head_dim, dtype, .. } = self.layout;
        let heads = piece.chunks_exact_mut(self.layout.head_bytes());
        for (head, coded) in heads.zip(coded.chunks_exact(self.head_bytes())) {
            for tokens in self.chunks() {
                let [codes, scales] = self.wire(&tokens);
                let (codes, scales) = (&coded[codes], &coded[scales]);
                let vectors = scratch.of(tokens.len() * head_dim);
                match self.format {
                    WireFormat::AsIs => unreachable!("has no codec"),
                    WireFormat::Int8 => isa.dequantise(KvDtype::Int8, codes, scales, head_dim, vectors),
                    WireFormat::Int4 => isa.dequantise_int4(codes, scales, head_dim, vectors),
                }
                let [elements, scales] = self.memory(&tokens);
                let (front, back) = head.split_at_mut(scales.start);
                let (elements, scales) = (&mut front[elements], &mut back[..scales.len()]);
                isa.quantise(dtype, vectors, head_dim, elements, scales);
            }
        }
    }

    fn check_lengths(&self, piece: usize, coded: usize) {
        assert_eq!((piece, coded), (self.layout.layer_bytes(), self.piece_bytes()), "bytes of a piece");
    }

    fn heads<'a>(&self, piece: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        piece.chunks_exact(self.layout.head_bytes())
    }

    /// Bytes of one head's encoded K, or V.
    fn head_bytes(&self) -> usize {
        let (codes, scales) = self.format.vector_bytes(&self.layout);
        self.layout.block_size * (codes + scales)
    }

    /// Ranges of tokens that fit in the L1 cache.
    fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (block_size, most) = (self.layout.block_size, (VECTOR_FLOATS / self.layout.head_dim).max(1));
        (0..block_size).step_by(most).map(move |first| first..block_size.min(first + most))
    }

    /// Elements and scales of some tokens in a head's memory.
    fn memory(&self, tokens: &Range<usize>) -> [Range<usize>; 2] {
        self.places(WireFormat::AsIs, tokens)
    }

    /// Codes and scales of some tokens of an encoded head.
    fn wire(&self, tokens: &Range<usize>) -> [Range<usize>; 2] {
        self.places(self.format, tokens)
    }

    fn places(&self, format: WireFormat, tokens: &Range<usize>) -> [Range<usize>; 2] {
        let (codes, scales) = format.vector_bytes(&self.layout);
        let first = self.layout.block_size * codes;
        [tokens.start * codes..tokens.end * codes, first + tokens.start * scales..first + tokens.end * scales]
    }
}

impl WireScratch {
    fn of(&mut self, len: usize) -> &mut [f32] {
        self.0.resize(len, 0.0);
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VectorCodec;

    const LAYOUT: KvLayout =
        KvLayout { block_size: 5, num_layers: 1, num_kv_heads: 3, head_dim: 80, dtype: KvDtype::Bf16 };

    /// A piece of numbers of several magnitudes, and its numbers.
    fn piece(layout: &KvLayout) -> (Vec<u8>, Vec<f32>) {
        let mut piece = vec![0; layout.layer_bytes()];
        let mut numbers = Vec::new();
        for (head_idx, head) in piece.chunks_exact_mut(layout.head_bytes()).enumerate() {
            let (elements, scales) = head.split_at_mut(layout.scale_offset(0));
            let len = layout.block_size * layout.head_dim;
            let vectors: Vec<f32> =
                (0..len).map(|n| ((n * 7 + head_idx * 31) as f32).sin() * 10f32.powi(n as i32 % 3)).collect();
            layout.dtype.store_vectors(&vectors, layout.head_dim, elements, scales);
            numbers.extend(read(layout, head));
        }
        (piece, numbers)
    }

    fn read(layout: &KvLayout, head: &[u8]) -> Vec<f32> {
        let (elements, scales) = head.split_at(layout.scale_offset(0));
        let mut vectors = vec![0.0; layout.block_size * layout.head_dim];
        layout.dtype.load_vectors(elements, scales, layout.head_dim, &mut vectors);
        vectors
    }

    #[test]
    fn encoded_pieces_read_back_within_half_a_step() {
        for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
            for head_dim in [1, 31, 32, 33, 64, 80] {
                for format in [WireFormat::Int8, WireFormat::Int4] {
                    let layout = KvLayout { dtype, head_dim, ..LAYOUT };
                    let Some(codec) = WireCodec::new(&layout, format) else {
                        assert_eq!(head_dim, 1, "only a scale for each number is not worth it");
                        continue;
                    };
                    check(&layout, codec);
                }
            }
        }
    }

    fn check(layout: &KvLayout, codec: WireCodec) {
        let (piece, numbers) = piece(layout);
        let mut coded = vec![0; codec.piece_bytes()];
        let mut scratch = WireScratch::default();
        codec.encode(&piece, &mut coded, &mut scratch);
        let mut decoded = vec![0xa5; piece.len()];
        codec.decode(&coded, &mut decoded, &mut scratch);
        let read: Vec<f32> =
            decoded.chunks_exact(layout.head_bytes()).flat_map(|head| read(layout, head)).collect();
        let KvLayout { head_dim, .. } = *layout;
        let group = if codec.format() == WireFormat::Int4 { INT4_GROUP } else { head_dim };
        for (vector, read) in numbers.chunks_exact(head_dim).zip(read.chunks_exact(head_dim)) {
            for (numbers, read) in vector.chunks(group).zip(read.chunks(group)) {
                let largest = numbers.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                for (x, read) in numbers.iter().zip(read) {
                    let step = match codec.format() {
                        WireFormat::AsIs => 0.0,
                        WireFormat::Int8 => largest / 127.0,
                        WireFormat::Int4 => largest / 7.0,
                    };
                    // Scales are up to 1/128 too large, and the result is rounded to the memory's type.
                    let allowed = step * 1.01 / 2.0
                        + largest / 256.0 * f32::from(u8::from(layout.dtype != KvDtype::F32));
                    assert!((read - x).abs() <= allowed, "{codec:?}: {read} for {x} of {largest}");
                }
            }
        }
    }

    #[test]
    fn an_encoded_piece_has_the_size_of_its_format() {
        let layout = KvLayout { head_dim: 128, ..LAYOUT };
        let bytes = |format| WireCodec::new(&layout, format).expect("smaller").piece_bytes();
        let num_vectors = 2 * 3 * 5;
        assert_eq!(bytes(WireFormat::Int8), num_vectors * (128 + 2));
        assert_eq!(bytes(WireFormat::Int4), num_vectors * (64 + 8));
    }

    #[test]
    fn kv_that_is_as_small_in_memory_is_sent_unchanged() {
        assert_eq!(WireCodec::new(&LAYOUT, WireFormat::AsIs), None);
        let int8 = KvLayout { dtype: KvDtype::Int8, ..LAYOUT };
        assert_eq!(WireCodec::new(&int8, WireFormat::Int8), None);
        let fp8 = KvLayout { dtype: KvDtype::Fp8, ..LAYOUT };
        assert_eq!(WireCodec::new(&fp8, WireFormat::Int8), None);
        assert!(WireCodec::new(&int8, WireFormat::Int4).is_some());
    }

    #[test]
    fn a_group_with_a_number_that_is_not_finite_reads_back_as_nan() {
        let layout = KvLayout { dtype: KvDtype::F32, block_size: 1, num_kv_heads: 1, head_dim: 64, ..LAYOUT };
        let mut piece = vec![0; layout.layer_bytes()];
        piece[40 * 4..41 * 4].copy_from_slice(&f32::INFINITY.to_ne_bytes());
        for (format, num_nan) in [(WireFormat::Int8, 64), (WireFormat::Int4, 32)] {
            let codec = WireCodec::new(&layout, format).expect("smaller");
            let (mut coded, mut decoded) = (vec![0; codec.piece_bytes()], vec![0; piece.len()]);
            let mut scratch = WireScratch::default();
            codec.encode(&piece, &mut coded, &mut scratch);
            codec.decode(&coded, &mut decoded, &mut scratch);
            let read = read(&layout, &decoded[..layout.head_bytes()]);
            assert_eq!(read.iter().filter(|x| x.is_nan()).count(), num_nan, "{format:?}");
            assert!(read.iter().all(|x| x.is_nan() || *x == 0.0));
        }
    }

    #[test]
    fn the_decode_worker_decides_unless_the_prefill_worker_does_not_encode() {
        use WireFormat::{AsIs, Int4, Int8};
        for (decode, prefill, expected) in [
            (None, None, AsIs),
            (Some(Int4), None, Int4),
            (None, Some(Int4), Int4),
            (Some(Int8), Some(Int4), Int8),
            (Some(AsIs), Some(Int4), AsIs),
            (Some(Int4), Some(AsIs), AsIs),
        ] {
            assert_eq!(WireFormat::agreed(decode, prefill), expected, "{decode:?} {prefill:?}");
        }
    }

    #[test]
    fn names_round_trip() {
        for format in WireFormat::ALL {
            assert_eq!(WireFormat::from_name(format.name()), Some(format));
        }
        assert_eq!(WireFormat::from_name("int2"), None);
        assert_eq!(WireFormat::from_name("fp8"), None);
        assert_eq!(WireFormat::ALL.map(|format| format as u16), [0, 2, 3], "as in frames");
    }
}
