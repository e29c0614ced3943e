//! A proxy on the control connection between a sender and a decode worker.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard},
};

use baton_handoff::TransportOffer;
use baton_transfer::Receiver;

use crate::{
    fabric::UniqueId,
    wire::{MESSAGE_BYTES, Message},
};

/// Delays, duplicates or reorders messages of the decode worker.
pub(super) struct Proxy {
    address: String,
    shared: Arc<ProxyState>,
}

#[derive(Default)]
struct ProxyState {
    /// The address of the decode worker.
    to: Mutex<String>,
    rule: Mutex<Rule>,
    changed: Condvar,
    sockets: Mutex<Vec<TcpStream>>,
}

/// What the proxy does with answers of the decode worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Rule {
    #[default]
    Forward,
    /// Delay this many `Landed` and all later messages. Messages between them are forwarded: the `Go` of a frame may follow the
    /// `Landed` of the frame before it.
    HoldLanded(usize),
    /// Delay all messages.
    Hold,
    /// Send the next message twice.
    Duplicate,
    /// Swap the next two messages.
    Swap,
}

impl Rule {
    fn holds_landed(self) -> bool {
        matches!(self, Rule::HoldLanded(_))
    }
}

impl Proxy {
    pub(super) fn start() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(ProxyState::default());
        let state = Arc::clone(&shared);
        std::thread::spawn(move || {
            for from in listener.incoming() {
                let from = from.unwrap();
                let Ok(to) = TcpStream::connect(&*state.to.lock().unwrap()) else { continue };
                let pair = || [&from, &to].map(|socket| socket.try_clone().unwrap());
                state.sockets.lock().unwrap().extend(pair());
                let ([mut up_from, mut up_to], state) = (pair(), Arc::clone(&state));
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut up_from, &mut up_to);
                    let _ = up_to.shutdown(Shutdown::Both);
                });
                std::thread::spawn(move || {
                    // An error means that either end has closed.
                    let _ = state.forward(&to, &from);
                    let _ = from.shutdown(Shutdown::Both);
                });
            }
        });
        Proxy { address, shared }
    }

    /// Forwards to this decode worker from now on, and returns an offer with the proxy's address. `None`: to none.
    pub(super) fn forward_to(&self, receiver: Option<&Receiver>) -> Option<TransportOffer> {
        let mut to = self.shared.to.lock().unwrap();
        let Some(TransportOffer::Nccl { address, pool }) =
            receiver.and_then(|receiver| receiver.offers().first())
        else {
            to.clear();
            return None;
        };
        to.clone_from(address);
        Some(TransportOffer::Nccl { address: self.address.clone(), pool: *pool })
    }

    pub(super) fn set(&self, rule: Rule) {
        *self.shared.rule.lock().unwrap() = rule;
        self.shared.changed.notify_all();
    }

    pub(super) fn cut(&self) {
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set(Rule::Forward);
        self.cut();
    }
}

impl ProxyState {
    fn forward(&self, from: &TcpStream, mut to: &TcpStream) -> std::io::Result<()> {
        let mut answers = Answers { from, held: VecDeque::new() };
        loop {
            let message = answers.next()?;
            let decoded = Message::decode(&message);
            let mut bytes = message.to_vec();
            if let (Some(Message::Landed { .. }), Rule::HoldLanded(num_held)) = (decoded, self.rule()) {
                answers.hold(message, num_held, to)?;
                drop(self.wait_while(Rule::holds_landed));
                continue;
            }
            if decoded == Some(Message::Welcome) {
                bytes.resize(MESSAGE_BYTES + UniqueId::BYTES, 0);
                answers.from.read_exact(&mut bytes[MESSAGE_BYTES..])?;
            } else {
                match self.rule_for_next() {
                    Rule::Duplicate => bytes.extend(message),
                    Rule::Swap => drop(bytes.splice(0..0, answers.next()?)),
                    Rule::Forward | Rule::HoldLanded(_) | Rule::Hold => {}
                }
            }
            to.write_all(&bytes)?;
        }
    }

    fn rule(&self) -> Rule {
        *self.rule.lock().unwrap()
    }

    /// Waits while messages are delayed. A rule for the next message applies once.
    fn rule_for_next(&self) -> Rule {
        let mut rule = self.wait_while(|rule| rule == Rule::Hold);
        match *rule {
            Rule::Duplicate | Rule::Swap => std::mem::take(&mut *rule),
            rule => rule,
        }
    }

    fn wait_while(&self, holds: impl Fn(Rule) -> bool) -> MutexGuard<'_, Rule> {
        self.changed.wait_while(self.rule.lock().unwrap(), |rule| holds(*rule)).unwrap()
    }
}

/// Messages of the decode worker.
struct Answers<'a> {
    from: &'a TcpStream,
    /// Messages that are read and not forwarded yet.
    held: VecDeque<[u8; MESSAGE_BYTES]>,
}

impl Answers<'_> {
    fn next(&mut self) -> std::io::Result<[u8; MESSAGE_BYTES]> {
        if let Some(message) = self.held.pop_front() {
            return Ok(message);
        }
        let mut message = [0; MESSAGE_BYTES];
        self.from.read_exact(&mut message)?;
        Ok(message)
    }

    /// Holds this many `Landed`, of which this message is the first, and forwards the messages between them.
    fn hold(
        &mut self,
        message: [u8; MESSAGE_BYTES],
        num_held: usize,
        mut to: &TcpStream,
    ) -> std::io::Result<()> {
        let mut held = VecDeque::from([message]);
        while held.len() < num_held {
            let message = self.next()?;
            match Message::decode(&message) {
                Some(Message::Landed { .. }) => held.push_back(message),
                _ => to.write_all(&message)?,
            }
        }
        self.held = held;
        Ok(())
    }
}
