//! TLS in the kernel. After the handshake this process gives the keys of a connection to the kernel. Then it uses the
//! socket like one without TLS, and pieces go from and to blocks without a copy.
//!
//! See linux/tls.h and Documentation/networking/tls.rst. A kernel without TLS, or without the cipher, refuses the keys;
//! the connection is unchanged then.
//!
//! # What was not run
//!
//! The development machine's kernel has no TLS (`CONFIG_TLS`), so only the refusal was run.

use std::{io, mem, net::TcpStream, os::fd::AsRawFd, sync::Once};

use baton_tls::rustls::ConnectionTrafficSecrets;
use tracing::info;

/// A direction of the connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Direction {
    Send,
    Receive,
}

/// Prepares the socket for TLS in the kernel.
pub(super) fn prepare(socket: &TcpStream) -> io::Result<()> {
    set_option(socket, libc::SOL_TCP, libc::TCP_ULP, b"tls").inspect_err(|error| {
        static SAID: Once = Once::new();
        SAID.call_once(|| info!(%error, "the kernel has no TLS: kv is encrypted by this process"));
    })
}

/// Gives the kernel the key of one direction. `sequence` is the number of its next record.
pub(super) fn give_key(
    socket: &TcpStream,
    direction: Direction,
    sequence: u64,
    secrets: &ConnectionTrafficSecrets,
) -> io::Result<()> {
    let name = match direction {
        Direction::Send => libc::TLS_TX,
        Direction::Receive => libc::TLS_RX,
    };
    let rec_seq = sequence.to_be_bytes();
    let info = |cipher_type| libc::tls_crypto_info { version: libc::TLS_1_3_VERSION, cipher_type };
    let mismatch = |_| io::Error::from(io::ErrorKind::Unsupported);
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => {
            let (salt, iv) = iv.as_ref().split_at(libc::TLS_CIPHER_AES_GCM_128_SALT_SIZE);
            let crypto = libc::tls12_crypto_info_aes_gcm_128 {
                info: info(libc::TLS_CIPHER_AES_GCM_128),
                iv: iv.try_into().map_err(mismatch)?,
                key: key.as_ref().try_into().map_err(mismatch)?,
                salt: salt.try_into().map_err(mismatch)?,
                rec_seq,
            };
            set_option(socket, libc::SOL_TLS, name, bytes_of(&crypto))?;
        }
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => {
            let (salt, iv) = iv.as_ref().split_at(libc::TLS_CIPHER_AES_GCM_256_SALT_SIZE);
            let crypto = libc::tls12_crypto_info_aes_gcm_256 {
                info: info(libc::TLS_CIPHER_AES_GCM_256),
                iv: iv.try_into().map_err(mismatch)?,
                key: key.as_ref().try_into().map_err(mismatch)?,
                salt: salt.try_into().map_err(mismatch)?,
                rec_seq,
            };
            set_option(socket, libc::SOL_TLS, name, bytes_of(&crypto))?;
        }
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            let crypto = libc::tls12_crypto_info_chacha20_poly1305 {
                info: info(libc::TLS_CIPHER_CHACHA20_POLY1305),
                iv: iv.as_ref().try_into().map_err(mismatch)?,
                key: key.as_ref().try_into().map_err(mismatch)?,
                salt: [],
                rec_seq,
            };
            set_option(socket, libc::SOL_TLS, name, bytes_of(&crypto))?;
        }
        _ => return Err(io::ErrorKind::Unsupported.into()),
    }
    if let Direction::Receive = direction {
        // Peers do not pad records. With this hint the kernel decrypts straight into the destination; older kernels
        // copy.
        let _ = set_option(socket, libc::SOL_TLS, TLS_RX_EXPECT_NO_PAD, &1_i32.to_ne_bytes());
    }
    Ok(())
}

/// linux/tls.h; not in libc.
const TLS_RX_EXPECT_NO_PAD: libc::c_int = 4;

fn bytes_of<T>(value: &T) -> &[u8] {
    // SAFETY: the structures of linux/tls.h are two u16 and arrays of bytes, without padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), mem::size_of::<T>()) }
}

fn set_option(socket: &TcpStream, level: libc::c_int, name: libc::c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the value outlives the call, and its size is passed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_have_no_padding() {
        let sizes = [
            mem::size_of::<libc::tls12_crypto_info_aes_gcm_128>(),
            mem::size_of::<libc::tls12_crypto_info_aes_gcm_256>(),
            mem::size_of::<libc::tls12_crypto_info_chacha20_poly1305>(),
        ];
        // version and type, iv, key, salt, sequence
        assert_eq!(sizes, [4 + 8 + 16 + 4 + 8, 4 + 8 + 32 + 4 + 8, 4 + 12 + 32 + 8]);
    }
}
