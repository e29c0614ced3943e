//! Whether prompts are blended, by what was measured. Pure: what is measured, and when, others decide.

use std::collections::VecDeque;

use baton_request::BlendPoint;

/// Ratios that are tried, the smallest first.
pub(crate) const RATIOS: [f32; 6] = [0.05, 0.1, 0.15, 0.2, 0.3, 0.5];

/// Layers whose keys may decide, in the order in which they are tried: keys of layer 1 do not always show what is missing
/// (docs/benchmarks/2026-11-23-blending.md). The layers before them, at most a quarter of the model's, are computed for all tokens.
const LAYERS: [u32; 3] = [1, 2, 4];

/// Prompts of a calibration.
const NUM_SAMPLES: usize = 8;
/// Calibrations that yield nothing, one after the other, before there are no more.
const MAX_FAILURES: usize = 3;
/// Audits that count: the newest.
const NUM_AUDITS: usize = 32;
/// Audits without which nothing is closed: one prompt may be an exception. The first prompts that are blended are audited, all
/// of them, as a calibration has few and short prompts. Fewer of the following ones are then.
const MIN_AUDITS: usize = 4;

/// Why it is closed if audits have closed it.
const TOO_FAR: &str = "audits found a divergence above --blend-max-kl";

/// What becomes of a prompt with passages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decision {
    /// Why it is computed in full; `None`: it is blended.
    pub(crate) refused: Option<&'static str>,
    /// What is measured by it, beside serving it.
    pub(crate) measure: Option<Measure>,
}

/// What is measured by a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Measure {
    /// What each ratio costs where the keys of this layer decide.
    Calibrate(u32),
    /// What the layer and the ratio that it is blended with cost.
    Audit(AuditedPoint),
}

/// The layer and the ratio of a prompt that is audited, beside the worker's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuditedPoint {
    /// The calibrated ones, or a higher layer or a larger ratio: the gate counts what is found.
    Calibrated,
    /// One of them is smaller, as a client may choose. A client that asks for less recomputation does not close the gate for others.
    Smaller,
}

impl AuditedPoint {
    /// As metrics name it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            AuditedPoint::Calibrated => "calibrated",
            AuditedPoint::Smaller => "smaller",
        }
    }
}

/// Decides for one model on one worker.
#[derive(Debug)]
pub(crate) struct Gate {
    max_kl: f64,
    num_layers: usize,
    /// The part of blended prompts that is audited, and what of the next one is due, by [`AuditedPoint`].
    audit: f64,
    due: [f64; 2],
    /// Whether a calibration or an audit runs.
    is_measuring: bool,
    state: State,
}

/// Uncalibrated, it has what each ratio has cost so far where the keys of `layer` decide.
#[derive(Debug)]
enum State {
    Uncalibrated { layer: u32, sums: [f64; RATIOS.len()], num: usize, num_failures: usize },
    Open { point: BlendPoint, num_begun: usize, audits: VecDeque<f64> },
    Closed(&'static str),
}

impl State {
    /// Before any sample of this layer.
    fn before(layer: u32) -> State {
        State::Uncalibrated { layer, sums: Default::default(), num: 0, num_failures: 0 }
    }
}

impl Gate {
    /// For a model of so many layers.
    pub(crate) fn new(max_kl: f64, audit: f64, num_layers: usize) -> Gate {
        let state = State::before(LAYERS[0]);
        Gate { max_kl, num_layers, audit, due: [1.0; 2], is_measuring: false, state }
    }

    /// The calibrated layer and ratio, while prompts are blended with them.
    pub(crate) fn point(&self) -> Option<BlendPoint> {
        match self.state {
            State::Open { point, .. } => Some(point),
            State::Uncalibrated { .. } | State::Closed(_) => None,
        }
    }

    /// Why nothing is blended any more.
    pub(crate) fn closed(&self) -> Option<&'static str> {
        match self.state {
            State::Closed(reason) => Some(reason),
            State::Uncalibrated { .. } | State::Open { .. } => None,
        }
    }

    /// Whether audits have closed it. What they found is a property of the model and its traffic, so it holds for other workers,
    /// too. A calibration that has failed says less: it had few prompts, or no time.
    pub(crate) fn is_closed_by_audits(&self) -> bool {
        self.closed() == Some(TOO_FAR)
    }

