//! The requests of a load: lengths, arrival times and prompts, all from one seed.

use std::{fmt, str::FromStr, time::Duration};

use baton_random::Random;

use super::trace::{Fit, TraceRequest};

/// One planned request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Planned {
    /// When, from the start of the load. `None`: as soon as the one before it is done.
    pub(crate) at: Option<Duration>,
    pub(crate) input_tokens: usize,
    pub(crate) output_tokens: usize,
    /// Equal ids are equal stretches of the prompt, [`Prompts::block_tokens`] long.
    pub(crate) blocks: Vec<u64>,
    /// Makes the rest of the prompt unique.
    pub(crate) id: u64,
}

impl Planned {
    /// Its blocks are those of this target alone. Their ids have 32 bits.
    pub(crate) fn for_target(mut self, target_idx: usize) -> Planned {
        self.blocks.iter_mut().for_each(|block| *block ^= (target_idx as u64) << 40);
        self
    }
}

/// A distribution of lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lengths {
    Fixed(usize),
    /// Both ends included.
    Uniform(usize, usize),
    /// By mean and deviation.
    Normal(f64, f64),
    /// By median, and deviation of the logarithm.
    LogNormal(f64, f64),
    /// By mean.
    Exponential(f64),
}

impl Lengths {
    /// At least 1.
    pub(crate) fn sample(self, random: &mut Random) -> usize {
        let length = match self {
            Self::Fixed(length) => return length.max(1),
            Self::Uniform(low, high) => return low + random.below((high - low + 1) as u64) as usize,
            Self::Normal(mean, deviation) => mean + deviation * random.normal(),
            Self::LogNormal(median, deviation) => median * (deviation * random.normal()).exp(),
            Self::Exponential(mean) => mean * random.exponential(),
        };
        (length.round() as usize).max(1)
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "{text:?} is not a length: use 128, 64..256, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA or exponential:MEAN"
            )
        };
        let number = |text: &str| {
            text.trim().parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0).ok_or_else(expected)
        };
        let pair = |text: &str| {
            let (first, second) = text.split_once(',').ok_or_else(expected)?;
            Ok::<_, String>((number(first)?, number(second)?))
        };
        if let Some((kind, numbers)) = text.split_once(':') {
            return match kind {
                "normal" => pair(numbers).map(|(mean, deviation)| Self::Normal(mean, deviation)),
                "lognormal" => pair(numbers).map(|(median, sigma)| Self::LogNormal(median, sigma)),
                "exponential" => number(numbers).map(Self::Exponential),
                _ => Err(expected()),
            };
        }
        let whole = |text: &str| text.trim().parse::<usize>().ok().filter(|n| *n > 0).ok_or_else(expected);
        match text.split_once("..") {
            Some((low, high)) => {
                let (low, high) = (whole(low)?, whole(high.trim_start_matches('='))?);
                if low > high { Err(expected()) } else { Ok(Self::Uniform(low, high)) }
            }
            None => whole(text).map(Self::Fixed),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(length) => write!(f, "{length}"),
            Self::Uniform(low, high) => write!(f, "{low}..{high}"),
            Self::Normal(mean, deviation) => write!(f, "normal:{mean},{deviation}"),
            Self::LogNormal(median, sigma) => write!(f, "lognormal:{median},{sigma}"),
            Self::Exponential(mean) => write!(f, "exponential:{mean}"),
        }
    }
}

/// Requests of sampled lengths, without an end; with a rate (per second), at the times of a Poisson process.
#[derive(Clone, Debug)]
pub(crate) struct Synthetic {
    rate: Option<f64>,
    input: Lengths,
    output: Lengths,
    lengths: Random,
    arrivals: Random,
    /// When the next request is due, in seconds.
    at: f64,
    next_id: u64,
}

impl Synthetic {
    pub(crate) fn new(rate: Option<f64>, input: Lengths, output: Lengths, seed: u64) -> Self {
        let (lengths, arrivals) = (Random::stream(seed, 1), Random::stream(seed, 2));
        Self { rate, input, output, lengths, arrivals, at: 0.0, next_id: 0 }
    }
}

impl Iterator for Synthetic {
    type Item = Planned;

    fn next(&mut self) -> Option<Planned> {
        let planned = Planned {
            at: self.rate.map(|_| Duration::from_secs_f64(self.at)),
            input_tokens: self.input.sample(&mut self.lengths),
            output_tokens: self.output.sample(&mut self.lengths),
            blocks: Vec::new(),
            id: self.next_id,
        };
        self.next_id += 1;
        if let Some(rate) = self.rate {
            self.at += self.arrivals.exponential() / rate;
        }
        Some(planned)
    }
}

