//! The first three messages: greeting, hello, welcome. Roles are proved by a MAC over the greeting's nonce, so no token travels.

use super::fields::{Malformed, Reader};
use super::{MAGIC, VERSION};

/// What a connection may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Role {
    /// Ask which prefix of a chain is there.
    Check = 0,
    /// Read bytes.
    Get = 1,
    /// Write objects: engines only.
    Put = 2,
    /// Remove, scrub, collect, set quotas, look at everything.
    Admin = 3,
}

impl Role {
    /// All roles, in the order of their bytes.
    pub const ALL: [Self; 4] = [Self::Check, Self::Get, Self::Put, Self::Admin];

    /// Its name in configurations and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Get => "get",
            Self::Put => "put",
            Self::Admin => "admin",
        }
    }
}

/// A set of roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    /// These roles.
    pub fn of(roles: &[Role]) -> Self {
        Self(roles.iter().fold(0, |set, &role| set | 1 << role as u8))
    }

    /// Whether `role` is among them.
    pub const fn has(self, role: Role) -> bool {
        self.0 >> role as u8 & 1 == 1
    }

    /// With one more.
    #[must_use]
    pub const fn with(self, role: Role) -> Self {
        Self(self.0 | 1 << role as u8)
    }
}

/// Bytes of a MAC.
const MAC: usize = 32;

/// A role's secret, as a BLAKE3 key.
#[derive(Clone)]
pub struct Proof([u8; 32]);

impl Proof {
    /// From a token of the configuration.
    pub fn from_token(token: &[u8]) -> Self {
        Self(blake3::derive_key("deepinfer kvstore role token v1", token))
    }

    fn mac(&self, role: Role, nonce: &[u8; 16], said: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[role as u8]).update(nonce).update(said);
        hasher.finalize()
    }
}

/// The server's first words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Random, new for each connection.
    pub nonce: [u8; 16],
}

impl Greeting {
    /// Bytes of a greeting.
    pub const LEN: usize = 24;

    /// As it travels.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..].copy_from_slice(&self.nonce);
        bytes
    }

    /// # Errors
    /// [`Malformed`] for another protocol or another version of it.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        if reader.array::<4>()? != MAGIC {
            return Err(Malformed("the other end is no KV store"));
        }
        if reader.u16()? != VERSION {
            return Err(Malformed(
                "the KV store speaks another version of the protocol; use the same release on both ends",
            ));
        }
        reader.u16()?;
        Ok(Self { nonce: reader.array()? })
    }
}

/// Who a client is and what it wants to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hello {
    /// Name of the tenant; its objects and quota are its own. Empty: the public one.
    pub tenant: String,
    /// What its keys mean apart from the size of their blocks: digest of model, formats and policy. Zero: not told.
    pub fingerprint: [u8; 16],
    /// Tokens of the blocks that its keys name; 0: not told.
    pub block_tokens: u32,
    /// Whether bytes of one name may differ between writers (`replay`): the first write stays, and no alarm is raised.
    pub first_stays: bool,
}

impl Hello {
    /// Longest hello.
    pub const MAX: usize = 512;

    fn said(&self) -> Vec<u8> {
        let mut said = Vec::with_capacity(64);
        said.push(self.tenant.len() as u8);
        said.extend(self.tenant.as_bytes());
        said.extend(self.fingerprint);
        said.extend(self.block_tokens.to_le_bytes());
        said.push(u8::from(self.first_stays));
        said
    }

    /// As it travels, with the proof of each role: length first. A role without a secret is asked for with a MAC of zeros.
    ///
    /// # Panics
    /// Never: a tenant's name is checked when a client is made.
    pub fn encode(&self, nonce: &[u8; 16], roles: &[(Role, Option<Proof>)]) -> Vec<u8> {
        let said = self.said();
        let mut body = said.clone();
        body.push(roles.len() as u8);
        for (role, proof) in roles {
            body.push(*role as u8);
            body.extend(proof.as_ref().map_or([0; MAC], |proof| *proof.mac(*role, nonce, &said).as_bytes()));
        }
        let mut framed = (body.len() as u32).to_le_bytes().to_vec();
        framed.extend(body);
        framed
    }

