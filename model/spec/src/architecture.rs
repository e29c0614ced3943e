//! The supported architectures: converts each one's `config.json` to a [`DecoderSpec`].
//!
//! Defaults are those of the `transformers` library, which omits fields that have their default.

use crate::decoder::{Activation, DecoderSpec, ExpertNaming, LayerSpec, MlpSpec};
use crate::error::LoadError;
use crate::fields::{Fields, MAX_SIZE};
use crate::long_rope;
use crate::rope::{RopeScaling, RopeSpec};
use crate::text_part;

/// The largest number of layers. A file with more is malformed.
pub const MAX_LAYERS: usize = 4096;

/// One row per architecture: the properties that its name implies.
struct Family {
    name: &'static str,
    tensor_prefix: &'static str,
    /// How windows are configured.
    windows: Windows,
    rope_theta: f64,
    norm_eps: f64,
    qkv_bias: Bias,
    output_bias: Bias,
    mlp_bias: Bias,
    gemma: bool,
    /// Of attention scores and of logits, if the fields are absent. `null` is none.
    soft_caps: [Option<f32>; 2],
    qk_norm: bool,
    tied_head: bool,
    fused_projections: bool,
    experts: Option<ExpertNaming>,
}

enum Bias {
    Always,
    Never,
    /// Present if this field is true.
    Field(&'static str),
}

#[derive(Clone, Copy, PartialEq)]
enum Windows {
    None,
    /// `sliding_window` in all layers.
    All,
    /// `sliding_window` in all layers when `use_sliding_window`.
    AllIfUsed,
    /// As `layer_types` says. Without it: layers from `max_window_layers` on, if `use_sliding_window`.
    Qwen,
    /// As `layer_types` says. Without it: every layer except each n-th.
    Alternating(usize),
}

const LLAMA: Family = Family {
    name: "LlamaForCausalLM",
    tensor_prefix: "model.",
    windows: Windows::None,
    rope_theta: 10_000.0,
    norm_eps: 1e-6,
    qkv_bias: Bias::Field("attention_bias"),
    output_bias: Bias::Field("attention_bias"),
    mlp_bias: Bias::Field("mlp_bias"),
    gemma: false,
    soft_caps: [None; 2],
    qk_norm: false,
    tied_head: false,
    fused_projections: false,
    experts: None,
};

const MISTRAL: Family = Family {
    name: "MistralForCausalLM",
    windows: Windows::All,
    qkv_bias: Bias::Never,
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    ..LLAMA
};

const GEMMA2: Family = Family {
    name: "Gemma2ForCausalLM",
    windows: Windows::Alternating(2),
    mlp_bias: Bias::Never,
    gemma: true,
    soft_caps: [Some(50.0), Some(30.0)],
    tied_head: true,
    ..LLAMA
};

const GEMMA3: Family = Family {
    name: "Gemma3ForCausalLM",
    windows: Windows::Alternating(6),
    rope_theta: 1_000_000.0,
    soft_caps: [None; 2],
    qk_norm: true,
    ..GEMMA2
};

const FAMILIES: &[Family] = &[
    LLAMA,
    MISTRAL,
    Family { name: "Qwen2ForCausalLM", windows: Windows::Qwen, qkv_bias: Bias::Always, ..MISTRAL },
    Family {
        name: "Qwen3ForCausalLM",
        windows: Windows::Qwen,
        qk_norm: true,
        mlp_bias: Bias::Never,
        ..LLAMA
    },
    Family {
        name: "MixtralForCausalLM",
        rope_theta: 1_000_000.0,
        norm_eps: 1e-5,
        experts: Some(ExpertNaming::Mixtral),
        ..MISTRAL
    },
    Family {
        name: "Qwen3MoeForCausalLM",
        windows: Windows::AllIfUsed,
        qk_norm: true,
        mlp_bias: Bias::Never,
        experts: Some(ExpertNaming::Qwen),
        ..LLAMA
    },
    GEMMA2,
    GEMMA3,
    Family { name: "Phi3ForCausalLM", norm_eps: 1e-5, fused_projections: true, ..MISTRAL },
];

fn family(name: &str, fields: &Fields<'_>) -> Result<&'static Family, LoadError> {
    FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| LoadError::UnknownArchitecture {
        path: fields.path(),
        found: name.to_owned(),
        expected: FAMILIES
            .iter()
            .map(|family| family.name)
            .chain(text_part::names())
            .collect::<Vec<_>>()
            .join(", "),
    })
}

/// The decoder described by the fields of architecture `name`.
pub fn decoder(name: &str, fields: &Fields<'_>) -> Result<DecoderSpec, LoadError> {
    let family = family(name, fields)?;
    refuse_foreign(family, fields)?;
    let hidden_size = fields.need_size("hidden_size")?;
    let num_heads = fields.need_size("num_attention_heads")?;
    let num_kv_heads = fields.size_or("num_key_value_heads", num_heads)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(fields.refuse("num_key_value_heads", format!("a divisor of {num_heads} attention heads")));
    }
    let head_dim = match fields.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(
                fields.refuse("num_attention_heads", format!("a divisor of hidden_size {hidden_size}"))
            );
        }
    };
    if num_heads * head_dim > MAX_SIZE {
        let expected = format!("so small that {num_heads} heads have at most 2^31 elements together");
        return Err(fields.refuse("head_dim", expected));
    }
    let vocab_size = fields.need_size("vocab_size")?;
    let (ropes, layers) = layers(family, fields, head_dim)?;
    let bias = |bias: &Bias| match bias {
        Bias::Always => Ok(true),
        Bias::Never => Ok(false),
        Bias::Field(field) => fields.flag_or(field, false),
    };
    let scores = match family.gemma {
        true => fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0),
        false => head_dim as f64,
    };
    let cap = |field: &str, default: Option<f32>| -> Result<Option<f32>, LoadError> {
        let stated = fields.positive(field)?.map(|cap| cap as f32);
        Ok(stated.or(default.filter(|_| !fields.is_null(field))))
    };
    let [attention_cap, logit_cap] = family.soft_caps;
    Ok(DecoderSpec {
        vocab_size,
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        layers,
        ropes,
        norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(family.norm_eps) as f32,
        norm_unit_offset: family.gemma,
        post_norms: family.gemma,
        qk_norm: family.qk_norm,
        qkv_bias: bias(&family.qkv_bias)?,
        output_bias: bias(&family.output_bias)?,
        mlp_bias: bias(&family.mlp_bias)?,
        fused_projections: family.fused_projections,
        attention_scale: scores.powf(-0.5) as f32,
        attention_soft_cap: cap("attn_logit_softcapping", attention_cap)?,
        activation: activation(family, fields)?,
        embedding_scale: if family.gemma { (hidden_size as f32).sqrt() } else { 1.0 },
        tied_head: fields.flag_or("tie_word_embeddings", family.tied_head)?,
        logit_soft_cap: cap("final_logit_softcapping", logit_cap)?,
        tensor_prefix: family.tensor_prefix.to_owned(),
    })
}

