//! Reads LongRoPE: `longrope`, or `su` in older files of Phi-3.
//!
//! Which factors are taken is decided here, once for a model: keys in a cache cannot follow a later change.

use crate::error::LoadError;
use crate::fields::Fields;
use crate::rope::RopeScaling;

/// The scaling of `parameters`, of the model with these `fields`.
///
/// # Errors
/// When a field is missing or invalid. The number of factors is compared with short_factor's only.
pub(crate) fn read(fields: &Fields<'_>, parameters: &Fields<'_>) -> Result<RopeScaling, LoadError> {
    const FIELD: &str = "original_max_position_embeddings";
    let own = fields.size(FIELD)?;
    let original = match own.or(parameters.size(FIELD)?) {
        Some(original) if original > 1 => original as f64,
        _ => return Err(fields.refuse(FIELD, "a whole number from 2 to 2^31")),
    };
    let max = fields.need_size("max_position_embeddings")? as f64;
    // As in transformers: `factor` counts only where the original context is not the model's own field.
    let stated = if own.is_none() { parameters.positive("factor")? } else { None };
    let factor = stated.unwrap_or(max / original);

    let [short, long] = [factors(parameters, "short_factor")?, factors(parameters, "long_factor")?];
    if short.len() != long.len() {
        return Err(parameters.refuse("long_factor", format!("{} numbers, as short_factor has", short.len())));
    }
    let (divisors, mscale) = if max > original { (long, "long_mscale") } else { (short, "short_mscale") };
    let attention_factor = match parameters.positive("attention_factor")?.or(parameters.positive(mscale)?) {
        Some(attention_factor) => attention_factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    Ok(RopeScaling::LongRope { divisors, attention_factor })
}

fn factors(parameters: &Fields<'_>, field: &str) -> Result<Vec<f32>, LoadError> {
    let factor = |value: &serde_json::Value| {
        value.as_f64().map(|factor| factor as f32).filter(|factor| factor.is_finite() && *factor > 0.0)
    };
    let values = parameters.list(field)?;
    let found: Option<Vec<f32>> = values.and_then(|values| values.iter().map(factor).collect());
    found.ok_or_else(|| parameters.refuse(field, "a list of positive numbers"))
}
