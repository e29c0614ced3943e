//! How many tokens a request is expected to generate: the mean of those that have finished.

/// Weight of the newest request.
const NEWEST: f64 = 0.05;

/// The mean after a request has finished with `newest` tokens. 0 is the mean of none.
pub fn expected_output(mean: f64, newest: f64) -> f64 {
    if mean == 0.0 { newest } else { mean + NEWEST * (newest - mean) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_starts_with_the_first_and_follows_the_others() {
        let first = expected_output(0.0, 300.0);
        assert_eq!(first, 300.0);
        let later = (0..200).fold(first, |mean, _| expected_output(mean, 100.0));
        assert!((later - 100.0).abs() < 0.1, "{later}");
    }
}
