//! How the weights of a directory are quantised, from `quantization_config` of its configuration.
//!
//! This module does not know tensors. The tensors show which modules are quantised, with how many bits, in how many groups.

use crate::error::LoadError;
use crate::fields::{Fields, MAX_SIZE};

/// The quantisation method of a directory's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredQuantisation {
    /// AWQ.
    Awq {
        /// As [`group`](Self::group).
        group: Option<usize>,
    },
    /// GPTQ.
    Gptq {
        /// As [`group`](Self::group).
        group: Option<usize>,
        /// Added to stored zero points: version 1 of the format stores them less one.
        zero_offset: i16,
    },
    /// compressed-tensors, and its fp8 layout under other names, such as ModelOpt's.
    Named {
        /// As [`group`](Self::group).
        group: Option<usize>,
        /// Rows and columns of a block that shares a scale, if scales are per block.
        block: [usize; 2],
    },
}

impl StoredQuantisation {
    /// Numbers of a row that share a scale, if one size is stated. A module may have another one.
    pub fn group(self) -> Option<usize> {
        match self {
            StoredQuantisation::Awq { group }
            | StoredQuantisation::Gptq { group, .. }
            | StoredQuantisation::Named { group, .. } => group,
        }
    }

    /// Reads `quantization_config`; `None` if there is none.
    ///
    /// # Errors
    /// When it names an unknown method or an unsupported layout.
    pub fn read(fields: &Fields<'_>) -> Result<Option<StoredQuantisation>, LoadError> {
        let Some(config) = fields.object("quantization_config")?.or(fields.object("compression_config")?)
        else {
            return Ok(None);
        };
        let expected = "awq, gptq, auto-round, compressed-tensors, fp8, fbgemm_fp8 or modelopt";
        match config.text("quant_method")?.ok_or_else(|| config.refuse("quant_method", expected))? {
            "awq" => {
                if config.text("version")?.is_some_and(|version| !version.eq_ignore_ascii_case("gemm")) {
                    return Err(config.refuse("version", "gemm"));
                }
                need_bits(&config, &[4])?;
                Ok(Some(StoredQuantisation::Awq { group: group(&config, &["group_size", "q_group_size"]) }))
            }
            "gptq" => {
                need_bits(&config, &[4, 8])?;
                let zero_offset = match config.text("checkpoint_format")?.unwrap_or("gptq") {
                    "gptq" => 1,
                    "gptq_v2" => 0,
                    _ => return Err(config.refuse("checkpoint_format", "gptq or gptq_v2")),
                };
                Ok(Some(StoredQuantisation::Gptq { group: group(&config, &["group_size"]), zero_offset }))
            }
            "auto-round" | "intel/auto-round" => {
                need_bits(&config, &[4, 8])?;
                // Version 1 of GPTQ: the packer takes one from zero points. One of 0 then damages those beside it, so
                // AutoRound packs in this way only what is symmetric. Its other formats store zero points as they are.
                if config.text("packing_format")? != Some("auto_round:auto_gptq") {
                    return Err(config.refuse("packing_format", "auto_round:auto_gptq"));
                }
                if config.text("data_type")?.is_some_and(|data_type| data_type != "int") {
                    return Err(config.refuse("data_type", "int"));
                }
                if config.flag("sym")? != Some(true) {
                    return Err(config.refuse("sym", "true"));
                }
                Ok(Some(StoredQuantisation::Gptq { group: group(&config, &["group_size"]), zero_offset: 1 }))
            }
            "compressed-tensors" => StoredQuantisation::read_compressed(&config).map(Some),
            "fp8" | "fbgemm_fp8" => {
                if config.text("fmt")?.is_some_and(|format| format != "e4m3") {
                    return Err(config.refuse("fmt", "e4m3"));
                }
                let block = block(&config, "weight_block_size")?;
                Ok(Some(StoredQuantisation::Named { group: None, block }))
            }
            "modelopt" => {
                // Some exports nest these fields as in the file beside the configuration.
                let nested = config.object("quantization")?;
                StoredQuantisation::read_modelopt(nested.as_ref().unwrap_or(&config))
            }
            _ => Err(config.refuse("quant_method", expected)),
        }
    }

