//! The tensor index: types, shapes and positions in the file.

/// One tensor of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The storage format of its numbers.
    pub tensor_type: TensorType,
    /// Outermost dimension first: rows, then columns. The file stores them in reverse.
    pub shape: Vec<usize>,
    /// Offset of its first byte in the file.
    pub start: usize,
    /// Its size in bytes.
    pub size_bytes: usize,
}

macro_rules! tensor_types {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $numbers:literal in $bytes:literal;)*) => {
        /// Storage formats of numbers: single numbers, or blocks along rows.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum TensorType { $($(#[$doc])* $variant,)* }

        impl TensorType {
            /// All types.
            pub const ALL: &[TensorType] = &[$(TensorType::$variant),*];

            /// The type's number in files.
            pub fn id(self) -> u32 {
                match self { $(TensorType::$variant => $id,)* }
            }

            /// The usual name, such as "Q4_K".
            pub fn name(self) -> &'static str {
                match self { $(TensorType::$variant => $name,)* }
            }

            /// Numbers in a block.
            pub fn block_len(self) -> usize {
                match self { $(TensorType::$variant => $numbers,)* }
            }

            /// Bytes of a block.
            pub fn block_bytes(self) -> usize {
                match self { $(TensorType::$variant => $bytes,)* }
            }
        }
    };
}

tensor_types! {
    /// Single precision.
    F32 = 0, "F32", 1 in 4;
    /// Half precision.
    F16 = 1, "F16", 1 in 2;
    /// bfloat16.
    Bf16 = 30, "BF16", 1 in 2;
    /// Four bits; a scale for 32.
    Q4_0 = 2, "Q4_0", 32 in 18;
    /// Four bits; a scale and a minimum for 32.
    Q4_1 = 3, "Q4_1", 32 in 20;
    /// Five bits; a scale for 32.
    Q5_0 = 6, "Q5_0", 32 in 22;
    /// Five bits; a scale and a minimum for 32.
    Q5_1 = 7, "Q5_1", 32 in 24;
    /// Eight bits; a scale for 32.
    Q8_0 = 8, "Q8_0", 32 in 34;
    /// Two bits; a scale and a minimum of four bits for 16.
    Q2K = 10, "Q2_K", 256 in 84;
    /// Three bits; a scale of six bits for 16.
    Q3K = 11, "Q3_K", 256 in 110;
    /// Four bits; a scale and a minimum of six bits for 32.
    Q4K = 12, "Q4_K", 256 in 144;
    /// Five bits; a scale and a minimum of six bits for 32.
    Q5K = 13, "Q5_K", 256 in 176;
    /// Six bits; a scale of eight bits for 16.
    Q6K = 14, "Q6_K", 256 in 210;
    /// Four bits that choose among sixteen levels; a scale for 32.
    Iq4Nl = 20, "IQ4_NL", 32 in 18;
    /// Four bits that choose among sixteen levels; a scale of six bits for 32.
    Iq4Xs = 23, "IQ4_XS", 256 in 136;
}

/// Known types that are not supported; errors name them.
const OTHERS: &[(u32, &str)] = &[
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl TensorType {
    /// The type with this number, or a name for errors.
    pub(crate) fn from_id(id: u32) -> Result<TensorType, String> {
        TensorType::ALL.iter().copied().find(|tensor_type| tensor_type.id() == id).ok_or_else(|| match OTHERS
            .iter()
            .find(|(other, _)| *other == id)
        {
            Some((_, name)) => (*name).to_owned(),
            None => format!("number {id}"),
        })
    }

    pub(crate) fn names() -> String {
        TensorType::ALL.iter().map(|tensor_type| tensor_type.name()).collect::<Vec<_>>().join(", ")
    }
}
