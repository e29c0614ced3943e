//! `baton keys new`: makes an API key, and the entry of the key file that admits it.

use std::fmt::Write;

use anyhow::{Context, bail, ensure};
use baton_keys::{ApiKey, KeyRing};
use clap::{Args, Subcommand, ValueEnum};
use toml::value::Datetime;

/// The arguments of `baton keys`.
#[derive(Debug, Args)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// Make a key. Prints it to standard error, once, and its entry for the key file to standard output: append that to the file.
    New(NewArgs),
}

/// The key to make.
#[derive(Debug, Args)]
#[command(after_help = "Example: baton keys new alice --tenant acme --requests-per-minute 60 >> keys.toml")]
struct NewArgs {
    /// Name of the key in logs.
    name: String,
    /// Whose it is. Keys of one tenant share cached prefixes, and see each other's requests. A key of role worker needs none.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// What it is for.
    #[arg(long, value_enum, default_value_t = RoleChoice::Client)]
    role: RoleChoice,
    /// Calls a minute.
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<u32>,
    /// Tokens of prompts and outputs a minute.
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<u32>,
    /// Calls that are answered at a time.
    #[arg(long, value_name = "N")]
    streams: Option<u32>,
    /// Until when it is valid: 2027-01-31 (0 o'clock UTC) or 2027-01-31T12:00:00Z.
    #[arg(long, value_name = "DATE")]
    expires: Option<String>,
}

/// What a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RoleChoice {
    /// Sends requests.
    Client,
    /// Sends requests, and sees those of all tenants on the page.
    Operator,
    /// Registers workers.
    Worker,
}

/// Makes a key and prints it.
pub(crate) fn run(args: KeysArgs) -> anyhow::Result<()> {
    let KeysCommand::New(args) = args.command;
    let key = new_key()?;
    let entry = args.entry(&key)?;
    eprintln!("{}", key.secret());
    print!("{entry}");
    Ok(())
}

/// A key of bits from the kernel.
pub(crate) fn new_key() -> anyhow::Result<ApiKey> {
    let mut bits = [0; 32];
    getrandom::fill(&mut bits).context("no random bits for a key")?;
    Ok(ApiKey::from_random(bits))
}

impl NewArgs {
    /// The entry of the key file, as the router reads it.
    fn entry(&self, key: &ApiKey) -> anyhow::Result<String> {
        let NewArgs { name, tenant, role, requests_per_minute, tokens_per_minute, streams, expires } = self;
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        ensure!(
            tenant.is_some() || *role == RoleChoice::Worker,
            "{name:?} has no tenant; name one with --tenant, or make a key for workers with --role worker"
        );
        if let Some(date) = expires {
            ensure!(
                date.parse::<Datetime>().is_ok(),
                "--expires is {date:?}; expected a date such as 2027-01-31 or 2027-01-31T12:00:00Z"
            );
        }
        let role = role.to_possible_value().expect("no role is hidden");
        let hash = key.hash();
        let fields = [
            Some(("name", quoted(name))),
            tenant.as_deref().map(|tenant| ("tenant", quoted(tenant))),
            Some(("role", quoted(role.get_name()))),
            Some(("hash", quoted(&hash.to_string()))),
            requests_per_minute.map(|num| ("requests-per-minute", num.to_string())),
            tokens_per_minute.map(|num| ("tokens-per-minute", num.to_string())),
            streams.map(|num| ("streams", num.to_string())),
            expires.clone().map(|date| ("expires", date)),
        ];
        let mut entry = "[[key]]\n".to_owned();
        for (field, value) in fields.into_iter().flatten() {
            writeln!(entry, "{field} = {value}").expect("writing to a string");
        }
        if let Err(error) = KeyRing::read(&entry) {
            bail!("{}", error.message);
        }
        Ok(entry + "\n")
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn entry(line: &str, key: &ApiKey) -> anyhow::Result<String> {
        let Command::Keys(KeysArgs { command: KeysCommand::New(args) }) =
            Cli::parse_from(line.split_whitespace()).command
        else {
            panic!("{line}")
        };
        args.entry(key)
    }

    #[test]
    fn an_entry_admits_its_key() {
        let (first, second) = (new_key().unwrap(), new_key().unwrap());
        let quotas = "--requests-per-minute 2 --tokens-per-minute 3 --streams 4 --expires 2999-01-31";
        let file = entry(&format!("baton keys new a --tenant t {quotas}"), &first).unwrap()
            + &entry("baton keys new w --role worker", &second).unwrap();
        let ring = KeyRing::read(&file).unwrap();
        for (key, name) in [(&first, "a"), (&second, "w")] {
            assert_eq!(ring.find(key.secret(), SystemTime::now()).unwrap().name(), name);
            assert!(!file.contains(key.secret()));
        }
    }

    #[test]
    fn an_entry_that_the_router_would_refuse_is_not_printed() {
        for (line, part) in [
            ("baton keys new a", "name one with --tenant"),
            ("baton keys new a --role operator", "name one with --tenant"),
            ("baton keys new a/b --tenant t", "is no name"),
            ("baton keys new a --tenant t --streams 0", "nonzero"),
            ("baton keys new a --tenant t --expires tomorrow", "expected a date such as 2027-01-31"),
            ("baton keys new a --tenant t --expires 2027-01-31T12:00:00", "offset from UTC"),
        ] {
            let error = entry(line, &new_key().unwrap()).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
