//! Environment variables that look like settings and are none: a misspelt one must not go unnoticed.

use clap::Command;

use crate::log::LogStyle;

/// Variables that are read without a flag: libraries of NVIDIA, and a switch of the GPU's launches.
const WITHOUT_FLAG: [&str; 3] = ["BATON_NVRTC", "BATON_CUBLASLT", "BATON_OVERLAP_LAUNCHES"];

/// Parts of the names that Kubernetes gives to the addresses of services.
const OF_KUBERNETES: [&str; 4] = ["_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_UDP"];

/// Warns of each variable named `BATON_…` that is no setting of any command. Returns their names.
pub(crate) fn warn_of_unknown(command: &Command, style: LogStyle) -> Vec<String> {
    let known = known(command);
    let unknown = unknown(&known);
    unknown.iter().for_each(|name| eprintln!("{}", style.warning(&warning(name, &known))));
    unknown
}

/// [Warns](warn_of_unknown) of unknown variables and removes them, so that child processes do not warn again.
///
/// # Safety
/// No other thread runs.
#[allow(unsafe_code)]
pub(crate) unsafe fn remove_unknown(command: &Command, style: LogStyle) {
    for name in warn_of_unknown(command, style) {
        // SAFETY: the caller's.
        unsafe { std::env::remove_var(name) };
    }
}

fn unknown(known: &[String]) -> Vec<String> {
    let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let ours = variables.filter(|(name, _)| name.starts_with("BATON_") && !known.contains(name));
    let is_of_cluster = |name: &str, value: &str| {
        OF_KUBERNETES.iter().any(|part| name.contains(part)) || value.starts_with("tcp://")
    };
    ours.filter(|(name, value)| !is_of_cluster(name, &value.to_string_lossy()))
        .map(|(name, _)| name)
        .collect()
}

fn warning(name: &str, known: &[String]) -> String {
    let similar = known.iter().map(|known| (strsim::jaro_winkler(name, known), known));
    match similar.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((score, near)) if score > 0.9 => {
            format!("the environment variable {name} is no setting; did you mean {near}?")
        }
        _ => format!("the environment variable {name} is no setting, and has no effect"),
    }
}

fn known(command: &Command) -> Vec<String> {
    let commands =
        command.get_subcommands().flat_map(|sub| std::iter::once(sub).chain(sub.get_subcommands()));
    let variables = commands.flat_map(Command::get_arguments).filter_map(clap::Arg::get_env);
    let variables = variables.map(|name| name.to_string_lossy().into_owned());
    variables.chain(WITHOUT_FLAG.map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn a_misspelt_variable_is_named_with_its_neighbour() {
        let known = known(&Cli::command());
        for name in
            ["BATON_MODEL", "BATON_TRANSPORTS", "BATON_NVRTC", "BATON_OVERLAP_LAUNCHES", "BATON_PREFILL"]
        {
            assert!(known.iter().any(|known| known == name), "{name}");
        }
        let message = warning("BATON_MAX_RUNING", &known);
        assert!(message.ends_with("did you mean BATON_MAX_RUNNING?"), "{message}");
        assert!(warning("BATON_QQQQ", &known).ends_with("no effect"));
    }
}
