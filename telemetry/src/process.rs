//! Metrics of the process itself, under the names that Prometheus's own clients give them, and of its build.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge, info::Info},
    registry::Registry,
};

/// Registers both. `component` is what the process does: "router", "prefill", "decode".
pub(crate) fn register(registry: &mut Registry, component: &str) {
    let build = vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("component", component.to_owned())];
    registry.register("baton_build", "What this process is", Info::new(build));
    registry.register_collector(Box::new(ProcessCollector { start_time_seconds: start_time_seconds() }));
}

/// Reads the process at each scrape.
#[derive(Debug)]
struct ProcessCollector {
    /// Read once: the kernel's time of boot follows the clock, and a start that moves would look like another start.
    start_time_seconds: Option<f64>,
}

/// Of a process, in seconds and bytes. `f64` as in the exposition.
struct ProcessNumbers {
    cpu_seconds: f64,
    resident_bytes: f64,
    virtual_bytes: f64,
    num_threads: f64,
    num_open_fds: f64,
    max_fds: f64,
}

impl ProcessNumbers {
    #[cfg(target_os = "linux")]
    fn read() -> Option<ProcessNumbers> {
        use procfs::process::{LimitValue, Process};
        let process = Process::myself().ok()?;
        let stat = process.stat().ok()?;
        let ticks = procfs::ticks_per_second() as f64;
        Some(ProcessNumbers {
            cpu_seconds: (stat.utime + stat.stime) as f64 / ticks,
            resident_bytes: stat.rss as f64 * procfs::page_size() as f64,
            virtual_bytes: stat.vsize as f64,
            num_threads: stat.num_threads as f64,
            num_open_fds: process.fd_count().ok()? as f64,
            max_fds: match process.limits().ok()?.max_open_files.soft_limit {
                LimitValue::Value(limit) => limit as f64,
                LimitValue::Unlimited => f64::INFINITY,
            },
        })
    }

    /// Other systems tell it in other ways.
    #[cfg(not(target_os = "linux"))]
    fn read() -> Option<ProcessNumbers> {
        None
    }
}

/// Unix time at which this process started.
#[cfg(target_os = "linux")]
fn start_time_seconds() -> Option<f64> {
    let ticks_after_boot = procfs::process::Process::myself().ok()?.stat().ok()?.starttime;
    let boot = procfs::boot_time_secs().ok()?;
    Some(boot as f64 + ticks_after_boot as f64 / procfs::ticks_per_second() as f64)
}

#[cfg(not(target_os = "linux"))]
fn start_time_seconds() -> Option<f64> {
    None
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (Some(numbers), Some(start_time)) = (ProcessNumbers::read(), self.start_time_seconds) else {
            return Ok(());
        };
        let cpu = ConstCounter::new(numbers.cpu_seconds);
        let help = "Seconds that processors spent on this process";
        cpu.encode(encoder.encode_descriptor("process_cpu_seconds", help, None, cpu.metric_type())?)?;
        for (name, help, value) in [
            ("process_start_time_seconds", "Unix time at which it started", start_time),
            ("process_resident_memory_bytes", "Memory that it holds", numbers.resident_bytes),
            ("process_virtual_memory_bytes", "Addresses that it has mapped", numbers.virtual_bytes),
            ("process_threads", "Threads that it runs", numbers.num_threads),
            ("process_open_fds", "Files and sockets that it has open", numbers.num_open_fds),
            ("process_max_fds", "How many it may have open", numbers.max_fds),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn numbers_of_this_process_are_plausible() {
        let before = ProcessNumbers::read().expect("Linux tells them");
        let file = std::fs::File::open("/proc/self/stat").expect("a file to hold open");
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(60) {
            std::hint::spin_loop();
        }
        let after = ProcessNumbers::read().expect("Linux tells them");
        drop(file);
        assert!(after.cpu_seconds > before.cpu_seconds, "{} {}", before.cpu_seconds, after.cpu_seconds);
        assert!(after.num_open_fds >= 4.0 && after.num_open_fds < after.max_fds, "{}", after.num_open_fds);
        assert!(after.resident_bytes > 1e5 && after.resident_bytes < after.virtual_bytes);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64();
        let age = now - start_time_seconds().expect("Linux tells it");
        // The time of boot is in whole seconds.
        assert!((-2.0..3600.0).contains(&age), "it started {age} s ago");
    }
}
