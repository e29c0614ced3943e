//! `baton simulate` as it is called.

use baton_simulator::{
    PlanArgs, SimulateArgs,
    command::{run_plan_to, run_to},
};
use clap::{CommandFactory, Parser};

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    args: SimulateArgs,
}

/// The first hundred seconds of Mooncake's conversation trace (Apache-2.0), as far as their hashes go.
const EXCERPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mooncake_excerpt.jsonl");

fn call(line: &str) -> Result<String, String> {
    let words = std::iter::once("simulate").chain(line.split_whitespace());
    let command = Command::try_parse_from(words).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    run_to(&command.args, &mut out).map_err(|error| format!("{error:#}"))?;
    Ok(String::from_utf8(out).expect("text"))
}

#[test]
fn the_command_line_is_consistent() {
    Command::command().debug_assert();
}

#[test]
fn a_trace_gives_numbers_and_a_picture_and_the_same_ones_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let page = |name: &str| {
        let path = dir.path().join(name);
        let line = format!(
            "--trace {EXCERPT} --prefill 2 --decode 3 --policy baton,least-loaded --sweep 0.5,1 --slow d1=2 --fail d0@20 \
             --join d0@40 --routers 2 --html {}",
            path.display()
        );
        let said = call(&line).expect("it runs");
        for part in ["== baton 2P 3D", "== least-loaded 0P 5D", "goodput", "ttft", "busy", "load x0.5"] {
            assert!(said.contains(part), "{said} does not say {part}");
        }
        std::fs::read_to_string(path).expect("it was written")
    };
    let (first, second) = (page("a.html"), page("b.html"));
    assert_eq!(first, second);
    for part in
        ["Goodput against load", "Time to the first token", "Workers over time", "<polyline", "d00000"]
    {
        assert!(first.contains(part), "the page lacks {part}");
    }
    assert!(!first.contains("<script") && !first.contains("http://") && !first.contains("NaN"));
}

#[test]
fn a_grid_search_prints_every_setting_and_the_best() {
    let said = call("--model llama-8b --tensor-parallel 1 --prefill 1 --decode 1 --rate 4 --requests 60 --policy all --tune")
        .expect("it runs");
    for part in
        ["separated 1P 1D, budget 512", "prefix-only 0P 2D, budget 8192, imbalance 4", "-- the best of each"]
    {
        assert!(said.contains(part), "{said} does not say {part}");
    }
}

#[test]
fn half_names_every_other_worker() {
    let said =
        |slow: &str| call(&format!("--rate 6 --requests 60 --decode 3 --prefill 2 {slow}")).expect("it runs");
    assert_eq!(said("--slow half=2"), said("--slow d1=2,p0=2"));
    assert_ne!(said("--slow half=2"), said(""));
}

#[test]
fn workers_keep_their_names_whatever_a_policy_uses_them_for() {
    let line = "--rate 6 --requests 60";
    let said = |workers: &str| call(&format!("{line} --policy least-loaded {workers}")).expect("it runs");
    assert_eq!(said("--decode 2 --prefill 1 --slow p0=2"), said("--decode 3 --slow d2=2"));
    let mixed = format!("{line} --decode 1 --prefill 1 --fail p0@5");
    call(&format!("{mixed} --policy baton,least-loaded")).expect("both have that worker");
    call(&format!("{mixed} --policy baton --tune")).expect("also where it decodes");
}

#[test]
fn hit_rates_of_the_excerpt_are_those_of_its_blocks() {
    let text = std::fs::read_to_string(EXCERPT).expect("it is in the repository");
    // Counted without a pool: a block hits if an earlier prompt had it. Equal ids are equal prefixes.
    let (mut seen, mut num_all, mut num_hits) = (std::collections::HashSet::new(), 0, 0);
    for line in text.lines() {
        let ids = line.split_once('[').expect("ids").1.trim_end_matches(['}', ']']);
        let ids: Vec<u32> = ids.split(", ").map(|id| id.parse().expect("an id")).collect();
        num_all += ids.len();
        num_hits += ids.iter().filter(|id| seen.contains(*id)).count();
        seen.extend(ids);
    }
    let said = call(&format!("--hit-rate --trace {EXCERPT}")).expect("it runs");
    let expected = format!("{:.2} %", 100.0 * num_hits as f64 / num_all as f64);
    let unlimited = said.lines().find(|line| line.contains("unlimited")).expect("a line");
    assert_eq!(unlimited.matches(&expected).count(), 2, "{said}, expected {expected}");
}

