//! For tests: writes GGUF files and damages them at random.

use crate::TensorType;

/// Builds a file. It can write invalid values.
#[derive(Clone, Debug)]
pub struct Writer {
    version: u32,
    alignment: usize,
    num_values: u64,
    values: Vec<u8>,
    num_tensors: u64,
    tensors: Vec<u8>,
    data: Vec<u8>,
}

impl Default for Writer {
    fn default() -> Writer {
        Writer {
            version: 3,
            alignment: 32,
            num_values: 0,
            values: vec![],
            num_tensors: 0,
            tensors: vec![],
            data: vec![],
        }
    }
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

impl Writer {
    /// Sets another version than 3.
    pub fn version(mut self, version: u32) -> Writer {
        self.version = version;
        self
    }

    /// Sets another alignment than 32, with its metadata key.
    pub fn alignment(mut self, alignment: u32) -> Writer {
        self.alignment = alignment as usize;
        self.u32("general.alignment", alignment)
    }

    /// Adds a value in its stored form, of a type given by number.
    pub fn value(mut self, key: &str, value_type: u32, bytes: &[u8]) -> Writer {
        self.num_values += 1;
        text(&mut self.values, key);
        self.values.extend(value_type.to_le_bytes());
        self.values.extend(bytes);
        self
    }

    /// An unsigned integer.
    pub fn u32(self, key: &str, value: u32) -> Writer {
        self.value(key, 4, &value.to_le_bytes())
    }

    /// A number.
    pub fn f32(self, key: &str, value: f32) -> Writer {
        self.value(key, 6, &value.to_le_bytes())
    }

    /// A truth value.
    pub fn bool(self, key: &str, value: bool) -> Writer {
        self.value(key, 7, &[u8::from(value)])
    }

    /// A text.
    pub fn text(self, key: &str, value: &str) -> Writer {
        let mut bytes = vec![];
        text(&mut bytes, value);
        self.value(key, 8, &bytes)
    }

    /// An array of texts.
    pub fn texts<T: AsRef<str>>(self, key: &str, values: impl IntoIterator<Item = T>) -> Writer {
        let (mut bytes, mut len) = (vec![], 0);
        for value in values {
            text(&mut bytes, value.as_ref());
            len += 1;
        }
        self.array(key, 8, len, &bytes)
    }

    /// An array of signed integers.
    pub fn i32s(self, key: &str, values: &[i32]) -> Writer {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 5, values.len() as u64, &bytes)
    }

    /// An array of numbers.
    pub fn f32s(self, key: &str, values: &[f32]) -> Writer {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 6, values.len() as u64, &bytes)
    }

    /// Adds an array in its stored form, with elements of a type given by number.
    pub fn array(self, key: &str, element_type: u32, len: u64, elements: &[u8]) -> Writer {
        let mut bytes = element_type.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(elements);
        self.value(key, 9, &bytes)
    }

    /// Adds a tensor and its bytes. `shape` has the outermost dimension first.
    pub fn tensor(self, name: &str, tensor_type: TensorType, shape: &[usize], data: &[u8]) -> Writer {
        let dimensions: Vec<u64> = shape.iter().rev().map(|&dimension| dimension as u64).collect();
        self.raw_tensor(name, tensor_type.id(), &dimensions, data)
    }

    /// Adds a tensor of any type; dimensions are in the file's order.
    pub fn raw_tensor(mut self, name: &str, tensor_type: u32, dimensions: &[u64], data: &[u8]) -> Writer {
        self.num_tensors += 1;
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        text(&mut self.tensors, name);
        self.tensors.extend((dimensions.len() as u32).to_le_bytes());
        self.tensors.extend(dimensions.iter().flat_map(|dimension| dimension.to_le_bytes()));
        self.tensors.extend(tensor_type.to_le_bytes());
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(data);
        self
    }

    /// The file's bytes.
    pub fn finish(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.num_tensors.to_le_bytes());
        bytes.extend(self.num_values.to_le_bytes());
        bytes.extend(&self.values);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(&self.data);
        bytes
    }
}

/// Pseudo-random damage, the same for a seed: the numbers are those of SplitMix64 (Steele et al. 2014).
#[derive(Clone, Debug)]
pub struct Damage(u64);

impl Damage {
    /// Damage for a seed.
    pub fn new(seed: u64) -> Damage {
        Damage(seed)
    }

    /// Changes one to three ranges that start among the first `len` bytes, of up to four bytes each.
    pub fn apply(&mut self, bytes: &mut [u8], len: usize) {
        for _ in 0..=self.below(3) {
            let at = self.below(len);
            match self.below(3) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.below(256) as u8,
                _ => bytes[at..at + 4].copy_from_slice(&(1u32 << self.below(32)).to_le_bytes()),
            }
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % limit as u64) as usize
    }
}
