//! Who a certificate says that a peer is.

use std::fmt;

use rustls::{
    crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256, pki_types::CertificateDer,
    server::ParsedCertificate,
};

/// The SHA-256 of a certificate's public key (its SubjectPublicKeyInfo), as
/// `openssl x509 -pubkey -noout | openssl pkey -pubin -outform der | sha256sum` prints it.
///
/// Of the key and not of the certificate: to show the key is to prove that one has its secret half, and a certificate that
/// is renewed for the same key is still the same peer. A new key is a new peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity([u8; 32]);

impl Identity {
    /// Of whoever shows this chain; `None` when it is empty or its first certificate is none.
    pub fn of(chain: &[CertificateDer<'_>]) -> Option<Identity> {
        let leaf = ParsedCertificate::try_from(chain.first()?).ok()?;
        let sha256 = TLS13_AES_128_GCM_SHA256.tls13()?.common.hash_provider;
        let digest = sha256.hash(leaf.subject_public_key_info().as_ref());
        digest.as_ref().try_into().ok().map(Identity)
    }
}

impl fmt::Debug for Identity {
    /// Enough of it to tell peers apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
