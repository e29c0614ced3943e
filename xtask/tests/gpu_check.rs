//! `gpu-check --packed` with small programs in place of the real ones: budgets, programs that hang or crash, skipped tests, the
//! report that grows with each stage, and the comparison with an earlier report.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use serde_json::Value;

/// One GPU, of 80 GB unless told otherwise, two figures, and one that does not fit.
const GPU_CHECK: &str = r#"
[ -z "$NO_GPU" ] || { echo "no GPU: no driver"; exit 2; }
echo "{\"card\": \"a card of scripts\", \"capability\": \"9.0\", \"memory_bytes\": ${MEMORY_BYTES:-80000000000}}"
[ "$1" = card ] && exit 0
[ -z "$NO_LT" ] || { echo "no cuBLASLt: libcublasLt.so.12 is not there"; exit 1; }
echo '{"figure": "copy", "ms": 2.5, "rate": 3000, "unit": "GB/s", "share": null, "target": null, "is_missed": false}'
echo "{\"figure\": \"product\", \"ms\": ${PRODUCT_MS:-1.5}, \"rate\": 700, \"unit\": \"TFLOP/s\", \"share\": null, \"target\": null, \"is_missed\": false}"
echo '{"left_out": "128 x 4096", "why": "needs 69.2 GB, 60.0 GB are free"}'
"#;

/// Modules that pass, skip, hang with a child process, crash, and fail on demand.
const KERNEL_TESTS: &str = r#"
if [ "$1" = --list ]; then
    for test in crash::a hang::a norm::a norm::b rope::a fake_libraries::a nccl::real nccl::sums_are_in_a_graph; do echo "$test: test"; done
    exit 0
fi
ok() { for test; do echo "test $test ... ok"; done; }
case "$1" in
crash::) kill -SEGV $$ ;;
hang::) ok hang::before; sleep 300 & echo $! > hanging; wait ;;
norm::) ok norm::a norm::b; printf -- '---- norm::b stdout ----\nSKIPPED: no fp8 here\n' ;;
rope::) [ -z "$BROKEN" ] || { echo "test rope::a ... FAILED"; exit 101; }; ok rope::a ;;
nccl::sums_are_in_a_graph) ok nccl::sums_are_in_a_graph ;;
*) echo "no such test: $1"; exit 1 ;;
esac
"#;

/// Every kernel after an illegal access fails. The other modules, and the attention of the sanitizer, pass.
const ILLEGAL_ACCESS: &str = r#"
if [ "$1" = --list ]; then
    for test in illegal::a illegal::b norm::a nccl::sums_are_in_a_graph; do echo "$test: test"; done
    exit 0
fi
case "$1" in
illegal::)
    echo "test illegal::a ... FAILED"; echo "test illegal::b ... FAILED"
    echo "CUDA_ERROR_ILLEGAL_ADDRESS"; exit 101 ;;
attention::* | expert_products::* | fp8_trial:: | norm:: | nccl::*) echo "test ${1}a ... ok" ;;
*) echo "no such test: $1"; exit 1 ;;
esac
"#;

/// Runs the program that it is to check, and finds a race in it.
const SANITIZER: &str = r#"
[ "$1 $2 $3 $4" = "--tool racecheck --error-exitcode 9" ] || exit 1
shift 4
"$@"
echo "========= Error: Race reported between Write access at decode_attention+0x10 and Read access [2 hazards]"
exit 9
"#;

