//! The number format of a model's weights, from `quantization_config` of its configuration, for what they cost.
//!
//! This module refuses nothing and does not know tensors: [`StoredQuantisation`](crate::StoredQuantisation) refuses, and the
//! tensors show which modules are not quantised.

use std::fmt;

use serde_json::Value;

use crate::error::LoadError;
use crate::fields::Fields;

/// The number format of the matrices of layers. The embedding, the head, norms and biases are in 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// 16 bits: weights that are not quantised.
    Bf16,
    /// 8 bits, with scales of rows or large blocks.
    Fp8,
    /// Integers.
    Integers {
        /// Bits of a weight.
        num_bits: u32,
        /// Weights that share a scale of 16 bits; `None`: those of a row.
        group: Option<usize>,
        /// Whether a list says the group of each column, as of activation order with groups of sorted columns, so that no kernel multiplies them as
        /// they are.
        lists_groups: bool,
    },
}

impl WeightFormat {
    /// Bytes of a weight in files, with its share of a scale.
    fn bytes_per_weight(self) -> f64 {
        match self {
            WeightFormat::Bf16 => 2.0,
            WeightFormat::Fp8 => 1.0,
            WeightFormat::Integers { num_bits, group, .. } => {
                f64::from(num_bits) / 8.0 + group.map_or(0.0, |group| 2.0 / group as f64)
            }
        }
    }

    /// Reads the format that `quantization_config` states for all layers; of several the widest one.
    pub(crate) fn read(fields: &Fields<'_>) -> Result<WeightFormat, LoadError> {
        let config = fields.object("quantization_config")?.or(fields.object("compression_config")?);
        let Some(config) = config else { return Ok(WeightFormat::Bf16) };
        Ok(match config.get("quant_method").and_then(Value::as_str) {
            Some("awq" | "gptq" | "auto-round" | "intel/auto-round") => {
                WeightFormat::of_integers(&config, &["w_bit", "bits"], &["group_size", "q_group_size"])
            }
            Some("fp8" | "fbgemm_fp8") => WeightFormat::Fp8,
            Some("modelopt") => {
                let nested = config.object("quantization")?;
                match nested.as_ref().unwrap_or(&config).get("quant_algo") {
                    Some(_) => WeightFormat::Fp8,
                    // Only KV is quantised.
                    None => WeightFormat::Bf16,
                }
            }
            Some("compressed-tensors") => WeightFormat::of_compressed(&config)?,
            _ => WeightFormat::Bf16,
        })
    }

    fn of_compressed(config: &Fields<'_>) -> Result<WeightFormat, LoadError> {
        let mut found = Vec::new();
        for group in config.object("config_groups")?.iter().flat_map(Fields::objects) {
            let Some(weights) = group.object("weights")? else { continue };
            found.push(match weights.get("type").and_then(Value::as_str) {
                Some("float") => WeightFormat::Fp8,
                _ => WeightFormat::of_integers(&weights, &["num_bits"], &["group_size"]),
            });
        }
        let is_dense = config.get("format").and_then(Value::as_str) == Some("dense");
        let widest = found.into_iter().max_by(|a, b| a.bytes_per_weight().total_cmp(&b.bytes_per_weight()));
        Ok(widest.filter(|_| !is_dense).unwrap_or(WeightFormat::Bf16))
    }