    /// What becomes of a prompt that comes with this point. One with a point is blended also before the calibration: its client,
    /// or another worker's calibration, has chosen it. But not by a layer with which no ratio was near. `fits` says whether the
    /// passages end where the device blends and memory has room for them; a calibration takes short parts of them.
    pub(crate) fn decide(&mut self, point: Option<BlendPoint>, fits: bool) -> Decision {
        let lowest = match self.state {
            State::Uncalibrated { layer, .. } | State::Open { point: BlendPoint { layer, .. }, .. } => layer,
            State::Closed(_) => return Decision { refused: Some("closed"), measure: None },
        };
        let refused = match point {
            // A router that sends none does not know of any yet, or of another worker whose audits have closed its gate.
            None => Some("uncalibrated"),
            Some(point) if point.layer < lowest => Some("uncalibrated"),
            Some(_) if !fits => Some("too_long"),
            Some(_) => None,
        };
        let measure = match &mut self.state {
            _ if self.is_measuring => None,
            State::Closed(_) => None,
            State::Uncalibrated { layer, .. } => Some(Measure::Calibrate(*layer)),
            State::Open { point: own, num_begun, .. } => {
                point.filter(|_| refused.is_none()).and_then(|point| {
                    let is_counted = point.is_at_least(*own);
                    let audited = if is_counted { AuditedPoint::Calibrated } else { AuditedPoint::Smaller };
                    let due = &mut self.due[audited as usize];
                    *due = (*due + self.audit).min(1.0 + self.audit);
                    let is_due = self.audit > 0.0 && ((is_counted && *num_begun < MIN_AUDITS) || *due >= 1.0);
                    is_due.then(|| {
                        *num_begun += usize::from(is_counted);
                        *due -= 1.0;
                        Measure::Audit(audited)
                    })
                })
            }
        };
        self.is_measuring |= measure.is_some();
        Decision { refused, measure }
    }

    /// A calibration has ended with these divergences, by ratio. Without any it has failed.
    pub(crate) fn calibrated(&mut self, samples: Vec<[f64; RATIOS.len()]>) {
        self.is_measuring = false;
        let State::Uncalibrated { layer, sums, num, num_failures } = &mut self.state else { return };
        if samples.is_empty() {
            *num_failures += 1;
            if *num_failures == MAX_FAILURES {
                self.state = State::Closed("the engine has had no time or no room to calibrate");
            }
            return;
        }
        *num_failures = 0;
        *num += samples.len();
        for sample in samples {
            sums.iter_mut().zip(sample).for_each(|(sum, kl)| *sum += kl);
        }
        if *num < NUM_SAMPLES {
            return;
        }
        let is_near = |sum: &f64| *sum / *num as f64 <= self.max_kl;
        // All larger ratios must be near, too: one that is so by chance says nothing.
        let num_near = sums.iter().rev().take_while(|sum| is_near(sum)).count();
        let layer = *layer;
        let is_next = |next: &u32| *next > layer && *next as usize <= self.num_layers / 4;
        self.state = match (RATIOS.get(RATIOS.len() - num_near), LAYERS.into_iter().find(is_next)) {
            (Some(&ratio), _) => {
                let point = BlendPoint { layer, ratio };
                State::Open { point, num_begun: 0, audits: VecDeque::new() }
            }
            (None, Some(next)) => State::before(next),
            (None, None) => State::Closed("no ratio keeps the divergence under --blend-max-kl"),
        };
    }

