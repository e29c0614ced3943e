//! GGUF files: edits of a valid one.

use arbitrary::Arbitrary;
use baton_gguf::testing::Writer;
use baton_gguf::{Gguf, TensorType, Value};

use crate::{Change, pick};

/// Metadata keys that some reader knows, without the architecture's name in front.
const KEYS: &[&str] = &[
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.scale",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_weights_scale",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",
];

/// Complete metadata keys.
const WHOLE_KEYS: &[&str] = &[
    "general.architecture",
    "general.alignment",
    "split.count",
    "tokenizer.chat_template",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.unknown_token_id",
    "general.sampling.temp",
    "general.sampling.top_k",
];

/// Texts that some reader knows.
const WORDS: &[&str] = &[
    "",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "phi3",
    "none",
    "linear",
    "yarn",
    "longrope",
    "gpt2",
    "default",
    "llama-bpe",
    "tekken",
    "smollm",
    "gpt-4o",
    "a b",
    " ",
    "▁",
    "<s>",
    "<0x41>",
    "token_embd.weight",
    "output.weight",
    "rope_freqs.weight",
    "blk.0.attn_q.bias",
    "blk.0.attn_output.bias",
    "blk.0.ffn_down.bias",
    "blk.0.attn_q.weight",
    "blk.1.ffn_gate.weight",
    "{{ messages[0].content }}",
];

/// Tensors larger than this do not get bytes that fit.
const MAX_TENSOR_BYTES: usize = 1 << 17;

/// A damaged file: a valid one with edits.
#[derive(Arbitrary, Debug)]
pub struct Case {
    file: u8,
    edits: Vec<Edit>,
}

#[derive(Arbitrary, Debug)]
enum Edit {
    Value {
        key: Key,
        value: NewValue,
    },
    /// A number of the metadata. In an array, one number or all.
    Number {
        value: u8,
        element: Option<u16>,
        change: Change,
    },
    NoValue {
        value: u8,
    },
    /// An array of another length.
    Length {
        value: u8,
        change: Change,
    },
    Dimension {
        tensor: u8,
        axis: u8,
        change: Change,
        fit: bool,
    },
    Dimensions {
        tensor: u8,
        num: u8,
    },
    Type {
        tensor: u8,
        tensor_type: u8,
        fit: bool,
    },
    RawType {
        tensor: u8,
        id: u32,
    },
    Name {
        tensor: u8,
        name: u8,
    },
    NoTensor {
        tensor: u8,
    },
    Data {
        tensor: u8,
        at: u16,
        bytes: [u8; 4],
    },
    Floats {
        tensor: u8,
        value: f32,
    },
    Byte {
        at: u32,
        byte: u8,
    },
    Cut {
        len: u32,
    },
}

#[derive(Arbitrary, Debug)]
enum Key {
    There(u8),
    Known(u8),
    Whole(u8),
}

#[derive(Arbitrary, Debug)]
enum NewValue {
    Number(Change),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Word(u8),
    Text(String),
    Numbers(Vec<i32>),
    Floats(Vec<f32>),
    Words(Vec<u8>),
    Texts(Vec<String>),
}

#[derive(Clone)]
enum Owned {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Array(Vec<Owned>),
}

struct Tensor {
    name: String,
    tensor_type: u32,
    /// Unchanged.
    dimensions: Vec<u64>,
    data: Vec<u8>,
}

struct File {
    values: Vec<(String, Owned)>,
    tensors: Vec<Tensor>,
}

impl Case {
    /// One of `files`, with edits.
    pub fn file(&self, files: &[&[u8]]) -> Vec<u8> {
        let file = *pick(files, self.file);
        let mut file = File::read(file);
        for edit in &self.edits {
            file.edit(edit);
        }
        let mut bytes = file.write();
        for edit in &self.edits {
            match edit {
                Edit::Byte { at, byte } => crate::overwrite(&mut bytes, *at, *byte),
                Edit::Cut { len } => bytes.truncate(*len as usize),
                _ => {}
            }
        }
        bytes
    }
}

impl Owned {
    fn new(value: Value<'_>) -> Owned {
        match value {
            Value::Unsigned(number) => Owned::Unsigned(number),
            Value::Signed(number) => Owned::Signed(number),
            Value::Float(number) => Owned::Float(number),
            Value::Bool(value) => Owned::Bool(value),
            Value::Text(text) => Owned::Text(text.to_owned()),
            Value::Array(array) => Owned::Array(array.iter().map(Owned::new).collect()),
        }
    }

