//! One connection of an engine to its agent.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::pass;
use super::shm::{Stage, View};
use super::words::{Greeting, HEADER, Header, MAX_BODY, Op, Status, VERSION, Welcome};
use crate::error::Error;
use crate::lost::Lost;
use crate::net::{Address, Socket, Timed, timed_out, write_pieces};
use crate::wire::Hello;

/// What came is no answer.
pub(super) fn nonsense(why: impl std::fmt::Display) -> Lost {
    Lost::nonsense_of("the agent", why)
}

/// Memory of an agent, and which one's: shared by all connections to it.
pub(super) struct Mapped {
    /// See [`Welcome::agent`].
    pub agent: u64,
    pub view: View,
}

pub(super) struct Link {
    timed: Timed,
    number: u32,
    silence: Duration,
    pub mapped: Arc<Mapped>,
    pub welcome: Welcome,
    stage: Option<Stage>,
    body: Vec<u8>,
}

impl Link {
    /// Connects, and maps the agent's memory unless `mapped` is that already.
    pub fn open(
        path: &Path,
        who: &Hello,
        connect: Duration,
        silence: Duration,
        mapped: Option<Arc<Mapped>>,
    ) -> Result<Self, Lost> {
        let mut timed = Timed::new(Socket::connect(&Address::Unix(path.into()), connect)?);
        timed.allow(connect);
        let peer = rustix::net::sockopt::socket_peercred(timed.armed()?).map_err(io::Error::from)?;
        let mine = rustix::process::geteuid();
        if peer.uid != mine && !peer.uid.is_root() {
            let text = format!("the agent at {} is run by another user", path.display());
            return Err(Lost::Refused(Error::Invalid(text)));
        }
        timed.write_all(&Greeting { version: VERSION, who: who.clone() }.encode())?;
        let mut bytes = [0; Welcome::LEN];
        let (first, fd) = pass::receive(timed.armed()?, &mut bytes).map_err(timed_out)?;
        if first == 0 {
            return Err(Lost::Gone(Error::Unavailable("the agent closed the connection".to_owned())));
        }
        timed.read_exact(&mut bytes[first..])?;
        let welcome = Welcome::decode(&bytes).map_err(nonsense)?;
        if welcome.version != VERSION {
            let text = "the agent speaks another version of the protocol; use the same release on both ends";
            return Err(Lost::Refused(Error::Invalid(text.to_owned())));
        }
        if !welcome.admitted {
            return Err(Lost::Refused(Error::Unavailable("the agent has no place for another tenant".to_owned())));
        }
        let mapped = if let Some(mapped) = mapped.filter(|mapped| mapped.agent == welcome.agent) {
            mapped
        } else {
            let fd = fd.ok_or_else(|| nonsense("a welcome without memory"))?;
            let view = View::new(fd.as_fd(), welcome.arena).map_err(Lost::Refused)?;
            Arc::new(Mapped { agent: welcome.agent, view })
        };
        Ok(Self { timed, number: 0, silence, mapped, welcome, stage: None, body: Vec::new() })
    }

    /// What follows has to be done within `time` from now.
    pub fn allow(&mut self, time: Duration) {
        self.timed.allow(time);
    }

    /// Sends a request whose answer is read next.
    pub fn ask(&mut self, op: Op, body: &[u8]) -> Result<(), Lost> {
        self.number = self.number.wrapping_add(1);
        let head = Header { op, status: Status::Done, number: self.number, len: body.len() as u32 }.encode();
        Ok(write_pieces(&mut self.timed, &mut [IoSlice::new(&head), IoSlice::new(body)])?)
    }

    /// The next part of the answer to the newest request; `None`: the agent is there, and waits for something.
    pub fn part(&mut self) -> Result<Option<&[u8]>, Lost> {
        let mut head = [0; HEADER];
        self.timed.read_exact(&mut head)?;
        let header = Header::decode(&head).map_err(nonsense)?;
        if header.op != Op::Answer || header.number != self.number {
            return Err(nonsense("an answer to something else"));
        }
        if header.len as usize > MAX_BODY {
            return Err(nonsense("an answer that is too long"));
        }
        self.body.resize(header.len as usize, 0);
        self.timed.read_exact(&mut self.body)?;
        let text = || String::from_utf8_lossy(&self.body).into_owned();
        match header.status {
            Status::Done => Ok(Some(&self.body)),
            Status::Waiting => Ok(None),
            Status::Invalid => Err(Lost::Told(Error::Invalid(text()))),
            Status::Unavailable => Err(Lost::Told(Error::Unavailable(text()))),
        }
    }

    /// The same, waited for as long as the agent says now and then that it is there.
    pub fn answer(&mut self) -> Result<&[u8], Lost> {
        self.timed.allow(self.silence);
        while self.part()?.is_none() {
            self.timed.allow(self.silence);
        }
        Ok(&self.body)
    }

    /// This connection's stage, which the agent has been given.
    pub fn stage(&mut self, len: u64) -> Result<&mut Stage, Lost> {
        if self.stage.is_none() {
            let stage = Stage::new(len).map_err(Lost::Told)?;
            self.number = self.number.wrapping_add(1);
            let head = Header { op: Op::Stage, status: Status::Done, number: self.number, len: 1 }.encode();
            self.timed.allow(self.silence);
            self.timed.write_all(&head)?;
            pass::send(self.timed.armed()?, &[0], stage.fd())?;
            self.answer()?;
            self.stage = Some(stage);
        }
        self.stage.as_mut().ok_or_else(|| nonsense("no stage"))
    }
}
