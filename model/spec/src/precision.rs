//! How exactly weights and activations are multiplied: what a user chooses between speed and precision.

use std::fmt;
use std::str::FromStr;

use crate::integers::{IntegerFormat, IntegerWidth, MAX_GROUP};

/// What computes a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// This machine's processors.
    #[default]
    Cpu,
    /// One of NVIDIA's devices. Weights are there what files hold or [`Quantisation`] makes of them, floats in bf16;
    /// activations are in bf16.
    Cuda,
}

/// How activations enter products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// With weights and KV in bf16 as f32 or bf16, whichever is faster on this processor, by a measurement of some
    /// microseconds; with integers rounded to eight bits. On a device in bf16, or, where weights are in fp8 and rows are
    /// many, as the device multiplies those: rounded to E4M3.
    #[default]
    Auto,
    /// As they are. Integers of files are multiplied as the floats that they stand for, at a price in memory.
    F32,
    /// The same, but always bf16 with weights and KV in bf16. It needs a processor with an instruction for it (`avx512_bf16`).
    Bf16,
}

impl Activations {
    /// "auto", "f32" or "bf16".
    pub fn name(self) -> &'static str {
        match self {
            Activations::Auto => "auto",
            Activations::F32 => "f32",
            Activations::Bf16 => "bf16",
        }
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Activations> {
        [Activations::Auto, Activations::F32, Activations::Bf16].into_iter().find(|kind| kind.name() == name)
    }
}

/// Weights of layers rounded to integers when a model is loaded; the head to eight bits.
///
/// Its text is `int8` or `int4`, with `:GROUP` for another number of weights that share a scale than 128 and 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    format: IntegerFormat,
}

impl Quantisation {
    /// The integers that weights of layers become.
    pub fn format(self) -> IntegerFormat {
        self.format
    }

    /// Bytes of a weight and its share of a scale of 16 bits.
    pub fn bytes_per_weight(self) -> f64 {
        self.format.width.bits() as f64 / 8.0 + 2.0 / self.format.group as f64
    }

    fn name(self) -> (&'static str, usize) {
        match self.format.width {
            IntegerWidth::Eight => ("int8", 128),
            IntegerWidth::Four => ("int4", 32),
        }
    }
}

impl fmt::Display for Quantisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, group) = self.name();
        if self.format.group == group { f.write_str(name) } else { write!(f, "{name}:{}", self.format.group) }
    }
}

/// A text that names no quantisation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected int8 or int4, perhaps with a group size of 32 to 1024 in steps of 32, as in int4:64")]
pub struct ParseQuantisationError;

impl FromStr for Quantisation {
    type Err = ParseQuantisationError;

    fn from_str(text: &str) -> Result<Quantisation, ParseQuantisationError> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group.parse().map_err(|_| ParseQuantisationError)?)),
            None => (text, None),
        };
        let width = match name {
            "int8" => IntegerWidth::Eight,
            "int4" => IntegerWidth::Four,
            _ => return Err(ParseQuantisationError),
        };
        let default = Quantisation { format: IntegerFormat { width, group: 0, has_zeros: false } }.name().1;
        let group = group.unwrap_or(default);
        if !(32..=MAX_GROUP).contains(&group) || group % 32 != 0 {
            return Err(ParseQuantisationError);
        }
        Ok(Quantisation { format: IntegerFormat { width, group, has_zeros: false } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantisations_are_read_as_they_are_written() {
        for (text, bits, group) in [("int8", 8, 128), ("int4", 4, 32), ("int4:64", 4, 64), ("int8:32", 8, 32)]
        {
            let read: Quantisation = text.parse().unwrap();
            assert_eq!((read.format.width.bits(), read.format.group), (bits, group));
            assert_eq!(read.to_string(), text);
        }
        for text in ["", "int2", "int8:", "int8:0", "int8:33", "int4:2048", "INT8", "int8:-32"] {
            assert_eq!(text.parse::<Quantisation>(), Err(ParseQuantisationError), "{text}");
        }
    }
}