    /// An audit of such a point has found this divergence, or was not possible.
    pub(crate) fn audited(&mut self, point: AuditedPoint, kl: Option<f64>) {
        self.is_measuring = false;
        let (State::Open { audits, .. }, AuditedPoint::Calibrated, Some(kl)) = (&mut self.state, point, kl)
        else {
            return;
        };
        audits.push_back(kl);
        if audits.len() > NUM_AUDITS {
            audits.pop_front();
        }
        let mean = audits.iter().sum::<f64>() / audits.len() as f64;
        if audits.len() >= MIN_AUDITS && mean > self.max_kl {
            self.state = State::Closed(TOO_FAR);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        AuditedPoint::{Calibrated, Smaller},
        *,
    };

    /// Divergences by ratio.
    const FALLING: [f64; 6] = [0.5, 0.3, 0.1, 0.04, 0.01, 0.001];

    const BLEND: Decision = Decision { refused: None, measure: None };
    const UNCALIBRATED: Decision = Decision { refused: Some("uncalibrated"), measure: None };
    const CLOSED: Decision = Decision { refused: Some("closed"), measure: None };
    const CALIBRATE: Option<Measure> = Some(Measure::Calibrate(1));
    const AUDIT: Option<Measure> = Some(Measure::Audit(Calibrated));

    /// So many layers that layer 1 alone is tried.
    const ONE: usize = 2;

    fn at(ratio: f32) -> Option<BlendPoint> {
        Some(BlendPoint { layer: 1, ratio })
    }

    fn calibrated(max_kl: f64, audit: f64) -> Gate {
        let mut gate = Gate::new(max_kl, audit, ONE);
        for _ in 0..2 {
            assert_eq!(gate.decide(None, true), Decision { measure: CALIBRATE, ..UNCALIBRATED });
            assert_eq!(gate.decide(None, true), UNCALIBRATED, "one at a time");
            assert_eq!(gate.decide(at(0.3), true), BLEND, "the client has decided");
            assert_eq!(gate.point(), None);
            gate.calibrated(vec![FALLING; 4]);
        }
        gate
    }

    #[test]
    fn a_prompt_that_is_too_long_measures_nothing_and_keeps_no_other_from_it() {
        let mut gate = Gate::new(0.1, 1.0, ONE);
        gate.decide(None, true);
        gate.calibrated(vec![[0.0; RATIOS.len()]; NUM_SAMPLES]);
        let too_long = Decision { refused: Some("too_long"), measure: None };
        assert_eq!([(); 3].map(|()| gate.decide(at(0.2), false)), [too_long; 3]);
        assert_eq!(gate.decide(at(0.2), true), Decision { refused: None, measure: AUDIT });
    }

    #[test]
    fn the_smallest_ratio_that_is_near_enough_opens_it() {
        for (max_kl, point) in [(0.05, at(0.2)), (0.04, at(0.2)), (0.6, at(0.05)), (0.0005, None)] {
            let gate = calibrated(max_kl, 0.0);
            assert_eq!((gate.point(), gate.closed().is_some()), (point, point.is_none()), "{max_kl}");
            assert!(!gate.is_closed_by_audits());
        }
        let mut lucky = Gate::new(0.05, 0.0, ONE);
        lucky.calibrated(vec![[0.01, 0.3, 0.1, 0.04, 0.01, 0.0]; 8]);
        assert_eq!(lucky.point(), at(0.2), "a smaller one is near by chance");
        lucky.calibrated(vec![[1.0; 6]; 8]);
        assert_eq!(lucky.point(), at(0.2), "it calibrates once");
        let mut unknown = Gate::new(0.05, 0.0, ONE);
        unknown.calibrated(vec![[f64::NAN; 6]; 8]);
        assert!(unknown.closed().is_some());
    }

    #[test]
    fn where_no_ratio_of_a_layer_is_near_the_next_layer_is_tried_with_samples_of_its_own() {
        for (num_layers, num_tried) in [(2, 1), (4, 1), (7, 1), (8, 2), (15, 2), (16, 3), (80, 3)] {
            let mut gate = Gate::new(0.05, 0.0, num_layers);
            for layer in LAYERS.into_iter().take(num_tried) {
                for _ in 0..2 {
                    assert_eq!((gate.point(), gate.closed()), (None, None));
                    assert_eq!(gate.decide(None, true).measure, Some(Measure::Calibrate(layer)));
                    gate.calibrated(vec![[1.0; 6]; 4]);
                }
            }
            assert!(gate.closed().is_some(), "{num_layers}");
        }
        let mut gate = Gate::new(0.05, 0.0, 8);
        gate.calibrated(vec![[1.0; 6]; NUM_SAMPLES]);
        gate.calibrated(vec![FALLING; NUM_SAMPLES]);
        assert_eq!(gate.point(), Some(BlendPoint { layer: 2, ratio: 0.2 }));
    }

    #[test]
    fn an_audit_counts_if_neither_the_layer_nor_the_ratio_is_smaller() {
        let mut gate = Gate::new(0.05, 1.0, 8);
        gate.calibrated(vec![[1.0; 6]; NUM_SAMPLES]);
        gate.calibrated(vec![FALLING; NUM_SAMPLES]);
        for (layer, ratio, audited) in
            [(2, 0.2, Calibrated), (4, 0.3, Calibrated), (2, 0.1, Smaller), (4, 0.1, Smaller)]
        {
            let decision = gate.decide(Some(BlendPoint { layer, ratio }), true);
            assert_eq!(decision, Decision { measure: Some(Measure::Audit(audited)), ..BLEND });
            gate.audited(audited, None);
        }
        let by_layer_1 = Some(BlendPoint { layer: 1, ratio: 0.5 });
        assert_eq!(gate.decide(by_layer_1, true), UNCALIBRATED, "no ratio was near");
    }

    #[test]
    fn calibrations_that_fail_end() {
        let mut gate = Gate::new(0.05, 0.0, ONE);
        for _ in 0..3 {
            assert_eq!(gate.decide(at(0.1), true), Decision { measure: CALIBRATE, ..BLEND });
            gate.calibrated(Vec::new());
        }
        assert_eq!((gate.decide(None, true), gate.decide(at(0.1), true)), (CLOSED, CLOSED));
    }

    #[test]
    fn a_smaller_ratio_is_audited_as_often_and_closes_it_for_no_other() {
        let mut gate = calibrated(0.05, 0.25);
        let mut num_audited = 0;
        for _ in 0..100 {
            let Decision { refused, measure } = gate.decide(at(0.1), true);
            assert_eq!(refused, None);
            if let Some(measure) = measure {
                assert_eq!(measure, Measure::Audit(Smaller));
                assert_eq!(gate.decide(at(0.2), true), BLEND, "one at a time");
                num_audited += 1;
                gate.audited(Smaller, Some(9.0));
            }
        }
        assert!((25..=26).contains(&num_audited), "{num_audited}");
        assert_eq!(gate.point(), at(0.2));
        for _ in 0..MIN_AUDITS {
            assert_eq!(gate.decide(at(0.2), true).measure, AUDIT, "its own first audits are left");
            gate.audited(Calibrated, Some(0.3));
        }
        assert!(gate.closed().is_some());
    }

    #[test]
    fn a_part_of_the_prompts_is_audited_and_a_mean_above_the_limit_closes_it() {
        let mut gate = calibrated(0.05, 0.25);
        let mut num_audited = 0;
        for _ in 0..100 {
            let decision = gate.decide(at(0.2), true);
            assert_eq!(decision.refused, None);
            if decision.measure == AUDIT {
                assert_eq!(gate.decide(at(0.1), true), BLEND, "less than calibrated");
                num_audited += 1;
                gate.audited(Calibrated, Some(0.04));
            }
        }
        assert!((25..=26).contains(&num_audited), "{num_audited}");
        gate.audited(Calibrated, Some(0.3));
        assert_eq!(gate.point(), at(0.2), "one exception");
        gate.audited(Calibrated, None);
        gate.audited(Calibrated, Some(0.3));
        assert_eq!((gate.closed(), gate.is_closed_by_audits()), (Some(TOO_FAR), true));
        assert_eq!(gate.decide(at(0.2), true), CLOSED);
        gate.audited(Calibrated, Some(0.0));
        assert!(gate.closed().is_some(), "it stays closed");

        let mut wrong = calibrated(0.05, 0.01);
        for _ in 0..4 {
            assert_eq!(wrong.decide(at(0.2), true).measure, AUDIT);
            wrong.audited(Calibrated, Some(0.3));
        }
        assert!(wrong.closed().is_some(), "a calibration that says too little is found out at once");
        let mut busy = calibrated(0.05, 0.01);
        let is_audited = |gate: &mut Gate| gate.decide(at(0.2), true).measure.is_some();
        let mut num_tried = 0;
        for _ in 0..1001 {
            if is_audited(&mut busy) {
                num_tried += 1;
                busy.audited(Calibrated, None);
            }
        }
        assert!((10..=11).contains(&num_tried), "{num_tried}");

        let mut never = calibrated(0.05, 0.0);
        assert!((0..1000).all(|_| never.decide(at(0.2), true) == BLEND));
    }
}