/// The requests of a trace, at its times.
pub(crate) fn of_trace(trace: Vec<TraceRequest>, fit: &Fit) -> Vec<Planned> {
    let plan = |(idx, mut request): (usize, TraceRequest)| {
        fit.apply(&mut request);
        Planned {
            at: Some(request.at),
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            blocks: request.hash_ids,
            id: idx as u64,
        }
    };
    trace.into_iter().enumerate().map(plan).collect()
}

/// A prompt as it is sent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prompt {
    Ids(Vec<u32>),
    Text(String),
}

/// The units of prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Material {
    /// Token ids from `low` to below `high`: lengths are exact.
    Ids { low: u32, high: u32 },
    /// English words: about `tokens_per_word` each, and `overhead` tokens around them.
    Words { tokens_per_word: f64, overhead: f64 },
}

impl Material {
    /// The units of a prompt of so many tokens.
    fn prompt_units(self, input_tokens: usize) -> usize {
        match self {
            Self::Ids { .. } => input_tokens,
            Self::Words { tokens_per_word, overhead } => {
                ((input_tokens as f64 - overhead) / tokens_per_word).round().max(1.0) as usize
            }
        }
    }

    /// The units of a part of so many tokens.
    fn units(self, tokens: usize) -> usize {
        match self {
            Self::Ids { .. } => tokens,
            Self::Words { tokens_per_word, .. } => (tokens as f64 / tokens_per_word).round() as usize,
        }
    }
}

/// Makes prompts. Those of equal seed, material and request are equal.
#[derive(Clone, Debug)]
pub(crate) struct Prompts {
    pub(crate) material: Material,
    pub(crate) seed: u64,
    /// Tokens that one id of [`Planned::blocks`] stands for.
    pub(crate) block_tokens: usize,
    /// Tokens at the front that all requests have in common.
    pub(crate) shared_prefix: usize,
}

/// The stream of random numbers that a part of a prompt is sampled from.
const BLOCKS: u64 = 1 << 62;
const PREFIX: u64 = 2 << 62;
const REST: u64 = 3 << 62;

impl Prompts {
    pub(crate) fn make(&self, planned: &Planned) -> Prompt {
        match self.material {
            Material::Ids { low, high } => {
                let mut ids = Vec::with_capacity(planned.input_tokens);
                self.fill(planned, |random| {
                    ids.push(low + random.below(u64::from(high - low)) as u32);
                });
                Prompt::Ids(ids)
            }
            Material::Words { .. } => {
                let mut text = String::new();
                self.fill(planned, |random| {
                    if !text.is_empty() {
                        text.push(' ');
                    }
                    text.push_str(WORDS[random.below(WORDS.len() as u64) as usize]);
                });
                Prompt::Text(text)
            }
        }
    }

    /// Whether the prompt is longer than the prefix that all share: shorter ones are equal.
    pub(crate) fn exceeds_prefix(&self, planned: &Planned) -> bool {
        self.material.prompt_units(planned.input_tokens) > self.material.units(self.shared_prefix)
    }

    /// Calls `push` for each unit (token or word) of the prompt with the random numbers to sample it from.
    fn fill(&self, planned: &Planned, mut push: impl FnMut(&mut Random)) {
        let mut left = self.material.prompt_units(planned.input_tokens);
        let mut stretch = |stream: u64, wanted: usize| {
            let mut random = Random::stream(self.seed, stream);
            let num_units = wanted.min(left);
            for _ in 0..num_units {
                push(&mut random);
            }
            left -= num_units;
        };
        for block in &planned.blocks {
            stretch(BLOCKS ^ block, self.material.units(self.block_tokens));
        }
        if planned.blocks.is_empty() {
            stretch(PREFIX, self.material.units(self.shared_prefix));
        }
        stretch(REST ^ planned.id, usize::MAX);
    }
}

