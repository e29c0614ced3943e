//! The tensors of the text model among those of a model that reads images too.
//!
//! It knows only where the parts' names begin, not what the text model needs.

use std::collections::BTreeMap;

use baton_model_spec::LoadError;

use crate::tensors::Tensors;

/// Parts that the decoder does not need.
const OTHER_PARTS: &[&str] = &["vision_tower.", "multi_modal_projector."];

/// Names the text model's tensors as in a directory of that model alone, and drops those of other parts.
///
/// # Errors
/// When two tensors get the same name: either could be the right one.
pub(crate) fn keep(tensors: &mut Tensors) -> Result<(), LoadError> {
    let mut stored_names: BTreeMap<String, String> = BTreeMap::new();
    for (name, tensor) in std::mem::take(&mut tensors.by_name) {
        let Some(published) = published(&name) else { continue };
        if let Some(other) = stored_names.insert(published.clone(), name.clone()) {
            let message = format!("tensors {other} and {name} are both {published}, expected one of them");
            return Err(LoadError::bad_file(tensor.span.file().path(), message));
        }
        tensors.by_name.insert(published, tensor);
    }
    Ok(())
}

/// The name in a directory of the text model alone; `None` for a tensor of another part.
fn published(name: &str) -> Option<String> {
    // As published, `language_model.model.norm.weight` and `language_model.lm_head.weight`; and as transformers saves since
    // 4.52, `model.language_model.norm.weight` and `lm_head.weight`.
    if let Some(rest) = name.strip_prefix("language_model.") {
        return Some(rest.to_owned());
    }
    let in_model = name.strip_prefix("model.").unwrap_or(name);
    if let Some(rest) = in_model.strip_prefix("language_model.") {
        return Some(format!("model.{rest}"));
    }
    let is_other = OTHER_PARTS.iter().any(|part| in_model.starts_with(part));
    (!is_other).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::published;

    #[test]
    fn both_forms_of_names_become_those_of_the_text_model() {
        for (stored, expected) in [
            ("language_model.model.norm.weight", Some("model.norm.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            ("model.language_model.norm.weight", Some("model.norm.weight")),
            ("lm_head.weight", Some("lm_head.weight")),
            ("vision_tower.vision_model.post_layernorm.bias", None),
            ("model.vision_tower.patch_conv.weight", None),
            ("multi_modal_projector.norm.weight", None),
            ("model.multi_modal_projector.linear_1.weight", None),
            ("model.other.weight", Some("model.other.weight")),
        ] {
            assert_eq!(published(stored).as_deref(), expected, "{stored}");
        }
    }
}