    /// Number of the type, and bytes.
    fn encode(&self) -> (u32, Vec<u8>) {
        match self {
            Owned::Unsigned(number) => match u32::try_from(*number) {
                Ok(number) => (4, number.to_le_bytes().to_vec()),
                Err(_) => (10, number.to_le_bytes().to_vec()),
            },
            Owned::Signed(number) => (11, number.to_le_bytes().to_vec()),
            Owned::Float(number) => (12, number.to_le_bytes().to_vec()),
            Owned::Bool(value) => (7, vec![u8::from(*value)]),
            Owned::Text(text) => (8, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()),
            Owned::Array(elements) => {
                let encoded: Vec<_> = elements.iter().map(Owned::encode).collect();
                let element_type = encoded.iter().map(|(element_type, _)| *element_type).max().unwrap_or(4);
                let mut bytes = element_type.to_le_bytes().to_vec();
                bytes.extend((elements.len() as u64).to_le_bytes());
                encoded.into_iter().for_each(|(_, element)| bytes.extend(element));
                (9, bytes)
            }
        }
    }

    fn change(&mut self, change: Change) {
        match self {
            Owned::Unsigned(number) => *number = change.of(*number),
            Owned::Signed(number) => *number = change.of(*number as u64) as i64,
            Owned::Float(number) => *number = change.of(*number as u64) as f64,
            Owned::Bool(value) => *value = !*value,
            Owned::Text(text) => {
                let len = change.of(text.len() as u64).min(600) as usize;
                *text = text.chars().cycle().take(len).collect();
            }
            Owned::Array(elements) => elements.iter_mut().for_each(|element| element.change(change)),
        }
    }
}

impl NewValue {
    fn owned(&self) -> Owned {
        let word = |word: u8| Owned::Text((*pick(WORDS, word)).to_owned());
        match self {
            NewValue::Number(change) => Owned::Unsigned(change.of(1)),
            NewValue::Signed(number) => Owned::Signed(*number),
            NewValue::Float(number) => Owned::Float(*number),
            NewValue::Bool(value) => Owned::Bool(*value),
            NewValue::Word(idx) => word(*idx),
            NewValue::Text(text) => Owned::Text(text.clone()),
            NewValue::Numbers(numbers) => {
                Owned::Array(numbers.iter().map(|number| Owned::Signed((*number).into())).collect())
            }
            NewValue::Floats(numbers) => {
                Owned::Array(numbers.iter().map(|number| Owned::Float((*number).into())).collect())
            }
            NewValue::Words(words) => Owned::Array(words.iter().map(|idx| word(*idx)).collect()),
            NewValue::Texts(texts) => Owned::Array(texts.iter().cloned().map(Owned::Text).collect()),
        }
    }
}

impl Tensor {
    /// Gives it as many bytes as its type and dimensions need.
    fn fit(&mut self) {
        let Some(known) = TensorType::ALL.iter().find(|known| known.id() == self.tensor_type) else { return };
        let count = self.dimensions.iter().try_fold(1u64, |count, dimension| count.checked_mul(*dimension));
        let num_blocks = count.map(|count| count / known.block_len() as u64);
        let len = num_blocks.and_then(|num| num.checked_mul(known.block_bytes() as u64));
        if let Some(len) = len.filter(|len| *len <= MAX_TENSOR_BYTES as u64) {
            let pattern = if self.data.is_empty() { vec![7] } else { self.data.clone() };
            self.data = pattern.into_iter().cycle().take(len as usize).collect();
        }
    }
}

impl File {
    fn read(bytes: &[u8]) -> File {
        let gguf = Gguf::parse(bytes).expect("a valid file");
        let values = gguf.metadata().iter().filter(|(key, _)| !key.starts_with("test."));
        let tensors = gguf.tensors().iter().map(|(name, tensor)| Tensor {
            name: (*name).to_owned(),
            tensor_type: tensor.tensor_type.id(),
            dimensions: tensor.shape.iter().rev().map(|dimension| *dimension as u64).collect(),
            data: bytes[tensor.start..][..tensor.size_bytes].to_vec(),
        });
        File {
            values: values.map(|(key, value)| ((*key).to_owned(), Owned::new(*value))).collect(),
            tensors: tensors.collect(),
        }
    }

