//! Flags > environment > config file > defaults, as one typed value.
//!
//! clap handles flags, environment and defaults. A value from a file becomes the default of the flag of that name, so it
//! is parsed and checked like the flag.

use std::{ffi::OsString, fmt::Write, path::Path, path::PathBuf, process::ExitCode};

use clap::{ArgMatches, Args, Command, Parser, parser::ValueSource};

/// Where settings come from.
#[derive(Clone, Debug, Args)]
pub(crate) struct LayerArgs {
    /// TOML file with a table for each role; flags and environment override it.
    #[arg(long, value_name = "FILE", env = "BATON_CONFIG")]
    pub config: Option<PathBuf>,
    /// Print every setting with its value and where it came from, and stop.
    #[arg(long)]
    pub print_config: bool,
}

/// What a command line asks for.
pub(crate) enum Parsed<C> {
    /// Run it.
    Run(Box<C>),
    /// Print this and stop.
    Print(String),
}

/// A call that cannot be carried out.
#[derive(Debug)]
pub(crate) enum CallError {
    /// clap's message, or its help text.
    Call(clap::Error),
    /// The file is not readable, or holds an unknown setting.
    File(String),
}

impl CallError {
    /// Prints the message and gives the exit code: 0 for help, 2 for a mistake.
    pub(crate) fn exit(&self) -> ExitCode {
        match self {
            CallError::Call(error) => {
                // Nothing is left to do when even stderr is closed.
                let _ = error.print();
                ExitCode::from(error.exit_code() as u8)
            }
            CallError::File(message) => {
                eprintln!("error: {message}");
                ExitCode::from(2)
            }
        }
    }
}

impl From<clap::Error> for CallError {
    fn from(error: clap::Error) -> Self {
        CallError::Call(error)
    }
}

/// Parses the command line, with the file that `--config` names.
pub(crate) fn parse<C: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<Parsed<C>, CallError> {
    let args: Vec<OsString> = args.into_iter().collect();
    let matches = C::command().try_get_matches_from(&args)?;
    let Some((role, role_matches)) = matches.subcommand() else {
        return Ok(Parsed::Run(Box::new(C::from_arg_matches(&matches)?)));
    };
    let file = match config_path(role_matches) {
        Some(path) => Some(ConfigFile::read(&path, role, &C::command())?),
        None => None,
    };
    let matches = match &file {
        Some(file) => file.apply(C::command())?.try_get_matches_from(&args)?,
        None => matches,
    };
    let (role, role_matches) = matches.subcommand().expect("parsed with a subcommand above");
    let wants_print = role_matches.try_get_one::<bool>("print_config").ok().flatten().copied();
    // Values are checked before they are printed: a configuration that prints is one that parses.
    let cli = C::from_arg_matches(&matches)?;
    if wants_print == Some(true) {
        return Ok(Parsed::Print(origins(&C::command(), role, role_matches, file.as_ref())));
    }
    Ok(Parsed::Run(Box::new(cli)))
}

fn config_path(matches: &ArgMatches) -> Option<PathBuf> {
    matches.try_get_one::<PathBuf>("config").ok().flatten().cloned()
}

/// The table of one role in a TOML file: `[router]`, `[prefill-worker]`, `[decode-worker]`, `[up]`.
struct ConfigFile {
    path: PathBuf,
    role: String,
    table: toml::Table,
}