    /// Reads what NVIDIA's ModelOpt states in `quantization_config`, or in `quantization` of a file of its own. `None` without an
    /// algorithm: then only KV is quantised.
    ///
    /// # Errors
    /// When it names another algorithm: scales of FP8_PB_WO have four dimensions, NVFP4 and MXFP8 are formats of their own.
    pub(crate) fn read_modelopt(config: &Fields<'_>) -> Result<Option<StoredQuantisation>, LoadError> {
        const ALGORITHMS: [&str; 2] = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"];
        match config.text("quant_algo")? {
            None => Ok(None),
            Some(algorithm) if ALGORITHMS.iter().any(|known| known.eq_ignore_ascii_case(algorithm)) => {
                Ok(Some(StoredQuantisation::Named { group: None, block: [128, 128] }))
            }
            Some(_) => Err(config.refuse("quant_algo", ALGORITHMS.join(" or "))),
        }
    }

    fn read_compressed(config: &Fields<'_>) -> Result<StoredQuantisation, LoadError> {
        const FORMATS: &[&str] = &[
            "pack-quantized",
            "int-quantized",
            "float-quantized",
            "naive-quantized",
            "mixed-precision",
            "dense",
        ];
        let check = |fields: &Fields<'_>| match fields.text("format")? {
            Some(format) if !FORMATS.contains(&format) => Err(fields.refuse("format", FORMATS.join(", "))),
            _ => Ok(()),
        };
        check(config)?;
        if let Some(sparsity) = config.object("sparsity_config")?
            && sparsity.text("format")?.is_some_and(|format| format != "dense")
        {
            return Err(sparsity.refuse("format", "dense"));
        }
        let mut found = [128, 128];
        let mut sizes = Vec::new();
        for modules in config.object("config_groups")?.iter().flat_map(Fields::objects) {
            check(&modules)?;
            let Some(weights) = modules.object("weights")? else { continue };
            sizes.extend(group(&weights, &["group_size"]));
            if weights.get("block_structure").is_some() {
                found = block(&weights, "block_structure")?;
            }
        }
        sizes.dedup();
        let group = if let [one] = *sizes { Some(one) } else { None };
        Ok(StoredQuantisation::Named { group, block: found })
    }
}

fn need_bits(config: &Fields<'_>, widths: &[usize]) -> Result<(), LoadError> {
    // AWQ files use either name.
    let field = if config.get("w_bit").is_some() { "w_bit" } else { "bits" };
    let expected = || widths.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
    match config.size(field)? {
        Some(bits) if widths.contains(&bits) => Ok(()),
        _ => Err(config.refuse(field, expected())),
    }
}

/// The first of the fields that states a size. -1 is a whole row.
fn group(config: &Fields<'_>, fields: &[&str]) -> Option<usize> {
    let stated = fields.iter().find_map(|field| config.get(field)?.as_u64())?;
    usize::try_from(stated).ok().filter(|size| (1..=MAX_SIZE).contains(size))
}