/// Refuses fields of related architectures that would change the forward pass.
fn refuse_foreign(family: &Family, fields: &Fields<'_>) -> Result<(), LoadError> {
    for field in [
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "logit_scale",
    ] {
        if fields.number(field)?.is_some_and(|x| x != 1.0) {
            return Err(fields.refuse(field, "none, or 1"));
        }
    }
    if fields.flag_or("use_bidirectional_attention", false)? {
        return Err(fields.refuse("use_bidirectional_attention", "false"));
    }
    if family.experts.is_none() && fields.size("num_local_experts")?.is_some_and(|experts| experts > 1) {
        return Err(fields.refuse("num_local_experts", "none for this architecture"));
    }
    if !family.gemma {
        for field in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if fields.get(field).is_some() {
                return Err(fields.refuse(field, "none for this architecture"));
            }
        }
    }
    Ok(())
}

fn activation(family: &Family, fields: &Fields<'_>) -> Result<Activation, LoadError> {
    let (field, default) =
        if family.gemma { ("hidden_activation", "gelu_pytorch_tanh") } else { ("hidden_act", "silu") };
    match fields.text(field)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        _ => Err(fields.refuse(field, "silu, gelu or gelu_pytorch_tanh")),
    }
}

fn layers(
    family: &Family,
    fields: &Fields<'_>,
    head_dim: usize,
) -> Result<(Vec<RopeSpec>, Vec<LayerSpec>), LoadError> {
    let num_layers = fields.need_size("num_hidden_layers")?;
    if num_layers > MAX_LAYERS {
        return Err(fields.refuse("num_hidden_layers", format!("at most {MAX_LAYERS}")));
    }
    let dual_rope = family.gemma && family.qk_norm;
    let ropes = ropes(fields, family, head_dim, dual_rope)?;
    let mut layers = Vec::with_capacity(num_layers);
    for (layer_idx, window) in windows(family, fields, num_layers)?.into_iter().enumerate() {
        let rope_idx = usize::from(dual_rope && window.is_some());
        layers.push(LayerSpec { window, rope_idx, mlp: mlp(family, fields, layer_idx)? });
    }
    Ok((ropes, layers))
}