impl ConfigFile {
    fn read(path: &Path, role: &str, command: &Command) -> Result<ConfigFile, CallError> {
        let fail = |message: String| CallError::File(format!("config file {}: {message}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        let mut whole: toml::Table =
            text.parse().map_err(|error: toml::de::Error| fail(error.to_string()))?;
        for (table, value) in &whole {
            if command.find_subcommand(table).is_none() {
                if !value.is_table() {
                    return Err(fail(format!("{table} stands in no table; put it under [{role}]")));
                }
                let roles = "[router], [prefill-worker], [decode-worker] or [up]";
                return Err(fail(format!("unknown table [{table}]; a file holds {roles}")));
            }
        }
        let table = match whole.remove(role) {
            None => toml::Table::new(),
            Some(toml::Value::Table(table)) => table,
            Some(_) => return Err(fail(format!("{role} is not a table; write [{role}]"))),
        };
        Ok(ConfigFile { path: path.to_owned(), role: role.to_owned(), table })
    }

    /// Makes each value in the file the default of its flag.
    fn apply(&self, command: Command) -> Result<Command, CallError> {
        let role = command.find_subcommand(&self.role).expect("the role was parsed as a subcommand");
        let mut defaults = Vec::new();
        for (key, value) in &self.table {
            let known = role.get_arguments().find(|arg| arg.get_long() == Some(key));
            let Some(arg) = known else {
                return Err(CallError::File(format!(
                    "config file {}: [{}] has no setting '{key}'; `baton {} --help` lists them",
                    self.path.display(),
                    self.role,
                    self.role,
                )));
            };
            defaults.push((arg.get_id().clone(), texts(value)));
        }
        Ok(command.mut_subcommand(&self.role, |mut role| {
            for (id, texts) in defaults {
                role = role.mut_arg(id, |arg| arg.default_values(texts).required(false));
            }
            role
        }))
    }
}

/// A TOML value as words of a command line.
fn texts(value: &toml::Value) -> Vec<String> {
    match value {
        toml::Value::String(text) => vec![text.clone()],
        toml::Value::Array(values) => values.iter().flat_map(texts).collect(),
        other => vec![other.to_string()],
    }
}

/// Every setting of the role with its value and where that came from, in the file's own format.
fn origins(command: &Command, role: &str, matches: &ArgMatches, file: Option<&ConfigFile>) -> String {
    let role_command = command.find_subcommand(role).expect("the role was parsed as a subcommand");
    let mut out = format!("[{role}]\n");
    for arg in role_command.get_arguments() {
        let id = arg.get_id().as_str();
        let Some(long) = arg.get_long() else { continue };
        if matches!(id, "help" | "version" | "config" | "print_config") {
            continue;
        }
        let Some(values) = matches.get_raw(id) else {
            writeln!(out, "# {long} is not set").expect("writing to a string");
            continue;
        };
        if arg.is_hide_env_values_set() {
            writeln!(out, "# {long} is set, and not shown").expect("writing to a string");
            continue;
        }
        let values: Vec<String> = values.map(|value| quoted(&value.to_string_lossy())).collect();
        let value = if values.len() == 1 { values[0].clone() } else { format!("[{}]", values.join(", ")) };
        let origin = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => "flag".to_owned(),
            Some(ValueSource::EnvVariable) => {
                format!("environment {}", arg.get_env().unwrap_or_default().to_string_lossy())
            }
            _ => match file.filter(|file| file.table.contains_key(long)) {
                Some(file) => format!("file {}", file.path.display()),
                None => "default".to_owned(),
            },
        };
        writeln!(out, "{:<44} # {origin}", format!("{long} = {value}")).expect("writing to a string");
    }
    out
}

fn quoted(text: &str) -> String {
    let plain =
        text.parse::<i64>().is_ok() || text.parse::<f64>().is_ok() || matches!(text, "true" | "false");
    if plain { text.to_owned() } else { toml::Value::String(text.to_owned()).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;

    fn args(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn printed(line: &str) -> String {
        match parse::<Cli>(args(line)) {
            Ok(Parsed::Print(text)) => text,
            Ok(Parsed::Run(_)) => panic!("{line}: ran"),
            Err(error) => panic!("{line}: {error:?}"),
        }
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn a_flag_beats_the_file_and_the_file_beats_the_default() {
        let file = file("[router]\nlisten = \"127.0.0.1:1\"\nmodel-name = \"from-file\"\n");
        let path = file.path().display();
        let text = printed(&format!("baton router --config {path} --listen 127.0.0.1:2 --print-config"));
        let line = |key: &str| text.lines().find(|line| line.starts_with(key)).unwrap().to_owned();
        assert!(line("listen").contains("127.0.0.1:2") && line("listen").ends_with("# flag"), "{text}");
        assert!(line("model-name").contains("from-file") && line("model-name").contains("# file"), "{text}");
        assert!(line("discovery").ends_with("# default"), "{text}");
    }

    #[test]
    fn a_printed_configuration_is_a_file_with_the_same_values() {
        let first = printed("baton decode-worker --listen 127.0.0.1:7 --print-config");
        let file = file(&first);
        let second =
            printed(&format!("baton decode-worker --config {} --print-config", file.path().display()));
        let values = |text: &str| -> Vec<String> {
            text.lines().map(|line| line.split('#').next().unwrap_or("").trim().to_owned()).collect()
        };
        assert_eq!(values(&first), values(&second));
    }

    #[test]
    fn mistakes_in_the_file_are_named() {
        let cases = [
            ("[router]\nlisten-on = 1\n", "no setting 'listen-on'"),
            ("[rooter]\n", "unknown table [rooter]"),
            ("router = 1\n", "not a table"),
            ("listen = 1\n[router]\n", "listen stands in no table; put it under [router]"),
            ("[router\n", "config file"),
        ];
        for (text, expected) in cases {
            let file = file(text);
            let line = format!("baton router --config {} --print-config", file.path().display());
            match parse::<Cli>(args(&line)) {
                Err(CallError::File(message)) => assert!(message.contains(expected), "{message}"),
                other => panic!("{text}: {:?}", other.err()),
            }
        }
        let file = file("[router]\nlisten = \"nowhere\"\n");
        let line = format!("baton router --config {} --print-config", file.path().display());
        match parse::<Cli>(args(&line)) {
            Err(CallError::Call(error)) => assert!(error.to_string().contains("nowhere"), "{error}"),
            other => panic!("{:?}", other.err()),
        }
    }
}
