//! What stands between a sender and a decode worker in the matrix, on the control connection.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
};

use baton_handoff::TransportOffer;
use baton_transfer::Receiver;

use crate::{
    fabric::UniqueId,
    wire::{MESSAGE_BYTES, Message},
};

/// Holds back, repeats or exchanges what the latter says.
pub(super) struct Proxy {
    address: String,
    shared: Arc<Between>,
}

#[derive(Default)]
struct Between {
    /// Where the decode worker listens.
    to: Mutex<String>,
    rule: Mutex<Rule>,
    changed: Condvar,
    sockets: Mutex<Vec<TcpStream>>,
}

/// What becomes of the decode worker's answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Rule {
    #[default]
    Forward,
    /// `Landed`, and what follows it, waits.
    HoldLanded,
    /// Everything waits.
    Hold,
    /// The next one comes twice.
    Twice,
    /// The next two change places.
    Exchange,
}

impl Rule {
    fn holds(self, message: Option<Message>) -> bool {
        match self {
            Rule::Hold => true,
            Rule::HoldLanded => matches!(message, Some(Message::Landed { .. })),
            Rule::Forward | Rule::Twice | Rule::Exchange => false,
        }
    }
}

impl Proxy {
    pub(super) fn start() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Between::default());
        let between = Arc::clone(&shared);
        std::thread::spawn(move || {
            for from in listener.incoming() {
                let from = from.unwrap();
                let Ok(to) = TcpStream::connect(&*between.to.lock().unwrap()) else { continue };
                let pair = || [&from, &to].map(|socket| socket.try_clone().unwrap());
                between.sockets.lock().unwrap().extend(pair());
                let ([mut up_from, mut up_to], between) = (pair(), Arc::clone(&between));
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut up_from, &mut up_to);
                    let _ = up_to.shutdown(Shutdown::Both);
                });
                std::thread::spawn(move || {
                    // Until either end is gone.
                    let _ = between.forward(&to, &from);
                    let _ = from.shutdown(Shutdown::Both);
                });
            }
        });
        Proxy { address, shared }
    }

    /// As if the decode worker listened here. `None`: nothing listens.
    pub(super) fn lead_to(&self, receiver: Option<&Receiver>) -> Option<TransportOffer> {
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

impl Between {
    fn forward(&self, mut from: &TcpStream, mut to: &TcpStream) -> std::io::Result<()> {
        let mut message = [0; MESSAGE_BYTES];
        loop {
            from.read_exact(&mut message)?;
            let mut bytes = message.to_vec();
            let decoded = Message::decode(&message);
            if decoded == Some(Message::Welcome) {
                bytes.resize(MESSAGE_BYTES + UniqueId::BYTES, 0);
                from.read_exact(&mut bytes[MESSAGE_BYTES..])?;
            } else {
                match self.rule_for(decoded) {
                    Rule::Twice => bytes.extend(message),
                    Rule::Exchange => {
                        from.read_exact(&mut message)?;
                        bytes.splice(0..0, message);
                    }
                    Rule::Forward | Rule::HoldLanded | Rule::Hold => {}
                }
            }
            to.write_all(&bytes)?;
        }
    }

    /// Waits as long as the message is held. Rules about the next one are used up.
    fn rule_for(&self, message: Option<Message>) -> Rule {
        let rule = self.rule.lock().unwrap();
        let mut rule = self.changed.wait_while(rule, |rule| rule.holds(message)).unwrap();
        match *rule {
            Rule::Twice | Rule::Exchange => std::mem::take(&mut *rule),
            rule => rule,
        }
    }
}
