//! The two workers that are measured: processes of this program, which end with the benchmark.

use std::path::Path;

use anyhow::Context;
use baton_command::{EngineArgs, Transport};
use baton_proto::worker::{PrefillPeer, WorkerRecord};
use clap::ValueEnum;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::process::WorkerProcess;

/// A prefill and a decode worker.
pub(super) struct Workers {
    prefill: WorkerProcess,
    decode: WorkerProcess,
}

/// What the decode worker has counted so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Counts {
    pub(super) num_committed: f64,
    pub(super) exposed_seconds: f64,
    pub(super) handoff_seconds: f64,
    /// KV bytes that arrived.
    pub(super) bytes: f64,
}

impl Workers {
    pub(super) async fn start(
        model: Option<&Path>,
        transports: &[Transport],
        engine: &EngineArgs,
    ) -> anyhow::Result<Workers> {
        // No deadline: it would distort the measurement.
        let mut flags = vec!["--handoff-deadline=3600".to_owned()];
        let names = transports.iter().filter_map(|transport| transport.to_possible_value());
        let names: Vec<_> = names.map(|name| name.get_name().to_owned()).collect();
        flags.push(format!("--transports={}", names.join(",")));
        flags.extend(engine.flags());
        flags.push(format!("--pin-threads={}", engine.pin_threads));
        let prefill = WorkerProcess::spawn("prefill-worker", model, &flags)?;
        let mut decode_flags = flags.clone();
        if !engine.no_prefix_cache {
            decode_flags.push("--no-prefix-cache".to_owned());
        }
        let decode = WorkerProcess::spawn("decode-worker", model, &decode_flags)?;
        Ok(Workers { prefill: prefill.ready().await?, decode: decode.ready().await? })
    }

    pub(super) fn decode_address(&self) -> &str {
        &self.decode.record.address
    }

    /// The prefill worker, as a router names it to the decode worker.
    pub(super) fn prefill_peer(&self) -> PrefillPeer {
        let WorkerRecord { id, incarnation, address, .. } = self.prefill.record.clone();
        PrefillPeer { worker_id: id, incarnation, address }
    }

    pub(super) fn num_layers(&self) -> usize {
        self.decode.record.kv_format.as_ref().map_or(1, |format| format.num_layers as usize)
    }

    /// The longest sequence that both can hold.
    pub(super) fn context_length(&self) -> usize {
        let of =
            |process: &WorkerProcess| process.record.capacity.unwrap_or_default().context_length as usize;
        of(&self.prefill).min(of(&self.decode))
    }

    pub(super) async fn counts(&self) -> anyhow::Result<Counts> {
        let text = get_metrics(&self.decode.address).await.context("the decode worker's metrics")?;
        Ok(Counts::read(&text))
    }
}

impl Counts {
    fn read(metrics: &str) -> Counts {
        let sum = |name: &str, label: &str| -> f64 {
            let lines = metrics.lines().filter_map(|line| line.strip_prefix(name));
            let values = lines.filter(|rest| rest.starts_with([' ', '{']) && rest.contains(label));
            values.filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        Counts {
            num_committed: sum("baton_handoffs_total", "outcome=\"committed\""),
            exposed_seconds: sum("baton_handoff_exposed_seconds_sum", ""),
            handoff_seconds: sum("baton_handoff_seconds_sum", ""),
            bytes: sum("baton_handoff_bytes_total", "direction="),
        }
    }
}

async fn get_metrics(address: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_found_among_metrics() {
        let text = "HTTP/1.0 200 OK\r\n\r\n# HELP baton_handoffs Handoffs\n\
                    baton_handoffs_total{outcome=\"committed\"} 3\nbaton_handoffs_total{outcome=\"deadline\"} 2\n\
                    baton_handoff_exposed_seconds_sum 0.25\nbaton_handoff_exposed_seconds_count 3\n\
                    baton_handoff_seconds_sum 1.5\n\
                    baton_handoff_bytes_total{transport=\"shm\",direction=\"received\"} 100\n\
                    baton_handoff_bytes_total{transport=\"tcp\",direction=\"received\"} 11\n# EOF\n";
        let expected =
            Counts { num_committed: 3.0, exposed_seconds: 0.25, handoff_seconds: 1.5, bytes: 111.0 };
        assert_eq!(Counts::read(text), expected);
        assert_eq!(Counts::read(""), Counts::default());
    }
}
