//! placeholder
pub async fn router(_: crate::args::RouterArgs) -> anyhow::Result<()> { Ok(()) }
pub async fn prefill_worker(_: crate::args::WorkerArgs) -> anyhow::Result<()> { Ok(()) }
pub async fn decode_worker(_: crate::args::WorkerArgs) -> anyhow::Result<()> { Ok(()) }