/// Workers that are never ready over shm and end at once over tcp, and a handoff that exposes too much over tcp.
const BATON: &str = r#"
[ "$1" != up ] || { [ "$BATON_TRANSPORTS" = tcp ] || sleep 300; echo "no pool on this device"; exit 1; }
[ "$1 $2" = "bench overlap" ] || exit 1
exposed=0.5
while [ $# -gt 1 ]; do
    [ "$1 $2" != "--transports tcp" ] || exposed=2.5
    [ "$1" != --json ] || report=$2
    shift
done
echo "{\"rows\": [{\"prompt_tokens\": 256, \"exposed_ms\": $exposed, \"allowed_ms\": 1.5}]}" > "$report"
"#;

/// Keeps the report that is there when the second stage runs.
const MODEL_TESTS: &str = r#"
if [ "$1" = --list ]; then echo "whole::a: test"; exit 0; fi
cp report.json seen.json
echo "test whole::a ... ok"
"#;

struct Pack(PathBuf);

impl Pack {
    fn new(name: &str) -> Pack {
        let dir = std::env::temp_dir().join(format!("baton-gpu-check-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let one_test = "echo 'test a ... ok'";
        for (name, script) in [
            ("gpu_check", GPU_CHECK),
            ("kernel_tests", KERNEL_TESTS),
            ("model_tests", MODEL_TESTS),
            ("engine_tests", one_test),
            ("shm_tests", one_test),
            ("rdma_tests", one_test),
            ("nccl_tests", one_test),
            ("baton", "echo no model here; exit 1"),
        ] {
            write_script(&dir.join(name), script);
        }
        copy_program(env!("CARGO_BIN_EXE_xtask").as_ref(), &dir.join("xtask"));
        fs::write(dir.join("commit"), "abc1234\n").unwrap();
        Pack(dir)
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(self.0.join("xtask"));
        command.args(["gpu-check", "--packed"]).args(arguments.split_whitespace());
        command
    }

    fn results(&self, name: &str) -> PathBuf {
        self.0.join("results").join(name)
    }

    fn report(&self, name: &str) -> Value {
        serde_json::from_str(&fs::read_to_string(self.results(name)).unwrap()).unwrap()
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write_script(path: &Path, script: &str) {
    let source = path.with_extension("sh");
    fs::write(&source, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o755)).unwrap();
    copy_program(&source, path);
}

/// Copies by a process of its own: a program that this process has open for writing is inherited by the children that
/// other tests fork meanwhile, and does not run ("text file busy") until they have called exec.
fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").args([from, to]).status().unwrap().success());
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The check of this name: its outcome, counts of passed, failed and skipped tests, and what is said of it.
fn check<'a>(report: &'a Value, name: &str) -> (&'a str, [u64; 3], &'a str) {
    let stages = report["stages"].as_array().unwrap();
    let mut checks = stages.iter().flat_map(|stage| stage["checks"].as_array().unwrap());
    let check =
        checks.find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name}: {report:#}"));
    let counts = ["passed", "failed", "skipped"].map(|count| check[count].as_u64().unwrap());
    (check["outcome"].as_str().unwrap(), counts, check["what"].as_str().unwrap())
}

fn is_alive(pid: &str) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A process without a parent stays a zombie where no init waits for it.
    !state.is_empty() && !state.contains(") Z ")
}

#[test]
fn what_hangs_is_killed_and_the_rest_is_counted() {
    let pack = Pack::new("hang");
    let start = Instant::now();
    // A tenth of the budgets: 11 s for the kernels, of which the program that hangs takes a half.
    let output = pack.command("--seconds 54 --only card --only kernels --only nccl").output().unwrap();
    let took = start.elapsed();
    let (report, said) = (pack.report("report.json"), said(&output));
    assert_eq!(output.status.code(), Some(1), "a failed check fails the run: {said}");
    assert_eq!(report["is_complete"], true);
    assert_eq!(check(&report, "crash"), ("failed", [0, 1, 0], "it said nothing, signal: 11 (SIGSEGV)"));
    let (outcome, counts, what) = check(&report, "hang");
    assert_eq!((outcome, counts), ("failed", [1, 1, 0]), "{what}");
    assert!(what.starts_with("not done in "), "{what}");
    assert_eq!(check(&report, "norm"), ("passed", [1, 0, 1], "1 tests, 1 SKIPPED: norm::b: no fp8 here"));
    assert_eq!(check(&report, "rope").0, "passed", "modules after those that crash and hang are tested");
    assert_eq!(check(&report, "nccl in a graph"), ("passed", [1, 0, 0], "1 tests"));
    assert_eq!(check(&report, "ceilings").1, [2, 0, 1], "what was left out is skipped");

    let hanging = fs::read_to_string(pack.results("hanging")).unwrap();
    assert!(!is_alive(hanging.trim()), "a child process outlives the program that was killed");
    for stage in report["stages"].as_array().unwrap() {
        let [budget, took] = ["budget_s", "took_s"].map(|name| stage[name].as_f64().unwrap());
        assert!(took <= budget + 1.0, "{} took {took} of {budget} s", stage["stage"]);
    }
    assert!(took < Duration::from_secs(54), "{took:?}");
    let page = fs::read_to_string(pack.results("report.md")).unwrap();
    for part in
        ["a card of scripts", "commit abc1234", "| kernels | hang | FAILED |", "| copy | 2.500 | 3000 GB/s |"]
    {
        assert!(page.contains(part), "no {part} in\n{page}");
    }
    assert!(pack.results("logs.tar.gz").is_file());
    assert!(said.contains("passed, 2 failed, "), "{said}");
}

#[test]
fn the_report_grows_with_each_stage() {
    let pack = Pack::new("grows");
    // The order of the stages does not depend on that of the arguments.
    let output = pack.command("--seconds 100 --only models --only card").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let names = |report: &Value| -> Vec<String> {
        let stages = report["stages"].as_array().unwrap().iter();
        stages.map(|stage| stage["stage"].as_str().unwrap().to_owned()).collect()
    };
    let (seen, report) = (pack.report("seen.json"), pack.report("report.json"));
    assert_eq!((names(&seen), &seen["is_complete"]), (vec!["card".to_owned()], &Value::Bool(false)));
    assert_eq!(
        (names(&report), &report["is_complete"]),
        (vec!["card".into(), "models".into()], &Value::Bool(true))
    );
}

#[test]
fn changes_since_an_earlier_report_are_printed() {
    let pack = Pack::new("compare");
    let stages = "--seconds 54 --only card --only kernels";
    pack.command(stages).output().unwrap();
    let earlier = pack.0.join("earlier.json");
    fs::copy(pack.results("report.json"), &earlier).unwrap();
    let mut command = pack.command(stages);
    command.arg("--compare").arg(&earlier).env("BROKEN", "1").env("PRODUCT_MS", "1.8");
    let said = said(&command.output().unwrap());
    let (_, changes) = said.split_once("commit abc1234:\n").unwrap_or_else(|| panic!("{said}"));
    assert!(changes.contains("kernels, rope: passed (1 passed, 0 failed, 0 skipped) -> failed"), "{changes}");
    assert!(changes.contains("product: 1.500 -> 1.800 ms (+20.0 %)"), "{changes}");
    assert!(!changes.contains("copy") && !changes.contains("norm"), "{changes}");
}

#[test]
fn mistakes_cost_no_minutes() {
    let pack = Pack::new("mistakes");
    let no_gpu = pack.command("--only kernels").env("NO_GPU", "1").output().unwrap();
    assert_eq!(no_gpu.status.code(), Some(1));
    assert!(said(&no_gpu).contains("gpu-check: no GPU: no driver; nothing was checked"), "{}", said(&no_gpu));
    let unknown = pack.command("--only kernel").output().unwrap();
    assert!(said(&unknown).contains("no stage is called kernel"), "{}", said(&unknown));
    let missing = pack.command("--compare nowhere.json").output().unwrap();
    assert!(said(&missing).contains("read nowhere.json"), "{}", said(&missing));
    fs::remove_file(pack.0.join("shm_tests")).unwrap();
    let incomplete = pack.command("").output().unwrap();
    assert!(said(&incomplete).contains("shm_tests is not there"), "{}", said(&incomplete));
    assert!(!Path::new(&pack.results("report.json")).exists());
}

/// Every stage, without cargo and without variables of the environment: what fails in one leaves the others whole.
#[test]
fn a_whole_run_ends_with_every_stage_in_the_report() {
    let pack = Pack::new("whole");
    write_script(&pack.0.join("kernel_tests"), ILLEGAL_ACCESS);
    write_script(&pack.0.join("baton"), BATON);
    let tools = pack.0.join("tools");
    fs::create_dir(&tools).unwrap();
    write_script(&tools.join("compute-sanitizer"), SANITIZER);
    let prompts = pack.0.join("repository/models/tiny/eval");
    fs::create_dir_all(&prompts).unwrap();
    fs::write(prompts.join("recall-512.jsonl"), "{\"messages\": []}\n").unwrap();
    let mut command = pack.command("--seconds 108");
    command.env_clear().env("PATH", format!("{}:/usr/bin:/bin", tools.display())).env("NO_LT", "1");
    let start = Instant::now();
    let output = command.output().unwrap();
    let (report, said) = (pack.report("report.json"), said(&output));
    assert!(start.elapsed() < Duration::from_secs(108), "{said}");
    assert_eq!((output.status.code(), &report["is_complete"]), (Some(1), &Value::Bool(true)), "{said}");
    let stages: Vec<&str> =
        report["stages"].as_array().unwrap().iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(
        stages,
        ["card", "smoke", "figures", "kernels", "models", "racecheck", "handoff", "nccl"],
        "memcheck is only for those who ask"
    );
    let no_lt = ("failed", [0, 1, 0], "no cuBLASLt: libcublasLt.so.12 is not there");
    for (name, expected) in [
        ("ceilings", no_lt),
        ("figures", no_lt),
        ("wgmma trials", ("passed", [1, 0, 0], "1 tests")),
        ("illegal", ("failed", [0, 2, 0], "illegal::a; illegal::b")),
        ("norm", ("passed", [1, 0, 0], "1 tests")),
        ("whole", ("passed", [1, 0, 0], "1 tests")),
        ("exposed, shm", ("passed", [1, 0, 0], "exposed handoff, shm, 256 tokens: 0.500 ms of 1.500 ms")),
        ("exposed, tcp", ("failed", [0, 1, 0], "exposed handoff, tcp, 256 tokens: 2.500 ms of 1.500 ms")),
        ("tests of rdma", ("passed", [1, 0, 0], "1 tests")),
        ("nccl in a graph", ("passed", [1, 0, 0], "1 tests")),
    ] {
        assert_eq!(check(&report, name), expected, "{name}");
    }
    let finding = |name| {
        let (outcome, [_, num_failed, _], what) = check(&report, name);
        assert_eq!((outcome, num_failed), ("failed", 1), "{name}: {what}");
        what
    };
    assert!(finding("attention").contains("Race reported"), "{}", finding("attention"));
    assert!(finding("answers, shm").contains("not ready in time"), "{}", finding("answers, shm"));
    assert!(finding("answers, tcp").contains("no pool on this device"), "{}", finding("answers, tcp"));
}

#[test]
fn figures_of_a_small_card_are_skipped_with_the_reason() {
    let pack = Pack::new("small");
    let mut command = pack.command("--seconds 100 --only card --only figures");
    let output = command.env("MEMORY_BYTES", "2100000000").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let report = pack.report("report.json");
    let expected = ("skipped", [0, 0, 1], "figures are for cards of 16 GB or more, this device has 2.1 GB");
    for name in ["ceilings", "figures"] {
        assert_eq!(check(&report, name), expected);
    }
}
