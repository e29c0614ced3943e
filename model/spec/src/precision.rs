//! Number formats of weights and activations: the user's choice between speed and precision.

use std::fmt;
use std::str::FromStr;

use crate::integers::{IntegerFormat, IntegerWidth, MAX_GROUP};

/// The backend that computes a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// This machine's CPUs.
    #[default]
    Cpu,
    /// One NVIDIA GPU. Weights keep the format of their files or of [`Quantisation`], with floats in bf16;
    /// activations are in bf16.
    Cuda,
}

/// Number format of activations in products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// The faster format for the weights. CPU: f32 or bf16 for weights and KV in bf16, as a measurement of some
    /// microseconds decides; eight-bit integers for integer weights. GPU: bf16, or E4M3 for FP8 weights and large
    /// batches if the GPU multiplies FP8.
    #[default]
    Auto,
    /// f32. Integer weights are dequantised to floats when loaded, which takes more memory.
    F32,
    /// As [`F32`](Self::F32), but always bf16 for weights and KV in bf16. Needs a CPU with AMX or `avx512_bf16`, or with `bf16` of
    /// aarch64.
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

/// Quantises the weights of layers to integers when a model is loaded, and the head to eight bits.
///
/// Its text is `int8` or `int4`, with `:GROUP` for a group size other than the defaults 128 (int8) and 32 (int4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    format: IntegerFormat,
}

impl Quantisation {
    /// The format of quantised layer weights.
    pub fn format(self) -> IntegerFormat {
        self.format
    }

    /// Bytes per weight, with its share of a scale of 16 bits.
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

/// The text names no quantisation.
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
    fn quantisations_are_parsed_from_their_own_text() {
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