    /// A hello and the roles among those asked for that it proves: `secret` gives a role's, none where anybody may.
    ///
    /// # Errors
    /// [`Malformed`] for anything that is no hello.
    pub fn decode(
        body: &[u8],
        nonce: &[u8; 16],
        secret: impl Fn(Role) -> Option<Proof>,
    ) -> Result<(Self, Roles, bool), Malformed> {
        let mut reader = Reader::new(body);
        let tenant = reader.text()?.to_owned();
        let (fingerprint, block_tokens) = (reader.array()?, reader.u32()?);
        let first_stays = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return Err(Malformed("a flag is neither 0 nor 1")),
        };
        let hello = Self { tenant, fingerprint, block_tokens, first_stays };
        let said = hello.said();
        let (mut granted, mut all) = (Roles::default(), true);
        for _ in 0..reader.u8()? {
            let byte = reader.u8()?;
            let mac = blake3::Hash::from_bytes(reader.array()?);
            let role = *Role::ALL.get(usize::from(byte)).ok_or(Malformed("a role nobody knows"))?;
            // Comparing hashes takes the same time wherever the two differ.
            if secret(role).is_none_or(|proof| proof.mac(role, nonce, &said) == mac) {
                granted = granted.with(role);
            } else {
                all = false;
            }
        }
        reader.end()?;
        Ok((hello, granted, all))
    }
}

/// The server's answer to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Roles that were proved.
    pub roles: Roles,
    /// Whether these are all that were asked for: otherwise the server closes.
    pub all: bool,
    /// Another size of blocks under which somebody writes what this client's fingerprint names: they share nothing. 0: none.
    pub other_block_tokens: u32,
    /// Longest object.
    pub max_object: u32,
}

impl Welcome {
    /// Bytes of a welcome.
    pub const LEN: usize = 16;

    /// As it travels.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.roles.0;
        bytes[1] = u8::from(self.all);
        bytes[4..8].copy_from_slice(&self.other_block_tokens.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.max_object.to_le_bytes());
        bytes
    }

    /// # Errors
    /// [`Malformed`], never for bytes of [`Welcome::encode`].
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (roles, all) = (Roles(reader.u8()?), reader.u8()? == 1);
        reader.u16()?;
        Ok(Self { roles, all, other_block_tokens: reader.u32()?, max_object: reader.u32()? })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn hello() -> Hello {
        Hello { tenant: "müller".into(), fingerprint: [7; 16], block_tokens: 128, first_stays: true }
    }

    #[test]
    fn roles_are_granted_to_whoever_has_their_token() {
        let (check, put) = (Proof::from_token(b"0123456789abcdef"), Proof::from_token(b"another token here"));
        let secret = |role| match role {
            Role::Check => Some(check.clone()),
            Role::Put | Role::Admin => Some(put.clone()),
            Role::Get => None,
        };
        let nonce = [3; 16];
        let asked = [(Role::Check, Some(check.clone())), (Role::Get, None), (Role::Put, Some(check.clone()))];
        let body = hello().encode(&nonce, &asked);
        let (read, roles, all) = Hello::decode(&body[4..], &nonce, secret).unwrap();
        assert_eq!(read, hello());
        assert_eq!((roles, all), (Roles::of(&[Role::Check, Role::Get]), false));
        let (_, roles, all) = Hello::decode(&body[4..], &[4; 16], secret).unwrap();
        assert_eq!((roles, all), (Roles::of(&[Role::Get]), false), "a proof is good for one connection");
        let mine = hello().encode(&nonce, &[(Role::Admin, Some(put.clone()))]);
        assert!(Hello::decode(&mine[4..], &nonce, secret).unwrap().2);
        let mut other = hello();
        other.tenant = "meier".into();
        let mut forged = other.said();
        forged.extend(&mine[4 + hello().said().len()..]);
        assert_eq!(Hello::decode(&forged, &nonce, secret).unwrap().1, Roles::default(), "a proof names its tenant");
    }

    #[test]
    fn whatever_is_no_hello_is_refused() {
        let body = hello().encode(&[0; 16], &[(Role::Get, None)]);
        for len in 4..body.len() {
            assert!(Hello::decode(&body[4..len], &[0; 16], |_| None).is_err(), "{len}");
        }
        let mut more = body[4..].to_vec();
        more.push(0);
        assert!(Hello::decode(&more, &[0; 16], |_| None).is_err());
    }

    #[test]
    fn greetings_and_welcomes_are_read_as_they_are_written() {
        let greeting = Greeting { nonce: [9; 16] };
        assert_eq!(Greeting::decode(&greeting.encode()).unwrap(), greeting);
        let mut other = greeting.encode();
        other[4] += 1;
        assert!(Greeting::decode(&other).unwrap_err().0.contains("another version"));
        let welcome = Welcome { roles: Roles::of(&Role::ALL), all: true, other_block_tokens: 64, max_object: 99 };
        assert_eq!(Welcome::decode(&welcome.encode()).unwrap(), welcome);
    }
}
