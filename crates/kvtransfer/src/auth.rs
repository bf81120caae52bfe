//! Keys that come from the configuration: a MAC under the shared token, and the layout's digest.

use crate::config::Config;

/// Bytes of a MAC on the wire and in tickets.
pub const MAC: usize = 32;

/// The shared secret as a BLAKE3 key; without one every MAC is zero and every MAC is accepted as zero only.
pub struct Auth {
    key: Option<[u8; 32]>,
    layout: [u8; 16],
}

impl Auth {
    /// From an end's settings.
    pub fn new(config: &Config) -> Self {
        let key = config.token.as_ref().map(|token| blake3::derive_key("deepinfer kvtransfer token v1", token));
        let mut layout = [0; 16];
        layout.copy_from_slice(&blake3::hash(&config.layout).as_bytes()[..16]);
        Self { key, layout }
    }

    /// Digest of the layout.
    pub const fn layout(&self) -> [u8; 16] {
        self.layout
    }

    /// MAC over the parts; the purpose keeps a ticket's MAC from serving as a request's.
    pub fn mac(&self, purpose: u8, parts: &[&[u8]]) -> [u8; MAC] {
        let Some(key) = &self.key else { return [0; MAC] };
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(&[purpose]);
        for part in parts {
            hasher.update(part);
        }
        *hasher.finalize().as_bytes()
    }

    /// Whether `mac` is the MAC over the parts, compared in constant time.
    pub fn verify(&self, purpose: u8, parts: &[&[u8]], mac: &[u8; MAC]) -> bool {
        // Comparing `blake3::Hash` takes the same time wherever the two differ.
        blake3::Hash::from_bytes(self.mac(purpose, parts)) == blake3::Hash::from_bytes(*mac)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth(token: Option<&[u8]>) -> Auth {
        Auth::new(&Config { token: token.map(<[u8]>::to_vec), ..Config::default() })
    }

    #[test]
    fn a_mac_depends_on_token_purpose_and_parts() {
        let one = auth(Some(b"0123456789abcdef"));
        let mac = one.mac(1, &[b"ab", b"c"]);
        assert!(one.verify(1, &[b"ab", b"c"], &mac));
        assert!(!one.verify(2, &[b"ab", b"c"], &mac));
        assert!(!one.verify(1, &[b"abd"], &mac));
        assert!(!auth(Some(b"0123456789abcdeg")).verify(1, &[b"ab", b"c"], &mac));
        assert!(!one.verify(1, &[b"ab", b"c"], &[0; MAC]));
        assert!(!auth(None).verify(1, &[b"ab", b"c"], &mac));
    }
}