    fn tensor(&mut self, idx: u8) -> Option<&mut Tensor> {
        let num = self.tensors.len();
        self.tensors.get_mut(usize::from(idx) % num.max(1))
    }

    fn value(&mut self, idx: u8) -> Option<&mut Owned> {
        let num = self.values.len();
        self.values.get_mut(usize::from(idx) % num.max(1)).map(|(_, value)| value)
    }

    fn key(&self, key: &Key) -> String {
        let architecture = self.values.iter().find_map(|(key, value)| match value {
            Owned::Text(text) if key == "general.architecture" => Some(text.as_str()),
            _ => None,
        });
        match key {
            Key::There(idx) if !self.values.is_empty() => pick(&self.values, *idx).0.clone(),
            Key::There(idx) | Key::Known(idx) => {
                format!("{}.{}", architecture.unwrap_or("llama"), pick(KEYS, *idx))
            }
            Key::Whole(idx) => (*pick(WHOLE_KEYS, *idx)).to_owned(),
        }
    }

    fn edit(&mut self, edit: &Edit) -> Option<()> {
        match edit {
            Edit::Value { key, value } => {
                let (key, value) = (self.key(key), value.owned());
                match self.values.iter_mut().find(|(known, _)| *known == key) {
                    Some((_, known)) => *known = value,
                    None => self.values.push((key, value)),
                }
            }
            Edit::Number { value, element, change } => match (self.value(*value)?, element) {
                (Owned::Array(elements), Some(element)) => {
                    let idx = usize::from(*element) % elements.len().max(1);
                    elements.get_mut(idx)?.change(*change);
                }
                (value, _) => value.change(*change),
            },
            Edit::NoValue { value } => {
                if !self.values.is_empty() {
                    self.values.remove(usize::from(*value) % self.values.len());
                }
            }
            Edit::Length { value, change } => {
                if let Owned::Array(elements) = self.value(*value)? {
                    let len = change.of(elements.len() as u64).min(2000) as usize;
                    *elements = std::mem::take(elements).into_iter().cycle().take(len).collect();
                }
            }
            Edit::Dimension { tensor, axis, change, fit } => {
                let tensor = self.tensor(*tensor)?;
                let axis = usize::from(*axis) % tensor.dimensions.len().max(1);
                let dimension = tensor.dimensions.get_mut(axis)?;
                *dimension = change.of(*dimension);
                if *fit {
                    tensor.fit();
                }
            }
            Edit::Dimensions { tensor, num } => {
                self.tensor(*tensor)?.dimensions.resize(usize::from(*num % 8), 1);
            }
            Edit::Type { tensor, tensor_type, fit } => {
                let tensor = self.tensor(*tensor)?;
                tensor.tensor_type = pick(TensorType::ALL, *tensor_type).id();
                if *fit {
                    tensor.fit();
                }
            }
            Edit::RawType { tensor, id } => self.tensor(*tensor)?.tensor_type = *id,
            Edit::Name { tensor, name } => self.tensor(*tensor)?.name = (*pick(WORDS, *name)).to_owned(),
            Edit::NoTensor { tensor } => {
                if !self.tensors.is_empty() {
                    self.tensors.remove(usize::from(*tensor) % self.tensors.len());
                }
            }
            Edit::Data { tensor, at, bytes } => {
                let data = &mut self.tensor(*tensor)?.data;
                let at = usize::from(*at) % data.len().max(1);
                data.get_mut(at..at + 4)?.copy_from_slice(bytes);
            }
            Edit::Floats { tensor, value } => {
                let data = &mut self.tensor(*tensor)?.data;
                data.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
            }
            // Of the whole file.
            Edit::Byte { .. } | Edit::Cut { .. } => {}
        }
        Some(())
    }

    fn write(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        for (key, value) in &self.values {
            let (value_type, bytes) = value.encode();
            writer = writer.value(key, value_type, &bytes);
        }
        for Tensor { name, tensor_type, dimensions, data } in &self.tensors {
            writer = writer.raw_tensor(name, *tensor_type, dimensions, data);
        }
        writer.finish()
    }
}