fn block(config: &Fields<'_>, field: &str) -> Result<[usize; 2], LoadError> {
    let Some(sizes) = config.list(field)? else { return Ok([128, 128]) };
    let size = |value: &serde_json::Value| value.as_u64().filter(|size| (1..=1 << 20).contains(size));
    match sizes.iter().map(size).collect::<Option<Vec<_>>>().as_deref() {
        Some([rows, cols]) => Ok([*rows as usize, *cols as usize]),
        _ => Err(config.refuse(field, "two sizes")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::fields::parse_object;

    fn quantisation(config: &str) -> Result<Option<StoredQuantisation>, LoadError> {
        let path = Path::new("config.json");
        let object = parse_object(path, format!("{{\"quantization_config\": {config}}}").as_bytes())?;
        StoredQuantisation::read(&Fields::new(path, &object))
    }

    #[test]
    fn a_stated_group_is_kept() {
        let of_two = |sizes: [i64; 2]| {
            let [a, b] =
                sizes.map(|size| format!(r#"{{"weights": {{"num_bits": 4, "group_size": {size}}}}}"#));
            format!(r#"{{"quant_method": "compressed-tensors", "config_groups": {{"a": {a}, "b": {b}}}}}"#)
        };
        for (config, expected) in [
            (r#"{"quant_method": "awq", "bits": 4, "group_size": 128}"#, Some(128)),
            (r#"{"quant_method": "awq", "w_bit": 4, "q_group_size": 64}"#, Some(64)),
            (r#"{"quant_method": "gptq", "bits": 4, "group_size": 32}"#, Some(32)),
            (r#"{"quant_method": "gptq", "bits": 4, "group_size": -1}"#, None),
            (r#"{"quant_method": "fp8"}"#, None),
            (&*of_two([128, 128]), Some(128)),
            (&*of_two([128, -1]), Some(128)),
            (&*of_two([128, 32]), None),
        ] {
            assert_eq!(quantisation(config).unwrap().unwrap().group(), expected, "{config}");
        }
    }

    #[test]
    fn unsupported_configurations_are_refused() {
        let methods = "expected awq, gptq, auto-round, compressed-tensors, fp8, fbgemm_fp8 or modelopt";
        let formats = "expected pack-quantized, int-quantized, float-quantized, naive-quantized, mixed-precision, dense";
        for (config, expected) in [
            (r#"{"bits": 4}"#, format!("quant_method is missing, {methods}")),
            (r#"{"quant_method": "hqq"}"#, format!("quant_method is \"hqq\", {methods}")),
            (r#"{"quant_method": "awq"}"#, "bits is missing, expected 4".to_owned()),
            (
                r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#,
                "version is \"gemv\", expected gemm".into(),
            ),
            (r#"{"quant_method": "gptq", "bits": 3}"#, "bits is 3, expected 4 or 8".into()),
            (
                r#"{"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}"#,
                "checkpoint_format is \"marlin\", expected gptq or gptq_v2".into(),
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}"#,
                format!("format is \"nvfp4-pack-quantized\", {formats}"),
            ),
            (
                r#"{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"format": "marlin-24"}}}"#,
                format!("config_groups.group_0.format is \"marlin-24\", {formats}"),
            ),
            (
                r#"{"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}"#,
                "sparsity_config.format is \"sparse-24-bitmask\", expected dense".into(),
            ),
            (
                r#"{"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:auto_gptq"}"#,
                "bits is 2, expected 4 or 8".into(),
            ),
            (
                r#"{"quant_method": "auto-round", "bits": 4, "sym": true}"#,
                "packing_format is missing, expected auto_round:auto_gptq".into(),
            ),
            (
                r#"{"quant_method": "intel/auto-round", "bits": 4, "packing_format": "auto_round"}"#,
                "packing_format is \"auto_round\", expected auto_round:auto_gptq".into(),
            ),
            (
                r#"{"quant_method": "auto-round", "bits": 8, "packing_format": "auto_round:auto_gptq", "data_type": "fp"}"#,
                "data_type is \"fp\", expected int".into(),
            ),
            (
                r#"{"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", "sym": false}"#,
                "sym is false, expected true".into(),
            ),
            (r#"{"quant_method": "fp8", "fmt": "e5m2"}"#, "fmt is \"e5m2\", expected e4m3".into()),
            (
                r#"{"quant_method": "fp8", "weight_block_size": [0, 1]}"#,
                "weight_block_size is [0,1], expected two sizes".into(),
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#,
                "quant_algo is \"NVFP4\", expected FP8 or FP8_PER_CHANNEL_PER_TOKEN".into(),
            ),
            (
                r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "fp8_pb_wo"}}"#,
                "quantization.quant_algo is \"fp8_pb_wo\", expected FP8 or FP8_PER_CHANNEL_PER_TOKEN".into(),
            ),
        ] {
            let error = quantisation(config).unwrap_err().to_string();
            assert_eq!(error, format!("config.json: quantization_config.{expected}"));
        }
    }

    #[test]
    fn fp8_of_modelopt_is_accepted_in_either_place() {
        for config in [
            r#"{"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}"#,
            r#"{"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}"#,
            r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "fp8", "exclude_modules": ["lm_head"]}}"#,
        ] {
            let expected = StoredQuantisation::Named { group: None, block: [128, 128] };
            assert_eq!(quantisation(config).unwrap(), Some(expected), "{config}");
        }
    }

    #[test]
    fn modelopt_without_an_algorithm_quantises_no_weights() {
        for config in [
            r#"{"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo": "FP8"}"#,
            r#"{"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}"#,
            r#"{"quant_method": "modelopt", "quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}"#,
        ] {
            assert_eq!(quantisation(config).unwrap(), None, "{config}");
        }
    }
}
