//! `cargo xtask sbom`: a list of all that the program `baton` is built from, in CycloneDX's JSON.
//!
//! Packages, versions, licences, checksums and who uses whom, as cargo resolves them for this platform, with build scripts and
//! procedural macros, without tests. Without a time and a random number, so that equal lock files give equal lists.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::workspace::{Package, Workspace};

const PROGRAM: &str = "baton-cli";

/// Prints the list.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    println!("{}", text(workspace)?);
    Ok(true)
}

/// The list.
pub(crate) fn text(workspace: &Workspace) -> Result<String> {
    Ok(serde_json::to_string_pretty(&document(&workspace.for_this_platform()?)?)?)
}

fn document(workspace: &Workspace) -> Result<Value> {
    let packages: BTreeMap<&str, Package<'_>> =
        workspace.packages().map(|package| (package.id(), package)).collect();
    let program = packages.values().find(|package| package.name() == PROGRAM).context(PROGRAM)?;
    let checksums = checksums(workspace)?;
    let (mut seen, mut queue) = (BTreeSet::from([program.id()]), VecDeque::from([program.id()]));
    let (mut components, mut dependencies) = (Vec::new(), Vec::new());
    while let Some(id) = queue.pop_front() {
        let used: BTreeSet<&str> = workspace.build_dependencies(id).into_iter().collect();
        let refs: Vec<String> = used.iter().map(|id| purl(packages[id])).collect();
        dependencies.push(json!({"ref": purl(packages[id]), "dependsOn": refs}));
        if id != program.id() {
            components.push(component(packages[id], "library", &checksums));
        }
        queue.extend(used.into_iter().filter(|id| seen.insert(id)));
    }
    components.sort_by_key(|component| component["bom-ref"].to_string());
    Ok(json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(*program, "application", &checksums)},
        "components": components,
        "dependencies": dependencies,
    }))
}

fn component(package: Package<'_>, kind: &str, checksums: &BTreeMap<String, String>) -> Value {
    let purl = purl(package);
    let mut component = json!({
        "type": kind, "bom-ref": purl, "purl": purl, "name": package.name(), "version": package.version(),
    });
    if let Some(licence) = package.license() {
        // Some old packages write a slash, which no expression has.
        let licence = licence.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ");
        component["licenses"] = json!([{"expression": licence}]);
    }
    if let Some(checksum) = checksums.get(&purl) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    component
}

/// The address of a package among all packages of all languages.
fn purl(package: Package<'_>) -> String {
    address(package.name(), package.version())
}

fn address(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

/// Of the archives, by their addresses.
fn checksums(workspace: &Workspace) -> Result<BTreeMap<String, String>> {
    let lock: toml::Table = std::fs::read_to_string(workspace.root.join("Cargo.lock"))?.parse()?;
    let packages = lock["package"].as_array().context("Cargo.lock lists packages")?;
    let entry = |package: &toml::Value| {
        let text = |field: &str| package.get(field)?.as_str();
        Some((address(text("name")?, text("version")?), text("checksum")?.to_owned()))
    };
    Ok(packages.iter().filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_program_is_listed_once_with_what_it_uses() {
        let document = document(&Workspace::load().unwrap()).unwrap();
        let refs = |list: &Value, field: &str| -> Vec<String> {
            list.as_array().unwrap().iter().map(|item| item[field].as_str().unwrap().to_owned()).collect()
        };
        let components = refs(&document["components"], "bom-ref");
        let all: BTreeSet<&String> = components.iter().collect();
        assert_eq!(all.len(), components.len());
        let program = document["metadata"]["component"]["bom-ref"].as_str().unwrap().to_owned();
        for dependency in document["dependencies"].as_array().unwrap() {
            for used in dependency["dependsOn"].as_array().unwrap() {
                assert!(all.contains(&used.as_str().unwrap().to_owned()), "{used}");
            }
        }
        assert_eq!(refs(&document["dependencies"], "ref").len(), components.len() + 1);
        assert!(!all.contains(&program));
        let tokio =
            document["components"].as_array().unwrap().iter().find(|it| it["name"] == "tokio").unwrap();
        assert_eq!(tokio["hashes"][0]["content"].as_str().map(str::len), Some(64));
        assert!(components.iter().any(|name| name.starts_with("pkg:cargo/baton-keys@")));
        assert!(!components.iter().any(|name| name.contains("/proptest@")), "tests are no part of it");
    }
}
