//! The environment of a GPU check: programs, the files that tests read, the device, and the folder of results.

use std::{
    cell::Cell,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::Value;

use super::{
    group::{self, Ended},
    libraries::Libraries,
    programs::Programs,
};

/// What every step of the check needs.
pub(super) struct Bench {
    pub(super) programs: Programs,
    /// The files that tests read, at their paths in the repository.
    pub(super) repository: PathBuf,
    /// "cuda:0"
    pub(super) device: String,
    pub(super) libraries: Libraries,
    /// The folder of the report and of the logs.
    pub(super) results: PathBuf,
    /// Bytes of the device's memory, once it is known.
    pub(super) memory_bytes: Cell<u64>,
    /// The end of the current stage.
    end: Cell<Instant>,
    /// The weights of the commands that share its time and are not started yet, if they are known.
    weight_left: Cell<Option<u32>>,
}

impl Bench {
    pub(super) fn new(
        programs: Programs,
        repository: PathBuf,
        results: PathBuf,
        device: u32,
        libraries: Libraries,
    ) -> Result<Bench> {
        let logs = results.join("logs");
        if logs.exists() {
            std::fs::remove_dir_all(&logs).with_context(|| format!("remove {}", logs.display()))?;
        }
        std::fs::create_dir_all(&logs).with_context(|| format!("make {}", logs.display()))?;
        let device = format!("cuda:{device}");
        let (memory_bytes, end) = (Cell::new(0), Cell::new(Instant::now()));
        let weight_left = Cell::new(None);
        Ok(Bench { programs, repository, device, libraries, results, memory_bytes, end, weight_left })
    }

    /// The next stage ends then.
    pub(super) fn begin(&self, end: Instant) {
        self.end.set(end);
        self.weight_left.set(None);
    }

    /// Commands of so much weight in all share what is left of the stage's time.
    pub(super) fn share(&self, weight: usize) {
        self.weight_left.set(Some(u32::try_from(weight).unwrap_or(u32::MAX)));
    }

    /// What is left of the stage's time.
    pub(super) fn left(&self) -> Duration {
        self.end.get().saturating_duration_since(Instant::now())
    }

    /// A command with the environment for libraries, the device and the tests' files.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(&self.results)
            .env("BATON_REPOSITORY", &self.repository)
            .env("BATON_KERNELS_ON", &self.device)
            // Nothing is written outside of the results.
            .env("XDG_CACHE_HOME", self.results.join("cache"))
            .env("BATON_WEIGHT_CACHE", self.results.join("cache"))
            .env("LD_LIBRARY_PATH", OsString::from(&self.libraries.path));
        if let Some(nccl) = self.libraries.place_of("NCCL") {
            command.env("BATON_NCCL", nccl);
        }
        command
    }

    /// Runs a command to its end. It may take all that is left of the stage.
    pub(super) fn finish(&self, name: &str, command: &mut Command) -> Result<Ended> {
        group::finish(command, &self.log(name), self.left())
    }

    /// Runs one of several commands of a stage. It may take twice its share of the time that is left, so that the others have
    /// time if it hangs; or half of it, if nothing says how many there are. `weight`: how many tests it has.
    pub(super) fn finish_one_of_several(
        &self,
        name: &str,
        command: &mut Command,
        weight: usize,
    ) -> Result<Ended> {
        let weight = u32::try_from(weight).unwrap_or(u32::MAX).max(1);
        let limit = share_of(self.left(), weight, self.weight_left.get());
        self.weight_left.set(self.weight_left.get().map(|left| left.saturating_sub(weight)));
        group::finish(command, &self.log(name), limit)
    }

    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.results.join("logs").join(format!("{}.log", name.replace([' ', ':', '/'], "-")))
    }

    /// The names of a program's tests.
    pub(super) fn tests_of(&self, program: &Path) -> Result<Vec<String>> {
        let name = format!("list-{}", program.file_name().unwrap_or_default().to_string_lossy());
        let ended = self.finish_one_of_several(&name, self.command(program).arg("--list"), 1)?;
        anyhow::ensure!(ended.code == Some(0), "{}: {}", program.display(), ended.why());
        Ok(ended.output.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// What `gpu_check` says of the device; or why there is none.
    pub(super) fn card(&self) -> Result<Result<Value, String>> {
        let ended = self.finish("card", self.command(&self.programs.figures).arg("card"))?;
        let card = ended.output.lines().find_map(|line| serde_json::from_str::<Value>(line).ok());
        Ok(match (ended.code, card) {
            (Some(0), Some(card)) => {
                self.memory_bytes.set(card["memory_bytes"].as_u64().unwrap_or(0));
                Ok(card)
            }
            _ if ended.is_late => {
                Err(format!("the driver does not answer in {:.0} s", ended.took.as_secs_f32()))
            }
            _ => Err(ended.why()),
        })
    }
}

/// What a command may take of the time that is left: twice its share, and all if it is the last one.
fn share_of(left: Duration, weight: u32, weight_left: Option<u32>) -> Duration {
    let weight_left = weight_left.unwrap_or(3 * weight).max(weight);
    left.mul_f64(2.0 * f64::from(weight) / (f64::from(weight_left) + f64::from(weight)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_hangs_leaves_time_for_the_others() {
        let second = Duration::from_secs(1);
        assert_eq!(share_of(120 * second, 1, None), 60 * second);
        assert_eq!(share_of(120 * second, 1, Some(1)), 120 * second);
        assert_eq!(share_of(120 * second, 14, Some(14)), 120 * second);
        assert_eq!(share_of(120 * second, 10, Some(50)), 40 * second, "as many tests as a fifth of all");
        // Each of twelve takes all that it may: the last one still has a seventh of an equal share.
        let mut left = 120 * second;
        for num_left in (2..=12).rev() {
            left -= share_of(left, 1, Some(num_left));
        }
        assert!(left >= 120 * second / 12 / 7, "{left:?}");
    }
}
