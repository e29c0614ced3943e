//! Ports for servers that need a fixed port, or restart at the same one.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::atomic::{AtomicU16, Ordering},
};

/// Below the ephemeral ports of Linux (from 32768 by default), so that no other program gets one of these while its server
/// is down.
const FIRST: u16 = 12_000;
const NUM_PORTS: u16 = 20_000;

/// A free port of this host. No other call of this program gets it.
pub(crate) fn free_port() -> u16 {
    static NUM_TRIED: AtomicU16 = AtomicU16::new(0);
    // Concurrent programs start at different ports.
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
