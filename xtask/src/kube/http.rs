//! A client of HTTP/1.0, one connection per request: the end of an answer is the end of its connection.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, bail};

pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    /// With the query.
    pub(super) path: &'a str,
    /// For routers that ask for one.
    pub(super) key: Option<&'a str>,
    pub(super) content_type: &'a str,
    pub(super) body: &'a str,
    /// Longest time to connect, and between two reads.
    pub(super) timeout: Duration,
}

pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: String,
}

impl Request<'_> {
    pub(super) fn send(&self, to: SocketAddr) -> Result<Answer> {
        let mut stream = TcpStream::connect_timeout(&to, self.timeout).context("connect")?;
        stream.set_read_timeout(Some(self.timeout))?;
        stream.set_write_timeout(Some(self.timeout))?;
        let Request { method, path, content_type, body, .. } = self;
        let key = self.key.map_or_else(String::new, |key| format!("Authorization: Bearer {key}\r\n"));
        let num_bytes = body.len();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nHost: {to}\r\n{key}Content-Type: {content_type}\r\nContent-Length: {num_bytes}\r\n\r\n"
        );
        stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).context("write")?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said).context("read")?;
        Answer::parse(&String::from_utf8_lossy(&said))
    }
}

impl Answer {
    fn parse(said: &str) -> Result<Answer> {
        let Some((head, body)) = said.split_once("\r\n\r\n") else {
            bail!("the connection ended within the head of an answer")
        };
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok(Answer { status: status.context("an answer without a status")?, body: body.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_status_and_body_and_half_a_head_is_none() {
        let answer =
            Answer::parse("HTTP/1.0 503 Service Unavailable\r\na: b\r\n\r\nno\r\n\r\nworkers").unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (503, "no\r\n\r\nworkers"));
        assert!(Answer::parse("").is_err());
        assert!(Answer::parse("HTTP/1.1 200 OK\r\nconnection: cl").is_err());
    }
}
