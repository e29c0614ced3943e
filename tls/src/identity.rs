//! The identity of a peer, from its certificate.

use std::fmt;

use rustls::{
    crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256, pki_types::CertificateDer,
    server::ParsedCertificate,
};

/// The SHA-256 of a certificate's public key (its SubjectPublicKeyInfo), as
/// `openssl x509 -pubkey -noout | openssl pkey -pubin -outform der | sha256sum` prints it.
///
/// It is made from the key, not from the certificate: a handshake proves that the peer has the secret half of the key. A
/// certificate that is renewed for the same key keeps the identity; a new key is a new identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity([u8; 32]);

impl Identity {
    /// The identity in a certificate chain; `None` when the chain is empty or its first entry is no certificate.
    pub fn of(chain: &[CertificateDer<'_>]) -> Option<Identity> {
        let leaf = ParsedCertificate::try_from(chain.first()?).ok()?;
        let sha256 = TLS13_AES_128_GCM_SHA256.tls13()?.common.hash_provider;
        let digest = sha256.hash(leaf.subject_public_key_info().as_ref());
        digest.as_ref().try_into().ok().map(Identity)
    }
}

impl fmt::Debug for Identity {
    /// A short form that tells peers apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