#[test]
fn sixteen_workers_find_most_of_what_one_pool_of_their_size_would() {
    let said =
        call(&format!("--hit-rate --trace {EXCERPT} --decode 16 --kv-tokens 1000000")).expect("it runs");
    println!("wanted: 0.900 of it\n{said}");
    let last = said.lines().last().expect("a line");
    let part = last.strip_suffix(" of it").and_then(|rest| rest.rsplit(' ').next()).expect("a part");
    assert!(part.parse::<f64>().expect("a number") >= 0.9, "{said}");
}

#[test]
fn two_runs_of_a_thousand_gpus_are_equal_to_the_byte() {
    let line = format!("--trace {EXCERPT} --decode 250 --copies 6 --block-size 512 --requests 800");
    assert_eq!(call(&line).expect("it runs"), call(&line).expect("it runs"));
}

#[test]
fn calls_that_make_no_sense_say_why() {
    for (line, expected) in [
        ("", "give --rate or --trace"),
        ("--rate 0", "--rate is 0"),
        ("--rate nan", "--rate is NaN"),
        ("--rate 1 --decode 0", "--decode is 0"),
        ("--rate 1 --model gpt-5", "llama-70b"),
        ("--rate 1 --device TPU", "H200"),
        ("--rate 1 --tensor-parallel 1", "raise the tensor-parallel degree"),
        // As a worker says it.
        (
            "--rate 1 --tensor-parallel 3",
            "3 ranks cannot divide 64 attention heads, expected a tensor parallel degree of",
        ),
        ("--rate 1 --policy best", "least-loaded"),
        ("--rate 1 --slow d9=2", "no worker is called \"d9\""),
        ("--rate 1 --slow d1", "WORKER=NUMBER"),
        ("--rate 1 --slow d1=0", "a step takes some time"),
        ("--rate 1 --slow d1=1e12", "at most 1000 times"),
        ("--rate 1e-6", "raise --rate or --speed"),
        ("--rate 1 --speed 2", "leave out --speed"),
        ("--rate 1 --copies 4", "--copies goes with --trace"),
        ("--rate 1 --bursts 10", "--bursts is 10; 1 to 6"),
        ("--rate 1 --bursts 0.5", "--bursts is 0.5; 1 to 6"),
        ("--rate 1 --bursts=-3", "--bursts is -3; 1 to 6"),
        ("--rate 1 --bursts nan", "--bursts is NaN; 1 to 6"),
        ("--rate 1 --tune --html a.html", "write no --html"),
        ("--rate 1 --itl-target nan", "--itl-target is NaN"),
        ("--rate 1 --fail d0@-1", "-1 is not possible"),
        ("--rate 1 --slo-ttft 0x", "above 0"),
        ("--rate 1 --slo-ttft 500", "write 500ms, or 500s"),
        ("--rate 1 --sweep 1,-1", "loads are above 0"),
        ("--trace /does/not/exist", "cannot read trace"),
        ("--hit-rate", "--hit-rate needs --trace"),
        ("--rate 1 --kv-tokens 3", "not one block"),
    ] {
        let said = call(line).expect_err(line);
        assert!(said.contains(expected), "{line}: {said:?} does not say {expected:?}");
    }
    let said = call(&format!("--trace {EXCERPT} --block-size 100")).expect_err("it does not divide");
    assert!(said.contains("does not divide the 512"), "{said}");
}

#[derive(Debug, Parser)]
struct Plan {
    #[command(flatten)]
    args: PlanArgs,
}

