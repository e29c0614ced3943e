//! The chart's scripts that fetch a model, with small programs in place of rclone and Hugging Face's library: another source in the
//! same directory replaces the model, and so does a rollback.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Copies a source's files, and removes the files directly in the directory that the source lacks, as rclone does with these flags.
const RCLONE: &str = r#"
verb=$1
for last; do from=$to; to=$last; done
from="$SOURCES/${from#:s3:}"
mkdir -p "$to"
case "$verb" in
copy)
    for file in "$from"/*; do [ ! -f "$file" ] || cp "$file" "$to"; done ;;
sync)
    case "$*" in *"--exclude /.fetched-*"*"--max-depth 1 "*) ;; *) echo "it would remove too much: $*"; exit 1 ;; esac
    for file in "$to"/*; do [ ! -f "$file" ] || [ -e "$from/${file##*/}" ] || rm "$file"; done ;;
*) echo "no such verb: $verb"; exit 1 ;;
esac
"#;

/// Installs nothing, and runs scripts with the library below.
const PYTHON: &str = r#"
[ "$1" = -m ] && exit 0
PYTHONPATH="$LIBRARY" exec "$REAL_PYTHON" "$@"
"#;

/// A Hub whose branches are folders and whose commits have their names. Without an answer it keeps the files that are there.
const HUGGING_FACE: &str = r#"
import json, os, shutil, types

class HfApi:
    def model_info(self, name, revision):
        return types.SimpleNamespace(sha=revision)

def snapshot_download(repo_id, revision, local_dir, ignore_patterns, dry_run=False):
    source = os.path.join(os.environ["SOURCES"], repo_id, revision)
    notes = os.path.join(local_dir, ".cache", "commits.json")
    commits = json.load(open(notes)) if os.path.exists(notes) else {}
    if dry_run:
        return [
            types.SimpleNamespace(filename=file, commit_hash=commits[file], will_download=False)
            for file in os.listdir(source)
        ]
    os.makedirs(os.path.dirname(notes), exist_ok=True)
    for file in os.listdir(source):
        if os.environ.get("IS_SILENT") and os.path.exists(os.path.join(local_dir, file)):
            continue
        shutil.copy(os.path.join(source, file), local_dir)
        commits[file] = revision
    json.dump(commits, open(notes, "w"))
"#;

struct Place {
    dir: PathBuf,
}

impl Place {
    fn new(name: &str) -> Place {
        let dir = std::env::temp_dir().join(format!("baton-xtask-fetch-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let place = Place { dir };
        place.write_program("rclone", RCLONE);
        place.write_program("python3", PYTHON);
        place.write("library/huggingface_hub.py", HUGGING_FACE);
        // One file, then shards: a checkpoint prefers the single file.
        place.write("sources/o/m/v1/model.safetensors", "one");
        place.write("sources/o/m/v1/config.json", "one");
        place.write("sources/o/m/v2/model-00001-of-00002.safetensors", "two");
        place.write("sources/o/m/v2/model-00002-of-00002.safetensors", "two");
        place.write("sources/o/m/v2/model.safetensors.index.json", "two");
        place.write("sources/o/m/v2/config.json", "two");
        place
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.dir.join(file);
        fs::create_dir_all(path.parent().expect("it is in the place")).unwrap();
        fs::write(path, text).unwrap();
    }

    fn write_program(&self, name: &str, text: &str) {
        let file = format!("bin/{name}");
        self.write(&file, &format!("#!/bin/sh\n{text}"));
        fs::set_permissions(self.dir.join(file), PermissionsExt::from_mode(0o755)).unwrap();
    }

    fn model(&self) -> PathBuf {
        self.dir.join("model")
    }

    /// Runs a script of the chart as its Job does.
    fn run(&self, script: &str, source: &str, marker: &str, variables: &[(&str, &str)]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../helm/baton/files/fetch").join(script);
        let path = std::env::var("PATH").expect("tests have one");
        Command::new("sh")
            .arg("-ec")
            .arg(fs::read_to_string(script).unwrap())
            .env("PATH", format!("{}:{path}", self.dir.join("bin").display()))
            .env("SOURCES", self.dir.join("sources"))
            .env("LIBRARY", self.dir.join("library"))
            .env("SOURCE", source)
            .env("MODEL", self.model())
            .env("MARKER", self.model().join(marker))
            .env("ENDPOINT", "")
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    /// The files of the model's directory, sorted.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.model()).unwrap().map(Result::unwrap);
        let mut names: Vec<String> = entries
            .filter(|entry| entry.path().is_file())
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// One source, another, the first again, and once more: the directory is the source's each time, with its marker alone.
    fn follows_its_source(&self, script: &str, start: &str, variables: &[(&str, &str)]) {
        const V1: &[&str] = &[".fetched-v1", "config.json", "model.safetensors"];
        const V2: &[&str] = &[
            ".fetched-v2",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ];
        for (version, content, wanted) in
            [("v1", "one", V1), ("v2", "two", V2), ("v1", "one", V1), ("v1", "one", V1)]
        {
            let marker = format!(".fetched-{version}");
            succeeds(&self.run(script, &format!("{start}{version}"), &marker, variables));
            assert_eq!(self.files(), wanted, "{script} {version}");
            for name in &wanted[1..] {
                assert_eq!(fs::read_to_string(self.model().join(name)).unwrap(), content, "{script} {name}");
            }
        }
        // Another model of the claim, in a folder of this one's directory.
        self.write("model/other/model.safetensors", "other");
        succeeds(&self.run(script, &format!("{start}v2"), ".fetched-v2", variables));
        assert!(self.model().join("other/model.safetensors").exists(), "{script} removed a folder");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn succeeds(output: &Output) {
    let [said, complained] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{said}{complained}");
}

/// The path of Python. A `python3` of PATH may be a script that looks for its files in HOME.
fn python() -> Option<String> {
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[test]
fn a_bucket_replaces_the_model_of_another_source_and_of_a_rollback() {
    Place::new("s3").follows_its_source("s3.sh", "o/m/", &[]);
}

#[test]
fn a_hub_replaces_the_model_of_another_source_and_of_a_rollback() {
    let Some(python) = python() else {
        println!("SKIPPED: no python3 here");
        return;
    };
    Place::new("hub").follows_its_source("hub.sh", "o/m@", &[("REAL_PYTHON", python.as_str())]);
}

#[test]
fn a_hub_that_does_not_answer_leaves_no_marker() {
    let Some(python) = python() else {
        println!("SKIPPED: no python3 here");
        return;
    };
    let place = Place::new("silent-hub");
    let variables = [("REAL_PYTHON", python.as_str()), ("IS_SILENT", "yes")];
    succeeds(&place.run("hub.sh", "o/m@v1", ".fetched-v1", &variables[..1]));
    // v2 has a config.json, too: the library keeps that of v1.
    let output = place.run("hub.sh", "o/m@v2", ".fetched-v2", &variables);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("config.json is not that of o/m at v2"));
    assert!(!place.files().iter().any(|name| name.starts_with(".fetched-")), "{:?}", place.files());
}
