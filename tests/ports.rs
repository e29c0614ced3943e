//! Ports for servers that are told their port, or are to come back at the one they had.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::atomic::{AtomicU16, Ordering},
};

/// Below those that Linux gives to connections and to whoever asks for any port (from 32768 unless it was told
/// otherwise), so that nobody is given one of these while its server is away.
const FIRST: u16 = 12_000;
const NUM_PORTS: u16 = 20_000;

/// A free port of this host. No other call of this program gets it.
pub(crate) fn free_port() -> u16 {
    static NUM_TRIED: AtomicU16 = AtomicU16::new(0);
    // Programs that run at the same time begin at different places.
    let begin = std::process::id().wrapping_mul(97) % u32::from(NUM_PORTS);
    for _ in 0..NUM_PORTS {
        let tried = u32::from(NUM_TRIED.fetch_add(1, Ordering::Relaxed));
        let port = FIRST + ((begin + tried) % u32::from(NUM_PORTS)) as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no port from {FIRST} on is free");
}