fn plan(line: &str) -> Result<String, String> {
    let words = std::iter::once("plan").chain(line.split_whitespace());
    let command = Plan::try_parse_from(words).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    run_plan_to(&command.args, &mut out).map_err(|error| format!("{error:#}"))?;
    Ok(String::from_utf8(out).expect("text"))
}

#[test]
fn quantised_weights_are_planned_with_and_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("config.json");
    let config = |quantisation: &str| {
        let text = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
                "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256,
                "quantization_config": {quantisation}}}"#
        );
        std::fs::write(&path, text).expect("it can be written");
    };
    let line = format!("--model {} --rate 1 --requests 20", path.display());
    let planned = format!("{line} --gpus 1 --prompt-tokens 200 --seeds 1");
    config("null");
    let refused = plan(&planned).expect_err("70 B weights of 16 bits are more than a GPU has");
    assert!(refused.contains("does not fit on 1 x H100"), "{refused}");
    let said = call(&line).expect("it runs");
    assert!(said.contains("a step reads bf16 weights"), "{said}");
    config(r#"{"quant_method": "awq", "bits": 4, "group_size": 128}"#);
    let said = plan(&planned).expect("it fits");
    assert!(said.contains("with int4 weights on 1 x H100"), "{said}");
    config(r#"{"quant_method": "fp8"}"#);
    let said = call(&line).expect("it runs");
    assert!(said.contains("a step reads fp8 weights"), "{said}");
}

/// What the chart is rendered with by its own check.
const PLANNED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../helm/baton/ci/planned-values.yaml");

#[test]
fn a_plan_has_a_deployment_its_numbers_and_the_values_of_the_chart() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("values.yaml");
    let line =
        "--model llama-8b --device H200 --gpus 5 --rate 8 --requests 150 --prompt-tokens 3000 --seeds 1,2";
    let said = plan(line).expect("it runs");
    assert_eq!(said, plan(line).expect("it runs"), "two runs are equal");
    for part in
        ["the best of", "decode workers of", "2 seeds", " ± ", "within both SLOs", "next best:", "replicas:"]
    {
        assert!(said.contains(part), "{said} does not say {part}");
    }
    let written = plan(&format!("{line} --values {}", file.display())).expect("it runs");
    assert!(!written.contains("replicas:"), "{written}");
    let values = std::fs::read_to_string(&file).expect("it was written");
    assert!(said.ends_with(&values));
    assert_eq!(
        values,
        std::fs::read_to_string(PLANNED).expect("the chart's example"),
        "copy it: the chart is checked with it"
    );
}

#[test]
fn a_plan_and_a_simulation_take_measured_steps() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("steps.json");
    let profile = |rows: &str| {
        let step = r#"{"fixed": 0.04, "per_token": 1e-4, "per_context_token": 1e-8, "per_pair": 1e-10}"#;
        let text = format!(
            r#"{{"model": "mine", "device": "cuda:0", "tensor_parallel": 2, "num_steps": 9, "step": {step}, "rows": [{rows}]}}"#
        );
        std::fs::write(&file, text).expect("it can be written");
    };
    profile(r#"{"work": "a step", "predicted_ms": 44, "measured_ms": 40, "ratio": 0.909}"#);
    let measured = format!("--model llama-8b --rate 2 --requests 60 --step-profile {}", file.display());
    let line = format!("{measured} --gpus 2 --prompt-tokens 500 --seeds 1");
    let said = plan(&line).expect("it runs");
    assert!(
        said.contains("steps: measured of mine on 2 x cuda:0, 10 % wrong on average and 10 % at most"),
        "{said}"
    );
    // A step of two devices takes 40 ms, as measured, and the roofline of one is corrected by as much.
    let tpot = |said: &str| {
        let text = said
            .split("tpot  p50 ")
            .nth(1)
            .expect("times between tokens")
            .split(' ')
            .next()
            .map(str::to_owned);
        text.and_then(|text| text.parse::<f64>().ok()).expect("a number")
    };
    assert!(tpot(&said) > 39.0, "{said}");
    let of_roofline =
        plan(&line.replace(&format!("--step-profile {}", file.display()), "")).expect("it runs");
    assert!(of_roofline.contains("steps: of a roofline") && tpot(&of_roofline) < 20.0, "{of_roofline}");
    let simulated = call(&format!("{measured} --tensor-parallel 2")).expect("it runs");
    assert!(simulated.contains("in 40.0 ms, 10000 prompt tokens take a second"), "{simulated}");
    std::fs::write(&file, "{}").expect("it can be written");
    for refused in [plan(&line), call(&measured)] {
        let error = refused.expect_err("no steps");
        assert!(error.contains("steps.json") && error.contains("baton bench steps"), "{error}");
    }
}

