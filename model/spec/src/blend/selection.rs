//! Which tokens of a blended prompt are computed in all layers. Pure.

use std::ops::Range;

use baton_random::hash;

/// The first layer that passages have KV of, and so the first one whose keys can decide.
pub const FIRST_KEPT_LAYER: usize = 1;

/// The part of the tokens of passages that is selected by its order, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlendRatio(f32);

/// The number is not a ratio.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("a blend ratio of {0} is not between 0 and 1")]
pub struct InvalidRatio(pub f32);

/// Which tokens of passages are computed in all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selection {
    /// The layer whose keys decide, at least [`FIRST_KEPT_LAYER`]; in a model with fewer layers it is the last one. Earlier
    /// layers are computed for all tokens.
    pub layer: usize,
    /// So many tokens at the start of each passage always are: on its own, a passage's first tokens get the attention that
    /// in the prompt goes to the tokens before them.
    pub num_first_tokens: usize,
    /// This part of the other tokens is.
    pub ratio: BlendRatio,
    /// In which order tokens are taken.
    pub order: SelectionOrder,
}

/// In which order the tokens of passages are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectionOrder {
    /// Those whose keys deviate most come first.
    Deviation,
    /// At random: what selection by deviation is measured against.
    Random {
        /// Of the random order.
        seed: u64,
    },
}

impl BlendRatio {
    /// Every token is computed: the result is that of a full prefill.
    pub const ALL: BlendRatio = BlendRatio(1.0);

    /// # Errors
    /// When the number is not between 0 and 1.
    pub fn new(ratio: f32) -> Result<BlendRatio, InvalidRatio> {
        if (0.0..=1.0).contains(&ratio) { Ok(BlendRatio(ratio)) } else { Err(InvalidRatio(ratio)) }
    }

    /// The number.
    pub fn get(self) -> f32 {
        self.0
    }

    /// This part of `num_tokens`, rounded.
    pub fn of(self, num_tokens: usize) -> usize {
        (f64::from(self.0) * num_tokens as f64).round() as usize
    }
}

impl Selection {
    /// The layer whose keys decide in a model of `num_layers` layers: its last one if it has fewer than asked for.
    ///
    /// # Panics
    /// When the model has too few layers to blend.
    pub fn layer_in(&self, num_layers: usize) -> usize {
        self.layer.clamp(FIRST_KEPT_LAYER, num_layers - 1)
    }
}

/// The positions of a prompt of `deviations.len()` tokens that are computed in all layers, in ascending order: every
/// token outside of `passages`, the first ones of each passage, and a part of the rest. `deviations` is the squared distance
/// of each token's keys from those of its passage, in the layer that decides; only the tokens of passages count. Of equal
/// tokens the first one is taken.
pub fn select(deviations: &[f32], passages: &[Range<usize>], selection: &Selection) -> Vec<usize> {
    let mut is_selected = vec![true; deviations.len()];
    let mut rest = Vec::new();
    for passage in passages {
        let others = (passage.start + selection.num_first_tokens).min(passage.end)..passage.end;
        is_selected[others.clone()].fill(false);
        rest.extend(others);
    }
    let num_taken = selection.ratio.of(rest.len());
    match selection.order {
        // A NaN deviates most: such a token is computed, and the sampler refuses its logits as in a full prefill.
        SelectionOrder::Deviation => rest.sort_by(|&a, &b| deviations[b].total_cmp(&deviations[a])),
        SelectionOrder::Random { seed } => rest.sort_by_key(|&idx| hash(hash(seed) ^ idx as u64)),
    }
    rest[..num_taken].iter().for_each(|&idx| is_selected[idx] = true);
    (0..deviations.len()).filter(|&idx| is_selected[idx]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(
        deviations: &[f32],
        passages: &[Range<usize>],
        num_first_tokens: usize,
        ratio: f32,
    ) -> Vec<usize> {
        let ratio = BlendRatio::new(ratio).unwrap();
        let order = SelectionOrder::Deviation;
        select(deviations, passages, &Selection { layer: FIRST_KEPT_LAYER, num_first_tokens, ratio, order })
    }

    #[test]
    fn the_largest_deviations_the_first_tokens_and_all_other_text_are_selected() {
        //                 text      passage               text passage
        let deviations = [9.0, 9.0, 0.0, 5.0, 1.0, 7.0, 0.0, 0.0, 6.0, 6.0];
        let passages = [2..6, 7..10];
        for (num_first, ratio, expected) in [
            (0, 0.0, vec![0, 1, 6]),
            (1, 0.0, vec![0, 1, 2, 6, 7]),
            (9, 0.0, (0..10).collect()),
            (0, 0.1, vec![0, 1, 5, 6]),
            // A part of the tokens that are not selected yet; of equal ones the first.
            (1, 0.4, vec![0, 1, 2, 5, 6, 7, 8]),
            (0, 0.5, vec![0, 1, 3, 5, 6, 8, 9]),
            (0, 1.0, (0..10).collect()),
        ] {
            assert_eq!(selected(&deviations, &passages, num_first, ratio), expected, "{num_first}, {ratio}");
        }
        let nan = [0.0, 1.0, f32::NAN, 2.0];
        assert_eq!(selected(&nan, &[0..2, 2..4], 0, 0.25), [2]);
        assert_eq!(selected(&nan, &[], 0, 0.0), [0, 1, 2, 3], "no passages, no reuse");
        assert!(selected(&[], &[], 4, 0.5).is_empty());
    }

    #[test]
    fn random_orders_depend_on_the_seed_alone_and_take_as_many() {
        let passages = [0..100, 150..250];
        let ratio = BlendRatio::new(0.15).unwrap();
        let of_seed = |seed, deviations: &[f32]| {
            let order = SelectionOrder::Random { seed };
            let selection = Selection { layer: FIRST_KEPT_LAYER, num_first_tokens: 4, ratio, order };
            select(deviations, &passages, &selection)
        };
        let rising: Vec<f32> = (0..250).map(|idx| idx as f32).collect();
        let one = of_seed(1, &rising);
        assert_eq!(one, of_seed(1, &[0.0; 250]));
        assert_ne!(one, of_seed(2, &rising));
        assert_eq!(one.len(), selected(&rising, &passages, 4, 0.15).len());
        assert_eq!(one.len(), 50 + 2 * 4 + 29, "15 % of 192");
    }

    #[test]
    fn keys_of_the_last_layer_decide_if_the_layer_is_not_there() {
        let (ratio, order) = (BlendRatio::ALL, SelectionOrder::Deviation);
        for (layer, num_layers, expected) in [(1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 3, 2), (9, 4, 3)] {
            let selection = Selection { layer, num_first_tokens: 0, ratio, order };
            assert_eq!(selection.layer_in(num_layers), expected, "layer {layer} of {num_layers}");
        }
    }

    #[test]
    fn numbers_that_are_no_ratio_are_refused() {
        for bad in [-0.1, 1.1, f32::NAN, f32::INFINITY] {
            let error = BlendRatio::new(bad).unwrap_err().to_string();
            assert_eq!(error, format!("a blend ratio of {bad} is not between 0 and 1"));
        }
        for good in [0.0, 0.15, 1.0] {
            assert_eq!(BlendRatio::new(good).unwrap().get(), good);
        }
        assert_eq!(BlendRatio::ALL.of(7), 7);
    }
}