/// The window of each layer.
fn windows(family: &Family, fields: &Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>, LoadError> {
    let used = match family.windows {
        Windows::None => false,
        Windows::All | Windows::Alternating(_) => true,
        Windows::AllIfUsed | Windows::Qwen => fields.flag_or("use_sliding_window", false)?,
    };
    // The default if absent: 4096 for Gemma, Qwen and Mistral; none for the others. Later Mistrals state `null`: none. GGUF
    // files of Mistral are those of a Llama, which has none.
    let default = match (family.windows, family.name) {
        (Windows::Alternating(_), _)
        | (_, "Qwen2ForCausalLM" | "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM") => Some(4096),
        (_, "MistralForCausalLM") if !fields.is_null("sliding_window") => Some(4096),
        _ => None,
    };
    let window = if used { fields.size("sliding_window")?.or(default) } else { None };
    let by_layer = matches!(family.windows, Windows::Qwen | Windows::Alternating(_));
    if by_layer && let Some(types) = fields.list("layer_types")? {
        let expected = format!("{num_layers} times full_attention or sliding_attention");
        if types.len() != num_layers {
            return Err(fields.refuse("layer_types", expected));
        }
        return types
            .iter()
            .map(|kind| match (kind.as_str(), window) {
                (Some("full_attention"), _) => Ok(None),
                (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
                (Some("sliding_attention"), None) => {
                    Err(fields.refuse("sliding_window", "a size, as layer_types has sliding_attention"))
                }
                _ => Err(fields.refuse("layer_types", expected.clone())),
            })
            .collect();
    }
    let full_from = fields.size_or("max_window_layers", 28);
    let pattern = match family.windows {
        Windows::Alternating(default) => fields.size_or("sliding_window_pattern", default)?,
        _ => 1,
    };
    let max_window_layers = match fields.get("max_window_layers").and_then(serde_json::Value::as_u64) {
        Some(0) => 0,
        _ => full_from?,
    };
    let slides = |layer_idx: usize| match family.windows {
        Windows::None => false,
        Windows::All | Windows::AllIfUsed => true,
        Windows::Qwen => layer_idx >= max_window_layers,
        Windows::Alternating(_) => !(layer_idx + 1).is_multiple_of(pattern),
    };
    Ok((0..num_layers).map(|layer_idx| window.filter(|_| slides(layer_idx))).collect())
}

fn mlp(family: &Family, fields: &Fields<'_>, layer_idx: usize) -> Result<MlpSpec, LoadError> {
    let dense = || Ok(MlpSpec::Dense { intermediate_size: fields.need_size("intermediate_size")? });
    let Some(naming) = family.experts else { return dense() };
    let (field, intermediate, renormalise) = match naming {
        ExpertNaming::Mixtral => ("num_local_experts", "intermediate_size", true),
        ExpertNaming::Qwen => {
            let listed = fields
                .list("mlp_only_layers")?
                .is_some_and(|layers| layers.iter().any(|layer| layer.as_u64() == Some(layer_idx as u64)));
            if listed || !(layer_idx + 1).is_multiple_of(fields.size_or("decoder_sparse_step", 1)?) {
                return dense();
            }
            let field = if fields.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
            (field, "moe_intermediate_size", fields.flag_or("norm_topk_prob", false)?)
        }
    };
    let num_experts = fields.need_size(field)?;
    let num_active = fields.need_size("num_experts_per_tok")?;
    if num_active > num_experts {
        return Err(fields.refuse("num_experts_per_tok", format!("at most {num_experts} experts")));
    }
    let intermediate_size = fields.need_size(intermediate)?;
    Ok(MlpSpec::Experts { num_experts, num_active, intermediate_size, renormalise, naming })
}

/// One rotary embedding, or two: for full and for sliding layers.
fn ropes(
    fields: &Fields<'_>,
    family: &Family,
    head_dim: usize,
    dual: bool,
) -> Result<Vec<RopeSpec>, LoadError> {
    let parameters = fields.object("rope_parameters")?;
    let nested = parameters.as_ref().filter(|parameters| parameters.get("full_attention").is_some());
    let [full, sliding] = match nested {
        Some(nested) if !dual => {
            return Err(nested.refuse("full_attention", "one set of parameters for all layers"));
        }
        Some(nested) => [nested.object("full_attention")?, nested.object("sliding_attention")?],
        None => [parameters.clone(), None],
    };
    // Scaling applies only to the layers that see the whole context.
    let scaling = stated_scaling(fields)?;
    let first = scaling.as_ref().or(full.as_ref());
    let mut ropes = vec![rope(fields, [first, full.as_ref()], "rope_theta", family.rope_theta, head_dim)?];
    if dual {
        ropes.push(rope(fields, [sliding.as_ref(), None], "rope_local_base_freq", 10_000.0, head_dim)?);
    }
    Ok(ropes)
}

/// `rope_scaling`, unless it is empty: files before transformers 5 have it, and it overrides `rope_parameters`, as there.
fn stated_scaling<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>, LoadError> {
    Ok(fields.object("rope_scaling")?.filter(|scaling| !scaling.is_empty()))
}

/// The rotary embedding with the scaling of `first`. A number that this lacks is that of the configuration itself, else that
/// of `second`.
fn rope(
    fields: &Fields<'_>,
    [first, second]: [Option<&Fields<'_>>; 2],
    theta_field: &str,
    theta: f64,
    head_dim: usize,
) -> Result<RopeSpec, LoadError> {
    let of = |parameters: Option<&Fields<'_>>, field: &str| {
        parameters.map_or(Ok(None), |parameters| parameters.positive(field))
    };
    let number = |field: &str, own_field: &str| -> Result<Option<f64>, LoadError> {
        Ok(of(first, field)?.or(fields.positive(own_field)?).or(of(second, field)?))
    };
    let theta = number("rope_theta", theta_field)?.unwrap_or(theta);
    let partial = number("partial_rotary_factor", "partial_rotary_factor")?.unwrap_or(1.0);
    let rotary_dim = (head_dim as f64 * partial) as usize;
    if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) || rotary_dim == 0 {
        return Err(fields.refuse("head_dim", "an even number, with partial_rotary_factor in 0 to 1"));
    }
    let scaling = match first {
        Some(parameters) => scaling(fields, parameters)?,
        None => RopeScaling::None,
    };
    if let Some(parameters) = first
        && let RopeScaling::LongRope { divisors, .. } = &scaling
        && divisors.len() != rotary_dim / 2
    {
        let expected = format!("{} numbers, as {rotary_dim} elements of a head are rotated", rotary_dim / 2);
        return Err(parameters.refuse("long_factor", expected));
    }
    Ok(RopeSpec { theta, rotary_dim, scaling })
}

fn scaling(fields: &Fields<'_>, parameters: &Fields<'_>) -> Result<RopeScaling, LoadError> {
    let field = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    let original = || -> Result<f64, LoadError> {
        let size = match parameters.size("original_max_position_embeddings")? {
            Some(size) => size,
            None => fields.need_size("max_position_embeddings")?,
        };
        Ok(size as f64)
    };
    match parameters.text(field)?.unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: parameters.need_positive("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: parameters.need_positive("factor")?,
            low_freq_factor: parameters.need_positive("low_freq_factor")?,
            high_freq_factor: parameters.need_positive("high_freq_factor")?,
            original_context: original()?,
        }),
        "yarn" => {
            let original_context = original()?;
            let factor = match parameters.positive("factor")? {
                Some(factor) => factor,
                None => fields.need_size("max_position_embeddings")? as f64 / original_context,
            };
            let mscale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
            let attention_factor = match parameters.positive("attention_factor")? {
                Some(attention_factor) => attention_factor,
                None => {
                    let own = match (parameters.number("mscale")?, parameters.number("mscale_all_dim")?) {
                        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale(one) / mscale(all),
                        _ => mscale(1.0),
                    };
                    // As in vLLM and SGLang: models that were trained without YaRN's factor cancel it.
                    own * parameters.positive("attn_factor")?.unwrap_or(1.0)
                }
            };
            Ok(RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast: parameters.positive("beta_fast")?.unwrap_or(32.0),
                beta_slow: parameters.positive("beta_slow")?.unwrap_or(1.0),
                original_context,
                truncate: parameters.flag_or("truncate", true)?,
            })
        }
        "longrope" | "su" => long_rope::read(fields, parameters),
        _ => Err(parameters.refuse(field, "default, linear, llama3, yarn or longrope")),
    }
}

