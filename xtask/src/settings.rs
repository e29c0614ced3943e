//! Checks that the flags and variables in deploy/ and helm/ exist. Otherwise a renamed flag would fail only in a user's
//! cluster.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use crate::{check::Outcome, workspace::Workspace};

/// Where the program's flags and variables are declared: in the Rust files below.
const DECLARED: &str = "cli/";

const FOLDERS: [&str; 2] = ["deploy/", "helm/"];

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(files) = workspace.files()? else { return Ok(Outcome::without_files()) };
    let mut declared = String::new();
    for file in files.iter().filter(|file| file.starts_with(DECLARED) && file.ends_with(".rs")) {
        declared += &std::fs::read_to_string(workspace.root.join(file)).context(DECLARED)?;
    }
    let mut findings = Vec::new();
    let mut settings = BTreeSet::new();
    for file in files.iter().filter(|file| FOLDERS.iter().any(|folder| file.starts_with(folder))) {
        let Ok(text) = std::fs::read_to_string(workspace.root.join(file)) else { continue };
        let role_flags = file.starts_with("helm/baton/templates/") && !file.ends_with("etcd.yaml");
        for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
            // Comments are not checked.
            let line = line.split(" #").next().unwrap_or_default();
            let variables = words(line, "BATON_").filter(|name| is_set(line, name));
            let flags = words(line, "--").filter(|_| role_flags && line.trim_start().starts_with("- --"));
            for setting in variables.chain(flags) {
                if !is_declared(&declared, setting) {
                    findings.push(format!("{file} sets {setting}, which {DECLARED} does not know"));
                }
                settings.insert(setting.to_owned());
            }
        }
    }
    Ok(Outcome::of(findings, format!("{} flags and variables in deploy/ and helm/", settings.len())))
}

/// Words of a line that begin with `prefix`, without their values.
fn words<'a>(line: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'))
        .filter(move |word| word.starts_with(prefix) && word.len() > prefix.len())
}

fn is_declared(declared: &str, setting: &str) -> bool {
    match setting.strip_prefix("--") {
        Some(flag) => declared.contains(&format!("pub {}:", flag.replace('-', "_"))),
        None => declared.contains(&format!("\"{setting}\"")),
    }
}

/// Whether a line gives the variable a value, as YAML, a Dockerfile or a unit of systemd does.
fn is_set(line: &str, variable: &str) -> bool {
    [":", "="].iter().any(|sign| line.contains(&format!("{variable}{sign}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_flags_and_variables() {
        assert_eq!(words("- --etcd-prefix={{ x }}", "--").collect::<Vec<_>>(), ["--etcd-prefix"]);
        let line = "environment: {<<: *x, BATON_ID: a, BATON_ADVERTISE: \"http://a:1\"}";
        assert_eq!(words(line, "BATON_").collect::<Vec<_>>(), ["BATON_ID", "BATON_ADVERTISE"]);
        assert!(is_set(line, "BATON_ID") && is_set("Environment=BATON_ID=%H", "BATON_ID"));
        assert!(!is_set("--env BATON_ID", "BATON_ID"));
    }

    #[test]
    fn a_setting_is_declared_by_its_field_or_its_variable() {
        let declared = "#[arg(long, env = \"BATON_DATA_LISTEN\")]\npub data_listen: SocketAddr,";
        for known in ["--data-listen", "BATON_DATA_LISTEN"] {
            assert!(is_declared(declared, known), "{known}");
        }
        for unknown in ["--data", "BATON_DATA"] {
            assert!(!is_declared(declared, unknown), "{unknown}");
        }
    }
}