#[test]
fn a_plan_takes_what_meets_the_slos() {
    // A step of one GPU reads 8 B parameters in 6 ms and more: only several GPUs together are faster.
    let line = "--model llama-8b --device A100 --gpus 8 --rate 2 --requests 80 --prompt-tokens 500";
    let fast = plan(&format!("{line} --slo-tpot 8ms --seeds 1")).expect("it runs");
    assert!(fast.contains("of 4 GPUs each") || fast.contains("of 8 GPUs each"), "{fast}");
    assert!(fast.contains("one seed"), "{fast}");
    let hopeless = plan(&format!("{line} --slo-ttft 0.001 --seeds 1")).expect("it runs");
    assert!(hopeless.contains("too much for these GPUs"), "{hopeless}");
    // None meets that target, and the faster ones are still better.
    let best = hopeless.lines().skip_while(|line| !line.starts_with("the best of")).nth(1).expect("the best");
    assert!(!best.contains("of one GPU each"), "{hopeless}");
}

#[test]
fn a_load_that_only_a_short_run_survives_is_not_served() {
    // The GPU computes 16 such prompts a second. Of 24 a second the last of 400 waits for 8 s, within the SLO.
    let line =
        "--model llama-8b --gpus 1 --requests 400 --output-tokens 2 --slo-ttft 20s --slo-tpot 1s --seeds 1";
    let said = plan(&format!("{line} --rate 24")).expect("it runs");
    assert!(said.contains("too much for these GPUs: the queue grows"), "{said}");
    let said = plan(&format!("{line} --rate 4")).expect("it runs");
    assert!(said.contains("of this is served"), "{said}");
}

#[test]
fn a_plan_says_what_host_memory_is_worth() {
    // An A100 holds 400,000 tokens beside the weights, and the trace has two million.
    let line = format!(
        "--model llama-8b --device A100 --gpus 2 --trace {EXCERPT} --rate 0.5 --host-kv 256 --seeds 1"
    );
    let said = plan(&line).expect("it runs");
    assert!(said.contains("host:\n    size: 256G\n"), "{said}");
    let (with, without) = said.split_once("Without them:").expect("both");
    let cached = |text: &str| -> f64 {
        let (before, _) = text.split_once(" % of prompt tokens cached").expect("the part of tokens");
        before.rsplit(' ').next().expect("a number").parse().expect("a number")
    };
    assert!(cached(with) > cached(without), "{said}");
    assert!(!plan(&line.replace("--host-kv 256", "")).expect("it runs").contains("host:"));
}

#[test]
fn plans_that_make_no_sense_say_why() {
    for (line, expected) in [
        ("", "give --rate or --trace"),
        ("--rate 1 --speed 2", "leave out --speed"),
        ("--rate 1 --gpus 0", "--gpus is 0"),
        ("--rate 1 --host-kv 0", "--host-kv is 0 GiB"),
        ("--rate 1 --gpus 1", "does not fit on 1 x H100"),
        ("--rate 1 --device TPU", "H200"),
        ("--rate 1 --slo-ttft 0", "it must be above 0"),
        ("--rate 1 --slo-tpot 100", "write 100ms, or 100s"),
        ("--rate 1 --model gpt-5", "llama-70b"),
        ("--trace /does/not/exist", "cannot read trace"),
    ] {
        let said = plan(line).expect_err(line);
        assert!(said.contains(expected), "{line}: {said:?} does not say {expected:?}");
    }
}