    /// Integers by the first of the fields that is there. A group of -1 is a row.
    fn of_integers(config: &Fields<'_>, bits: &[&str], groups: &[&str]) -> WeightFormat {
        let number = |names: &[&str]| names.iter().find_map(|name| config.get(name)?.as_u64());
        let num_bits = number(bits).filter(|num_bits| (1..=16).contains(num_bits));
        let group = number(groups).filter(|&group| group > 0).map(|group| group as usize);
        let has = |name: &str| config.get(name).and_then(Value::as_bool) == Some(true);
        let is_sorted = match config.get("actorder") {
            // Of compressed-tensors, in any case. "weight" and "static" have static groups.
            Some(Value::String(order)) => {
                ["group", "dynamic"].iter().any(|name| order.eq_ignore_ascii_case(name))
            }
            _ => has("desc_act") || has("actorder"),
        };
        // Static groups are made before columns are sorted: they stay in order, as does the one group of a row.
        let lists_groups = is_sorted && !has("static_groups") && group.is_some();
        match num_bits {
            Some(num_bits) => WeightFormat::Integers { num_bits: num_bits as u32, group, lists_groups },
            None => WeightFormat::Bf16,
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightFormat::Bf16 => f.write_str("bf16"),
            WeightFormat::Fp8 => f.write_str("fp8"),
            WeightFormat::Integers { num_bits, .. } => write!(f, "int{num_bits}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::fields::parse_object;

    fn read(config: &str) -> WeightFormat {
        let path = Path::new("config.json");
        let text = format!("{{\"quantization_config\": {config}}}");
        let object = parse_object(path, text.as_bytes()).unwrap();
        WeightFormat::read(&Fields::new(path, &object)).unwrap()
    }

    #[test]
    fn activation_order_lists_groups() {
        for (fields, expected) in [
            (r#""group_size": 128, "desc_act": true"#, true),
            (r#""group_size": 128, "desc_act": true, "static_groups": false"#, true),
            (r#""group_size": 128, "desc_act": true, "static_groups": true"#, false),
            (r#""group_size": 128, "desc_act": false"#, false),
            (r#""group_size": 128"#, false),
            (r#""group_size": -1, "desc_act": true"#, false),
        ] {
            let format = read(&format!(r#"{{"quant_method": "gptq", "bits": 4, {fields}}}"#));
            let WeightFormat::Integers { num_bits: 4, lists_groups, .. } = format else {
                panic!("{format:?} of {fields}")
            };
            assert_eq!(lists_groups, expected, "{fields}");
        }
        for (order, expected) in [
            (r#""group""#, true),
            (r#""Dynamic""#, true),
            ("true", true),
            (r#""weight""#, false),
            (r#""static""#, false),
            ("false", false),
            ("null", false),
        ] {
            let format = read(&format!(
                r#"{{"quant_method": "compressed-tensors", "config_groups": {{
                    "group_0": {{"weights": {{"type": "int", "num_bits": 4, "group_size": 128, "actorder": {order}}}}}}}}}"#
            ));
            let expected = WeightFormat::Integers { num_bits: 4, group: Some(128), lists_groups: expected };
            assert_eq!(format, expected, "{order}");
        }
    }

    #[test]
    fn weights_take_what_their_configuration_states() {
        for (config, name, bytes) in [
            ("null", "bf16", 2.0),
            (r#"{"quant_method": "awq", "bits": 4, "group_size": 128}"#, "int4", 0.5 + 2.0 / 128.0),
            (r#"{"quant_method": "awq", "w_bit": 4, "q_group_size": 64}"#, "int4", 0.5 + 2.0 / 64.0),
            (r#"{"quant_method": "gptq", "bits": 8, "group_size": -1}"#, "int8", 1.0),
            (r#"{"quant_method": "auto-round", "bits": 4, "group_size": 128}"#, "int4", 0.5 + 2.0 / 128.0),
            (r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#, "fp8", 1.0),
            (r#"{"quant_method": "fbgemm_fp8"}"#, "fp8", 1.0),
            (r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#, "fp8", 1.0),
            (r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}"#, "fp8", 1.0),
            (r#"{"quant_method": "modelopt", "quant_algo": null}"#, "bf16", 2.0),
            (r#"{"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}"#, "bf16", 2.0),
            (
                r#"{"quant_method": "compressed-tensors", "config_groups": {
                    "group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}}}"#,
                "int4",
                0.5 + 2.0 / 32.0,
            ),
            (
                r#"{"quant_method": "compressed-tensors", "config_groups": {
                    "group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}},
                    "group_1": {"weights": {"type": "float", "num_bits": 8, "group_size": null}}}}"#,
                "fp8",
                1.0,
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "dense", "config_groups": {
                    "group_0": {"weights": {"type": "int", "num_bits": 8}}}}"#,
                "bf16",
                2.0,
            ),
            (r#"{"quant_method": "compressed-tensors"}"#, "bf16", 2.0),
        ] {
            let format = read(config);
            assert_eq!((format.to_string().as_str(), format.bytes_per_weight()), (name, bytes), "{config}");
        }
    }
}
