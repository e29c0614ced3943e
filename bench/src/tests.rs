//! What the arguments of `baton bench` mean, and how it ends.

use std::{future, io::Write, sync::mpsc};

use clap::FromArgMatches;
use serde_json::json;

use super::*;

fn try_parse(args: &[&str]) -> Result<BenchArgs, clap::Error> {
    let command = BenchArgs::augment_args(clap::Command::new("bench"));
    BenchArgs::from_arg_matches(&command.try_get_matches_from(["bench"].iter().chain(args))?)
}

fn parse(args: &[&str]) -> BenchArgs {
    try_parse(args).unwrap()
}

#[test]
fn options_without_an_effect_are_refused() {
    for option in ["--input-tokens", "--output-tokens"] {
        assert!(try_parse(&["--trace", "t.csv", option, "5"]).is_err(), "{option}");
    }
    let (worker, body) = (["--worker", "http://w:1"], ["--extra-body", "{}"]);
    for options in [&["--stop-at-eos"][..], &body, &["--model", "m"]] {
        assert!(parse(&[&worker[..], options].concat()).check_workers().is_err(), "{options:?}");
    }
    let compared = ["--compare", "--url", "http://u:1", "--model", "m"];
    assert!(parse(&[&worker[..], &body, &compared].concat()).check_workers().is_ok());
    assert!(parse(&["--stop-at-eos"]).check_workers().is_ok());
}

#[tokio::test]
async fn ctrl_c_ends_the_program_while_the_report_is_computed() {
    let (end, ended) = mpsc::channel::<()>();
    let compute = move || ended.recv().is_err();
    let error = unless(future::ready(Ok(())), compute).await.unwrap_err();
    assert_eq!(error.to_string(), "interrupted");
    drop(end);
    assert_eq!(unless(future::pending(), || 7).await.unwrap(), 7);
}

#[test]
fn only_time_ends_a_load_with_a_duration_alone() {
    for args in [&["--duration", "5"][..], &["--duration", "5", "--compare"]] {
        let plan = parse(args).plan().unwrap();
        assert_eq!(plan.num_left(), None);
        assert_eq!(plan.take(1000).count(), 1000, "{args:?}");
    }
}

#[test]
fn the_number_of_requests_is_as_given() {
    let cases: [(&[&str], usize); 4] = [
        (&[], 100),
        (&["--compare"], 200),
        (&["--requests", "7", "--duration", "5"], 7),
        (&["--requests", "7", "--rate", "100"], 7),
    ];
    for (args, expected) in cases {
        assert_eq!(parse(args).plan().unwrap().num_left(), Some(expected), "{args:?}");
    }
    let mut plan = parse(&["--rate", "100", "--duration", "5"]).plan().unwrap();
    assert!(plan.is_timed() && plan.num_left().is_some_and(|num| (400..600).contains(&num)));
    assert!(plan.all(|planned| planned.at <= Some(Duration::from_secs(5))));
    assert!(parse(&["--requests", "0", "--duration", "5"]).plan().is_err());
    assert!(parse(&["--duration", "0"]).plan().is_err());
}

#[test]
fn a_shared_prefix_leaves_prompts_a_part_of_their_own() {
    let mut trace = tempfile::NamedTempFile::new().unwrap();
    trace
        .write_all(br#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}"#)
        .unwrap();
    let trace = trace.path().to_str().unwrap();
    let cases: [(&[&str], Option<&str>); 7] = [
        (&["--shared-prefix", "127"], None),
        (&["--shared-prefix", "128"], Some("100 of 100 prompts would be equal")),
        (&["--shared-prefix", "64", "--input-tokens", "64..256", "--duration", "5"], None),
        (
            &["--shared-prefix", "128", "--input-tokens", "64..256", "--duration", "5"],
            Some("of 10000 prompts"),
        ),
        (&["--shared-prefix", "50", "--max-input-tokens", "50"], Some("100 of 100 prompts")),
        (&["--shared-prefix", "5", "--trace", trace], Some("hash ids")),
        (&["--trace", trace], None),
    ];
    for (args, expected) in cases {
        let args = parse(args);
        let material = Material::Ids { low: 0, high: 9 };
        let prompts = Prompts { material, seed: 1, block_tokens: 1, shared_prefix: args.shared_prefix };
        let result = args.check_prefix(&mut args.plan().unwrap(), &prompts);
        let error = result.err().map(|error| error.to_string());
        assert_eq!(error.is_some(), expected.is_some(), "{error:?}");
        assert!(error.unwrap_or_default().contains(expected.unwrap_or_default()), "{expected:?}");
    }
}

#[test]
fn the_report_says_what_the_load_was() {
    let cases: [(&[&str], &str); 4] = [
        (&[], "8 clients, closed loop, 128 tokens in, 64 out"),
        (
            &["--shared-prefix", "32", "--concurrency", "3"],
            "3 clients, closed loop, 128 tokens in, 64 out, the first 32 of every prompt shared",
        ),
        (&["--rate", "5", "--compare"], "5 requests/s to each target, Poisson, 128 tokens in, 64 out"),
        (&["--trace", "t.csv", "--time-scale", "2"], "trace t.csv at speed 2"),
    ];
    for (args, expected) in cases {
        assert_eq!(parse(args).config().to_string(), expected);
    }
    let args = ["--rate", "5", "--seed", "3", "--timeout", "9", "--warmup", "1", "--input-tokens", "1..8"];
    let json = serde_json::to_value(parse(&args).config()).unwrap();
    for (key, expected) in [
        ("rate", json!(5.0)),
        ("seed", json!(3)),
        ("timeout_s", json!(9.0)),
        ("warmup", json!(1)),
        ("requests", json!(100)),
        ("concurrency", Value::Null),
        ("input_tokens", json!("1..8")),
        ("temperature", json!(0.0)),
    ] {
        assert_eq!(json[key], expected, "{key}");
    }
}

#[test]
fn each_target_of_a_comparison_gets_the_rate() {
    let plan = |args: &[&str]| parse(args).plan().unwrap().map(|planned| planned.at).collect::<Vec<_>>();
    let alone = plan(&["--rate", "5", "--requests", "20"]);
    let compared = plan(&["--rate", "5", "--requests", "20", "--compare"]);
    let (a, b): (Vec<_>, Vec<_>) = compared.chunks(2).map(|pair| (pair[0], pair[1])).unzip();
    assert_eq!((&a, &b), (&alone, &alone));
}
