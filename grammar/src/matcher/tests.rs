//! What drafts may take of a sequence's time. Nothing watches the meters here: the tests charge them.

use std::iter;

use baton_request::{Grammar, GrammarKind};

use super::*;
use crate::{GrammarCompiler, GrammarLimits, Vocabulary, VocabularyToken, watch::TICK};

const A: u32 = 0;
const END: u32 = 1;

/// Ticks of the meter that a sequence has at the start.
const AHEAD: u32 = 100;

/// A matcher of `regex` over the letter `a`. Each token gives it one tick.
fn matcher(regex: &str) -> TokenMatcher {
    let load = || {
        let token = |text: &str, is_special| VocabularyToken { bytes: text.into(), is_special };
        let encode = |text: &str| vec![A; text.len()];
        Vocabulary::new([token("a", false), token("<end>", true)], &[END], Box::new(encode))
    };
    let compiler = GrammarCompiler::new(load, GrammarLimits::default());
    let mut matcher = compiler.matcher(&Grammar::new(GrammarKind::Regex, regex), &[]).expect("it compiles");
    let time = GrammarTime { ahead: TICK * AHEAD, per_token: TICK };
    let handle = matcher.matcher.cancellation_handle().expect("it can be cancelled");
    matcher.meter = Arc::new(Meter::new(time, handle));
    matcher
}

/// As if an operation had taken so many ticks.
fn take(matcher: &TokenMatcher, num_ticks: usize) {
    let _running = matcher.meter.begin();
    iter::repeat_with(|| matcher.meter.charge()).take(num_ticks).for_each(drop);
}

#[test]
fn refused_drafts_do_not_use_up_what_a_sequence_needs() {
    for drafts in [&[][..], &[A; 4][..]] {
        let mut matcher = matcher("a*");
        for step in 0..400 {
            let num_masks =
                matcher.masks(drafts).unwrap_or_else(|error| panic!("step {step}: {error}")).len();
            assert_eq!(num_masks, drafts.len() + 1);
            // A mask takes what a token gives. One token of the step is kept.
            take(&matcher, num_masks);
            matcher.accept(A).expect("it is allowed");
        }
    }
}

#[test]
fn nothing_is_drafted_while_little_time_is_left() {
    let mut matcher = matcher("a{1000}");
    assert_eq!((matcher.num_allowed(&[A; 3]), matcher.forced(5).len()), (3, 5));
    take(&matcher, AHEAD as usize / 2 + 1);
    assert!(!matcher.may_draft());
    assert_eq!((matcher.num_allowed(&[A; 3]), matcher.forced(5).len()), (0, 0));
    assert_eq!(matcher.masks(&[A; 3]).expect("there is time for the token that comes").len(), 1);
    matcher.accept(A).expect("it goes on");
    assert_eq!(matcher.num_allowed(&[A; 3]), 3, "the token gave what was missing");
}

#[test]
fn a_sequence_that_ran_out_of_time_in_a_draft_is_cancelled_where_it_was() {
    let mut matcher = matcher("a*");
    matcher.accept(A).expect("it is allowed");
    matcher.forget_drafts().expect("there is time");
    take(&matcher, 2 * AHEAD as usize);
    assert!(matcher.matcher.is_error(), "the new matcher is cancelled, too");
    assert!(matches!(matcher.mask(), Err(GrammarError::OutOfTime { .. })));
    assert!(matches!(matcher.forget_drafts(), Err(GrammarError::OutOfTime { .. })));
}
