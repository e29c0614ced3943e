//! Rotary position embeddings: the frequencies of each published variant.

use std::f64::consts::PI;

/// How positions become angles.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// The first elements of a head that are rotated; the others stay as they are.
    pub rotary_dim: usize,
    /// Scaling for longer contexts.
    pub scaling: RopeScaling,
}

/// How the frequencies `theta^(-2i/d)` are changed.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not changed.
    None,
    /// Positions are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided, high frequencies are kept, those between are interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths longer than `original_context / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_context / high_freq_factor` are high frequencies.
        high_freq_factor: f64,
        /// Context of the pre-training.
        original_context: f64,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp over dimensions between kept and divided
    /// frequencies, and a factor on cosines and sines.
    Yarn {
        /// By how much low frequencies are divided.
        factor: f64,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// Rotations within the original context from which a dimension is kept.
        beta_fast: f64,
        /// Rotations within the original context below which it is divided fully.
        beta_slow: f64,
        /// Context of the pre-training.
        original_context: f64,
        /// Whether the ramp's ends are rounded outwards to whole dimensions.
        truncate: bool,
    },
    /// Each frequency is divided by a number of its own: how GGUF files tell Llama 3.1's scaling.
    Divided {
        /// `rotary_dim / 2` of them.
        divisors: Vec<f32>,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency is divided by a number of its own, and a factor on
    /// cosines and sines. `transformers` takes other numbers for sequences within the original context. Keys in a cache
    /// cannot follow that change, so a model has one set, that of its context, as in vLLM.
    LongRope {
        /// `rotary_dim / 2` of them.
        divisors: Vec<f32>,
        /// Multiplies cosines and sines.
        attention_factor: f64,
    },
}

impl RopeSpec {
    /// Angle per position of each pair of elements: `rotary_dim / 2` of them.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let dim = self.rotary_dim;
        (0..dim / 2)
            .map(|i| {
                let inverse = self.theta.powf(-((2 * i) as f64) / dim as f64);
                self.scaled(i, inverse) as f32
            })
            .collect()
    }

    /// Factor on cosines and sines.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                attention_factor as f32
            }
            _ => 1.0,
        }
    }

    fn scaled(&self, i: usize, inverse: f64) -> f64 {
        match &self.scaling {
            RopeScaling::None => inverse,
            RopeScaling::Linear { factor } => inverse / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let rotations = original_context * inverse / (2.0 * PI);
                if rotations < *low_freq_factor {
                    inverse / factor
                } else if rotations > *high_freq_factor {
                    inverse
                } else {
                    let keep = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - keep) * inverse / factor + keep * inverse
                }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate, .. } => {
                let dim = self.rotary_dim as f64;
                // The dimension that makes this many rotations within the original context.
                let dim_of = |rotations: f64| {
                    dim * (original_context / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (dim_of(*beta_fast), dim_of(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                let divide = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                inverse / factor * divide + inverse * (1.0 - divide)
            }
            RopeScaling::Divided { divisors } | RopeScaling::LongRope { divisors, .. } => {
                inverse / f64::from(divisors[i])
            }
        }
    }
}

/// Canonical text, part of the KV's fingerprint: keys are stored rotated.
impl std::fmt::Display for RopeSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "theta={} dim={}", self.theta, self.rotary_dim)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => write!(f, " linear factor={factor}"),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => write!(
                f,
                " llama3 factor={factor} low={low_freq_factor} high={high_freq_factor} original={original_context}"
            ),
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_context,
                truncate,
            } => write!(
                f,
                " yarn factor={factor} attention={attention_factor} fast={beta_fast} slow={beta_slow} \
                 original={original_context} truncate={truncate}"
            ),
            RopeScaling::Divided { divisors } => write!(f, " divided by={}", hash(divisors)),
            RopeScaling::LongRope { divisors, attention_factor } => {
                write!(f, " longrope by={} attention={attention_factor}", hash(divisors))
            }
        }
    }
}

fn hash(divisors: &[f32]) -> String {
    let bytes: Vec<u8> = divisors.iter().flat_map(|divisor| divisor.to_le_bytes()).collect();
    blake3::hash(&bytes).to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(scaling: RopeScaling) -> RopeSpec {
        RopeSpec { theta: 10_000.0, rotary_dim: 128, scaling }
    }

    #[test]
    fn scaling_divides_low_frequencies_and_keeps_high_ones() {
        let plain = spec(RopeScaling::None).inverse_frequencies();
        assert_eq!(plain.len(), 64);
        assert_eq!(plain[0], 1.0);

        let linear = spec(RopeScaling::Linear { factor: 4.0 }).inverse_frequencies();
        assert_eq!(linear[10], plain[10] / 4.0);

        let divisors: Vec<f32> = (1..=64).map(|divisor| divisor as f32).collect();
        let divided = spec(RopeScaling::Divided { divisors }).inverse_frequencies();
        assert!((divided[10] * 11.0 / plain[10] - 1.0).abs() < 1e-6);

        let others = [
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 8192.0,
            },
            RopeScaling::Yarn {
                factor: 8.0,
                attention_factor: 1.2,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_context: 8192.0,
                truncate: true,
            },
        ];
        for scaling in others {
            let scaled = spec(scaling.clone()).inverse_frequencies();
            assert_eq!(scaled[0], plain[0], "{scaling:?}");
            assert!((scaled[63] * 8.0 / plain[63] - 1.0).abs() < 1e-6, "{scaling:?}");
            let ratios: Vec<f32> = plain.iter().zip(&scaled).map(|(p, s)| p / s).collect();
            assert!(ratios.windows(2).all(|pair| pair[0] <= pair[1] + 1e-5), "{scaling:?}: {ratios:?}");
            assert!(ratios.iter().any(|&ratio| ratio > 1.5 && ratio < 7.5), "{scaling:?}: {ratios:?}");
        }
    }
}
