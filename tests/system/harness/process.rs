//! One process under test: started with its output in a file, killed when dropped.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

/// A running process. Its log is shown when the test fails.
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `program` with `args`; its output goes to `<dir>/<name>.log`.
    pub(crate) fn start(name: &str, program: &str, args: &[String], dir: &Path) -> Process {
        Process::start_in(&[], name, program, args, dir)
    }

    /// The same with more variables in its environment.
    pub(crate) fn start_in(
        environment: &[(&str, &Path)],
        name: &str,
        program: &str,
        args: &[String],
        dir: &Path,
    ) -> Process {
        let log = dir.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log).expect("the log can be written");
        let child = Command::new(program)
            .args(args)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a file can be shared"))
            .stderr(file)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {program}: {error}; run `cargo xtask setup`"));
        Process { name: name.to_owned(), child, log }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn signal(&self, signal: libc::c_int) {
        signal_pid(self.pid(), signal);
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("our own child can be killed");
        self.child.wait().expect("our own child can be waited for");
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("our own child can be waited for")
    }

    /// `None` while it runs.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("our own child can be waited for")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let from = log.lines().count().saturating_sub(40);
            eprintln!("---- end of the log of {} ----", self.name);
            for line in log.lines().skip(from) {
                eprintln!("{line}");
            }
        }
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a process that this test started, directly or through `baton up`.
pub(crate) fn signal_pid(pid: i32, signal: libc::c_int) {
    // SAFETY: a plain system call.
    let result = unsafe { libc::kill(pid, signal) };
    assert_eq!(result, 0, "cannot signal {pid}");
}

/// Children of `parent` by the value of their `--id` flag, or their subcommand when they have none.
pub(crate) fn children_of(parent: i32) -> Vec<(String, i32)> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc is mounted").flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // "pid (name) state ppid …". The name may contain any character, so this counts from its end.
        let Some((_, rest)) = stat.rsplit_once(')') else { continue };
        let mut fields = rest.split_whitespace();
        let is_zombie = fields.next() == Some("Z");
        if is_zombie || fields.next() != Some(parent.to_string().as_str()) {
            continue;
        }
        let Ok(cmdline) = fs::read(entry.path().join("cmdline")) else { continue };
        let words: Vec<String> =
            cmdline.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let id = words.iter().position(|word| word == "--id").and_then(|at| words.get(at + 1));
        if let Some(name) = id.or(words.get(1)) {
            children.push((name.clone(), pid));
        }
    }
    children
}