/// Common words: one or two tokens each in most vocabularies.
const WORDS: [&str; 64] = [
    "the", "a", "and", "of", "to", "in", "on", "with", "for", "from", "about", "over", "under", "before",
    "after", "when", "then", "there", "here", "every", "some", "many", "little", "big", "old", "new", "good",
    "small", "long", "red", "blue", "green", "white", "dark", "warm", "cold", "house", "tree", "river",
    "road", "door", "window", "book", "day", "night", "morning", "water", "bread", "stone", "hand", "child",
    "friend", "mother", "dog", "bird", "went", "saw", "found", "gave", "told", "asked", "kept", "opened",
    "walked",
];

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: Material = Material::Ids { low: 100, high: 200 };

    fn planned(input_tokens: usize, blocks: &[u64], id: u64) -> Planned {
        Planned { at: None, input_tokens, output_tokens: 1, blocks: blocks.to_vec(), id }
    }

    fn prompts(material: Material) -> Prompts {
        Prompts { material, seed: 7, block_tokens: 16, shared_prefix: 0 }
    }

    fn ids(prompts: &Prompts, planned: &Planned) -> Vec<u32> {
        match prompts.make(planned) {
            Prompt::Ids(ids) => ids,
            Prompt::Text(text) => panic!("{text}"),
        }
    }

    #[test]
    fn equal_blocks_are_equal_text() {
        let prompts = prompts(IDS);
        let a = ids(&prompts, &planned(40, &[1, 2, 3], 0));
        let b = ids(&prompts, &planned(45, &[1, 2, 4], 1));
        assert_eq!((a.len(), b.len()), (40, 45));
        assert_eq!(a[..32], b[..32]);
        assert_ne!(a[32..40], b[32..40]);
        assert!(a.iter().all(|id| (100..200).contains(id)));
        assert_eq!(a, ids(&prompts, &planned(40, &[1, 2, 3], 0)), "the seed decides");
    }

    #[test]
    fn each_target_has_blocks_of_its_own() {
        let prompts = prompts(IDS);
        let of = |target_idx, id| ids(&prompts, &planned(40, &[1, 2], id).for_target(target_idx));
        assert_ne!(of(0, 0)[..16], of(1, 1)[..16]);
        assert_eq!(of(1, 1)[..32], of(1, 3)[..32], "requests to one target share them");
    }

    #[test]
    fn shared_prefix_is_shared() {
        let prompts = Prompts { shared_prefix: 8, ..prompts(IDS) };
        let a = ids(&prompts, &planned(20, &[], 0));
        let b = ids(&prompts, &planned(20, &[], 1));
        assert_eq!(a[..8], b[..8]);
        assert_ne!(a[8..], b[8..]);
    }

    #[test]
    fn prompts_within_the_shared_prefix_are_equal() {
        for material in [IDS, Material::Words { tokens_per_word: 1.5, overhead: 10.0 }] {
            for input_tokens in 1..100 {
                let prompts = Prompts { shared_prefix: 40, ..prompts(material) };
                let [a, b] = [0, 1].map(|id| prompts.make(&planned(input_tokens, &[], id)));
                let exceeds_prefix = prompts.exceeds_prefix(&planned(input_tokens, &[], 0));
                assert!(exceeds_prefix || a == b, "{input_tokens} of {material:?}");
                let longest = if material == IDS { 40 } else { 51 };
                assert_eq!(exceeds_prefix, input_tokens > longest, "{input_tokens} of {material:?}");
            }
        }
    }

    #[test]
    fn words_are_about_as_many_tokens() {
        let prompts = prompts(Material::Words { tokens_per_word: 1.5, overhead: 10.0 });
        let text = |planned: &Planned| match prompts.make(planned) {
            Prompt::Text(text) => text,
            Prompt::Ids(ids) => panic!("{ids:?}"),
        };
        assert_eq!(text(&planned(100, &[], 0)).split(' ').count(), 60);
        assert_eq!(text(&planned(1, &[], 0)).split(' ').count(), 1);
        let (a, b) = (text(&planned(100, &[1, 2], 0)), text(&planned(100, &[1, 3], 1)));
        let common = a.split(' ').zip(b.split(' ')).take_while(|(a, b)| a == b).count();
        assert!((11..15).contains(&common), "one block of 16 tokens is 11 words: {common}");
    }

    #[test]
    fn lengths_are_parsed_and_sampled() {
        let cases = [
            ("128", Lengths::Fixed(128)),
            ("64..256", Lengths::Uniform(64, 256)),
            ("64..=256", Lengths::Uniform(64, 256)),
            ("normal:100,10", Lengths::Normal(100.0, 10.0)),
            ("lognormal:100,0.5", Lengths::LogNormal(100.0, 0.5)),
            ("exponential:100", Lengths::Exponential(100.0)),
        ];
        let mut random = Random::new(3);
        for (text, expected) in cases {
            let lengths: Lengths = text.parse().unwrap();
            assert_eq!(lengths, expected, "{text}");
            let samples: Vec<usize> = (0..2000).map(|_| lengths.sample(&mut random)).collect();
            let mean = samples.iter().sum::<usize>() as f64 / samples.len() as f64;
            assert!((95.0..170.0).contains(&mean), "{text}: {mean}");
            assert!(samples.iter().all(|&n| n >= 1), "{text}");
        }
        for text in ["", "0", "5..3", "-1", "normal:1", "normal:x,1", "zipf:1", "1.5", "normal:nan,1"] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
    }

    #[test]
    fn arrivals_have_the_rate() {
        let synthetic = |rate| Synthetic::new(rate, Lengths::Fixed(1), Lengths::Fixed(1), 1);
        let requests: Vec<Planned> = synthetic(Some(10.0)).take(5000).collect();
        let last = requests.last().unwrap().at.unwrap().as_secs_f64();
        assert!((480.0..520.0).contains(&last), "{last}");
        assert!(requests.is_sorted_by_key(|request| request.at));
        assert_eq!(requests[0].at, Some(Duration::ZERO));
        assert!(synthetic(None).take(2).all(|request| request.at.is_none()));
    }
}