/// Fields of the rotary embedding's parameters that are read, for one type or another, or that change nothing for text.
const ROPE_FIELDS: &[&str] = &[
    "attention_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "full_attention",
    "high_freq_factor",
    "long_factor",
    "long_mscale",
    "low_freq_factor",
    "mrope_interleaved",
    "mrope_section",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "short_mscale",
    "sliding_attention",
    "truncate",
    "type",
];

/// The other fields of the rotary embedding's parameters.
pub(crate) fn unknown_rope_fields(fields: &Fields<'_>) -> Result<Vec<String>, LoadError> {
    let mut names = Vec::new();
    for parameters in [fields.object("rope_scaling")?, fields.object("rope_parameters")?].iter().flatten() {
        names.extend(parameters.names_besides(ROPE_FIELDS));
        names.extend(parameters.objects().flat_map(|of_layers| of_layers.names_besides(ROPE_FIELDS)));
    }
    Ok(names)
}

/// The largest number of tokens of a sequence.
pub fn context_length(name: &str, fields: &Fields<'_>) -> Result<usize, LoadError> {
    let default = match name {
        "Gemma2ForCausalLM" => 8192,
        "Gemma3ForCausalLM" => 131_072,
        _ => 2048,
    };
    let length = fields.size_or("max_position_embeddings", default)?;
    let parameters = match stated_scaling(fields)? {
        None => fields.object("rope_parameters")?,
        stated => stated,
    };
    let Some(parameters) = parameters.filter(|parameters| parameters.get("full_attention").is_none()) else {
        return Ok(length);
    };
    match scaling(fields, &parameters)? {
        // YaRN is often enabled by one field while the context length stays unchanged.
        RopeScaling::Yarn { factor, original_context, .. } => {
            let length = length.max((factor * original_context) as usize);
            if length <= MAX_SIZE {
                Ok(length)
            } else {
                Err(parameters.refuse("factor", "one that makes a context of at most 2^31 tokens"))
            }
        }
        // Vicuna's and LongChat's `max_position_embeddings` is that of the pre-training.
        RopeScaling::Linear { factor } => {
            let stated = fields.size_or("max_sequence_length", length)?;
            Ok(length.max(stated.min((length as f64 * factor) as usize)))
        }
        _ => Ok(length),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use super::*;
    use crate::fields::parse_object;

    /// The decoder of a small model with some more fields.
    fn small(name: &str, more: &str) -> DecoderSpec {
        let sizes = r#""hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 8"#;
        let json = format!("{{{sizes}, \"intermediate_size\": 8{more}}}");
        let path = Path::new("config.json");
        let object = parse_object(path, json.as_bytes()).unwrap();
        decoder(name, &Fields::new(path, &object)).unwrap()
    }

    #[test]
    fn rope_scaling_overrides_rope_parameters_unless_it_is_empty() {
        let check = |name: &str, more: &str, expected: &[(RopeScaling, f64)]| {
            let ropes = small(name, more).ropes;
            let found: Vec<_> = ropes.into_iter().map(|rope| (rope.scaling, rope.theta)).collect();
            assert_eq!(found, expected, "{name}{more}");
        };
        let linear = |factor: f64| RopeScaling::Linear { factor };
        let four = r#", "rope_scaling": {"rope_type": "linear", "factor": 4}"#;
        let two = r#", "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 200}"#;
        let own = r#", "rope_theta": 500"#;
        let llama = "LlamaForCausalLM";
        check(llama, two, &[(linear(2.0), 200.0)]);
        check(llama, &format!("{four}{two}"), &[(linear(4.0), 200.0)]);
        check(llama, &format!("{four}{two}{own}"), &[(linear(4.0), 500.0)]);
        let with_theta = r#", "rope_scaling": {"type": "linear", "factor": 4, "rope_theta": 400}"#;
        check(llama, &format!("{with_theta}{two}{own}"), &[(linear(4.0), 400.0)]);
        check(llama, &format!("{two}, \"rope_scaling\": {{}}"), &[(linear(2.0), 200.0)]);
        check(llama, &format!("{two}, \"rope_scaling\": null"), &[(linear(2.0), 200.0)]);

        // Gemma 3 scales its full layers alone.
        let gemma = "Gemma3ForCausalLM";
        let nested = r#", "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 600},
            "sliding_attention": {"rope_type": "default", "rope_theta": 60}}"#;
        check(gemma, nested, &[(RopeScaling::None, 600.0), (RopeScaling::None, 60.0)]);
        check(gemma, &format!("{four}{nested}"), &[(linear(4.0), 600.0), (RopeScaling::None, 60.0)]);
        check(gemma, &format!("{four}{own}"), &[(linear(4.0), 500.0), (RopeScaling::None, 10_000.0)]);
    }

    #[test]
    fn fields_of_rope_that_are_not_read_are_found() {
        let path = Path::new("config.json");
        for (json, expected) in [
            (r#"{"rope_scaling": null}"#, vec![]),
            (r#"{"rope_scaling": {"type": "yarn", "factor": 4, "finetuned": true, "alpha": null}}"#, vec![]),
            (
                r#"{"rope_scaling": {"type": "yarn", "extrapolation_factor": 2},
                    "rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}}"#,
                vec!["rope_scaling.extrapolation_factor", "rope_parameters.llama_4_scaling_beta"],
            ),
            (
                r#"{"rope_parameters": {"full_attention": {"rope_theta": 1e6, "alpha": 8}}}"#,
                vec!["rope_parameters.full_attention.alpha"],
            ),
        ] {
            let object = parse_object(path, json.as_bytes()).unwrap();
            assert_eq!(unknown_rope_fields(&Fields::new(path, &object)).unwrap(), expected, "{json}");
        }
    }

    /// The rope of a Phi-3 of `max` tokens whose heads have 6 rotated elements of 8, with more fields of `rope_scaling`.
    fn long_rope(kind: &str, max: usize, more: &str) -> RopeSpec {
        let scaling = format!(
            r#"{{"type": "{kind}", "short_factor": [1, 1.25, 2.5], "long_factor": [1.5, 4.25, 60.5]{more}}}"#
        );
        let fields = format!(
            ", \"max_position_embeddings\": {max}, \"original_max_position_embeddings\": 4096, \
             \"partial_rotary_factor\": 0.75, \"rope_scaling\": {scaling}"
        );
        small("Phi3ForCausalLM", &fields).ropes.remove(0)
    }

    #[test]
    fn long_rope_has_the_frequencies_of_the_whole_context() {
        // f = lambda x: struct.unpack("f", struct.pack("f", x))[0]
        // [f(1 / (f(e) * 10000 ** (2 * i / 6))) for i, e in enumerate([1.5, 4.25, 60.5])]
        const LONG: [f32; 3] = [0.666_666_7, 0.010_921_385, 3.561_049e-5];
        // The same of [1, 1.25, 2.5].
        const SHORT: [f32; 3] = [1.0, 0.037_132_71, 0.000_861_773_85];
        // math.sqrt(1 + math.log(131072 / 4096) / math.log(4096))
        const ATTENTION: f32 = 1.190_238_1;
        let check = |rope: RopeSpec, expected: [f32; 3], attention: f32| {
            let found = rope.inverse_frequencies();
            assert_eq!((rope.rotary_dim, found.len()), (6, 3));
            let is_near = |(found, expected): (&f32, f32)| (found / expected - 1.0).abs() < 1e-6;
            assert!(found.iter().zip(expected).all(is_near), "{found:?}, expected {expected:?}");
            assert!((rope.attention_factor() - attention).abs() < 1e-6, "{}", rope.attention_factor());
        };
        for kind in ["longrope", "su"] {
            check(long_rope(kind, 131_072, ""), LONG, ATTENTION);
            check(long_rope(kind, 4096, ""), SHORT, 1.0);
        }
        let mscales = r#", "short_mscale": 1.125, "long_mscale": 1.25"#;
        check(long_rope("longrope", 131_072, mscales), LONG, 1.25);
        check(long_rope("longrope", 4096, mscales), SHORT, 1.125);
        check(long_rope("longrope", 131_072, r#", "attention_factor": 1.5"#), LONG, 1.5);
    }

    #[test]
    fn the_text_of_long_rope_tells_its_frequencies_and_its_factor() {
        let texts: HashSet<String> = [(131_072, ""), (4096, ""), (131_072, r#", "attention_factor": 1.5"#)]
            .iter()
            .map(|(max, more)| long_rope("longrope", *max, more).to_string())
            .collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
    }

    #[test]
    fn attn_factor_multiplies_the_factor_of_yarn() {
        let check = |more: &str, expected: f32| {
            let yarn = format!(r#", "rope_scaling": {{"rope_type": "yarn", "factor": 4.0{more}}}"#);
            let yarn = format!("{yarn}, \"max_position_embeddings\": 64");
            let found = small("Qwen3ForCausalLM", &yarn).ropes[0].attention_factor();
            assert!((found - expected).abs() < 1e-6, "{more}: {found}, expected {expected}");
        };
        let by_factor = 0.1 * 4.0_f32.ln() + 1.0;
        check("", by_factor);
        // As in DeepSeek-R1-0528-Qwen3-8B.
        check(r#", "attn_factor": 0.8782488562869419"#, 1.0);
        check(r#", "attn_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 2.0"#, 0.5);
        check(r#", "attn_factor": 0.5, "attention_factor": 1.25"#, 1.25);
    }

    #[test]
    fn a_context_is_extended_by_rope_scaling_beside_rope_parameters() {
        let json = r#"{"max_position_embeddings": 32, "rope_parameters": {"rope_theta": 200},
                       "rope_scaling": {"rope_type": "yarn", "factor": 4}}"#;
        assert_eq!(context("LlamaForCausalLM", json), 128);
    }

    fn context(name: &str, json: &str) -> usize {
        let path = Path::new("config.json");
        let object = parse_object(path, json.as_bytes()).unwrap();
        context_length(name, &Fields::new(path, &object)).unwrap()
    }

    #[test]
    fn linear_scaling_extends_the_context_to_the_stated_length() {
        let check = |kind: &str, factor: f64, stated: &str, expected: usize| {
            let scaling = format!(r#""rope_scaling": {{"type": "{kind}", "factor": {factor}}}"#);
            let json = format!(r#"{{"max_position_embeddings": 4096, {scaling}{stated}}}"#);
            assert_eq!(context("LlamaForCausalLM", &json), expected, "{json}");
        };
        let stated = r#", "max_sequence_length": 16384"#;
        check("linear", 4.0, stated, 16384);
        check("linear", 2.0, stated, 8192);
        check("linear", 8.0, stated, 16384);
        check("linear", 4.0, "", 4096);
        check("linear", 4.0, r#", "max_sequence_length": 2048"#, 4096);
        check("default", 4.0, stated, 4096);
    }

    #[test]
    fn absent_soft_caps_have_the_default_and_null_is_none() {
        let check = |name: &str, more: &str, expected: [Option<f32>; 2]| {
            let decoder = small(name, more);
            assert_eq!([decoder.attention_soft_cap, decoder.logit_soft_cap], expected, "{name}{more}");
        };
        let none = r#", "attn_logit_softcapping": null, "final_logit_softcapping": null"#;
        check("Gemma2ForCausalLM", "", [Some(50.0), Some(30.0)]);
        check("Gemma2ForCausalLM", r#", "final_logit_softcapping": 20"#, [Some(50.0), Some(20.0)]);
        check("Gemma2ForCausalLM", none, [None; 2]);
        check("Gemma3ForCausalLM", "", [None; 2]);
        check("Gemma3ForCausalLM", r#", "attn_logit_softcapping": 5"#, [Some(5.0), None]);
        check("LlamaForCausalLM", "", [None; 2]);
        check("LlamaForCausalLM", none, [None; 2]);
    }

    #[test]
    fn an_absent_window_of_mistral_has_the_default_and_null_is_none() {
        let check = |name: &str, more: &str, expected: Option<usize>| {
            let windows: Vec<_> = small(name, more).layers.iter().map(|layer| layer.window).collect();
            assert_eq!(windows, [expected; 2], "{name}{more}");
        };
        check("MistralForCausalLM", "", Some(4096));
        check("MistralForCausalLM", r#", "sliding_window": 24"#, Some(24));
        check("MistralForCausalLM", r#", "sliding_window": null"#, None);
        check("MixtralForCausalLM", r#", "num_local_experts": 2, "num_experts_per_tok": 1"#, None);
        check("Phi3ForCausalLM", "", None);
        check("LlamaForCausalLM", "", None);
    }
}
