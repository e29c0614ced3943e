//! Whether every dependency comes from where deny.toml says, under a licence that it allows.
//!
//! cargo-deny checks the same and takes minutes to build, so it is no part of CI. It reads the same file, and also knows
//! advisories: `cargo deny check`.

use anyhow::{Context, Result};
use serde::Deserialize;
use spdx::{Expression, LicenseReq, Licensee, ParseMode};

use crate::{
    check::Outcome,
    workspace::{Package, Workspace},
};

const FILE: &str = "deny.toml";

/// The part of the file that is checked here.
#[derive(Deserialize)]
struct Rules {
    licenses: Licences,
    sources: Sources,
}

#[derive(Deserialize)]
struct Licences {
    allow: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let text = std::fs::read_to_string(workspace.root.join(FILE)).context(FILE)?;
    let rules: Rules = toml::from_str(&text).context(FILE)?;
    let licensees = rules.licenses.allow.iter().map(|licence| Licensee::parse(licence));
    let licensees: Vec<Licensee> = licensees.collect::<Result<_, _>>().context(FILE)?;
    let foreign: Vec<Package<'_>> =
        workspace.packages().filter(|package| package.source().is_some()).collect();
    let mut findings = Vec::new();
    for package in &foreign {
        let name = format!("{} {}", package.name(), package.version());
        if let Some(finding) = licence(package.license(), &licensees) {
            findings.push(format!("{name}: {finding}"));
        }
        let source = package.source().unwrap_or_default();
        if !rules.sources.allow_registry.iter().any(|registry| source == format!("registry+{registry}")) {
            findings.push(format!("{name} comes from {source}, which {FILE} does not allow"));
        }
    }
    Ok(Outcome::of(findings, format!("{} dependencies", foreign.len())))
}

/// What is wrong with a licence.
fn licence(licence: Option<&str>, licensees: &[Licensee]) -> Option<String> {
    let Some(licence) = licence else { return Some("it states no licence".to_owned()) };
    let expression = match Expression::parse_mode(licence, ParseMode::LAX) {
        Ok(expression) => expression,
        Err(error) => {
            return Some(format!("its licence {licence:?} is no SPDX expression: {}", error.reason));
        }
    };
    let is_allowed = |asked: &LicenseReq| licensees.iter().any(|licensee| licensee.satisfies(asked));
    (!expression.evaluate(is_allowed)).then(|| format!("{FILE} does not allow its licence, {licence}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_needs_an_allowed_choice_in_each_part() {
        let allowed = ["MIT", "Apache-2.0 WITH LLVM-exception"].map(|text| Licensee::parse(text).unwrap());
        for good in [
            "MIT",
            "GPL-3.0-only OR MIT",
            "GPL-3.0-only/MIT",
            "(MIT OR ISC) AND MIT",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert_eq!(licence(Some(good), &allowed), None, "{good}");
        }
        for bad in ["GPL-3.0-only", "MIT AND ISC", "Apache-2.0", "no licence at all"] {
            assert!(licence(Some(bad), &allowed).is_some(), "{bad}");
        }
        assert!(licence(None, &allowed).is_some());
    }
}
