//! Whose pages may call. A browser sends what a page asks for to any address, those of this machine and its network too, and says
//! which page asked in headers that no page can set. Other clients do not send these.

use std::net::IpAddr;

use http::{
    HeaderValue, Method, Request, Uri,
    header::{HOST, ORIGIN},
    uri::Authority,
};

/// Whose pages may call, besides those that came from this port.
#[derive(Clone, Debug)]
pub struct PagePolicy {
    /// Origins whose pages may; `*` stands for all.
    pub origins: Vec<HeaderValue>,
    /// Whether only this machine reaches the port, without a key. Then calls must use a name of this machine: a page whose own name
    /// was made to lead here (DNS rebinding) looks as if it came from this port.
    pub needs_local_name: bool,
}

/// Why a call is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageRefusal {
    /// A page of another origin calls.
    #[error(
        "a page of another origin calls: if it may, name its origin in --cors-origins; if it came through a proxy, let the \
         proxy pass the Host header on"
    )]
    Origin,
    /// The call uses no name of this machine.
    #[error(
        "without --api-keys, a router on a loopback address serves calls to localhost, and the Host header names another \
         host: give the router keys or another address, or name http:// and that host in --cors-origins"
    )]
    Name,
}

impl PagePolicy {
    /// Whether a call may be served, as far as pages are concerned.
    ///
    /// # Errors
    /// When the call is that of a page that may not call, or may be.
    pub fn check<B>(&self, request: &Request<B>) -> Result<(), PageRefusal> {
        if self.origins.iter().any(|origin| origin == "*") {
            return Ok(());
        }
        let headers = request.headers();
        let given = headers.get(HOST);
        let host = request.uri().authority().cloned();
        let host = host.or_else(|| Authority::try_from(given?.as_bytes()).ok());
        let is_known = |host: &Authority| {
            is_local(host.host()) || self.origins.iter().any(|origin| leads_to(origin, host))
        };
        // Browsers always send the header, and some names that they know cannot be read here.
        if self.needs_local_name && !host.as_ref().map_or(given.is_none(), is_known) {
            return Err(PageRefusal::Name);
        }
        let origin = headers.get(ORIGIN);
        if origin.is_some_and(|origin| self.origins.contains(origin)) {
            return Ok(());
        }
        let fetched = |name: &str, value: &str| headers.get(name).is_some_and(|header| header == value);
        let is_foreign = if fetched("sec-fetch-site", "same-origin") {
            // The browser knows better than the comparison below where a proxy replaces the Host header.
            false
        } else if fetched("sec-fetch-site", "cross-site") {
            // Links from elsewhere lead to the page.
            request.method() != Method::GET || !fetched("sec-fetch-dest", "document")
        } else {
            origin.is_some_and(|origin| host.is_none_or(|host| !leads_to(origin, &host)))
        };
        if is_foreign { Err(PageRefusal::Origin) } else { Ok(()) }
    }
}

/// Whether the host and port are those of the origin. A proxy may have ended TLS, so the scheme tells only the port that is left out.
fn leads_to(origin: &HeaderValue, host: &Authority) -> bool {
    let Ok(origin) = Uri::try_from(origin.as_bytes()) else { return false };
    let default = match origin.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        _ => return false,
    };
    let port = |given: Option<u16>| given.unwrap_or(default);
    origin.host().is_some_and(|name| name.eq_ignore_ascii_case(host.host()))
        && port(origin.port_u16()) == port(host.port_u16())
}

/// Whether a name or address leads to this machine, whatever a name server says. Connections to 0.0.0.0 and :: end there, too.
fn is_local(name: &str) -> bool {
    let ip = name.trim_matches(['[', ']']).parse::<IpAddr>().map(|ip| ip.to_canonical());
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "https://page.example";

    fn check(needs_local_name: bool, head: &[(&str, &str)]) -> Result<(), PageRefusal> {
        let mut request = Request::post("/v1/completions");
        for (name, value) in head {
            request = match *name {
                "method" => request.method(*value),
                "uri" => request.uri(*value),
                name => request.header(name, *value),
            };
        }
        let policy = PagePolicy { origins: vec![HeaderValue::from_static(LISTED)], needs_local_name };
        policy.check(&request.body(()).unwrap())
    }

    #[test]
    fn pages_call_only_the_port_that_they_came_from_or_one_that_lists_them() {
        let to = ("host", "router.example:8080");
        let (own, foreign) = (("origin", "http://router.example:8080"), ("origin", "https://evil.example"));
        let site = |site| ("sec-fetch-site", site);
        let document = ("sec-fetch-dest", "document");
        let cases: &[(&[(&str, &str)], bool)] = &[
            // No browser.
            (&[to], true),
            (&[], true),
            (&[to, own], true),
            (&[to, ("origin", "http://ROUTER.example:8080")], true),
            (&[to, ("origin", LISTED)], true),
            (&[to, ("origin", LISTED), site("cross-site")], true),
            (&[to, foreign], false),
            (&[foreign], false),
            (&[to, foreign, site("cross-site")], false),
            (&[to, ("origin", "null")], false),
            (&[to, ("origin", "file://")], false),
            (&[to, ("origin", "http://router.example:8081"), site("same-site")], false),
            (&[to, ("origin", "http://router.example")], false),
            (&[to, ("origin", "http://router.example:8080.evil.example")], false),
            // The port that is left out.
            (&[("host", "router.example"), ("origin", "https://router.example")], true),
            (&[("host", "router.example:443"), ("origin", "https://router.example")], true),
            (&[("host", "router.example:443"), ("origin", "http://router.example")], false),
            // HTTP/2 has no header of that name.
            (&[("uri", "http://router.example:8080/"), own], true),
            (&[("uri", "http://router.example:8080/"), foreign], false),
            // A proxy that replaces the Host header.
            (&[("host", "127.0.0.1:8080"), own, site("same-origin")], true),
            // Without an origin: images, links, the address bar.
            (&[to, site("cross-site")], false),
            (&[to, site("cross-site"), document], false),
            (&[to, site("cross-site"), document, ("method", "GET")], true),
            (&[to, site("cross-site"), ("sec-fetch-dest", "iframe"), ("method", "GET")], false),
            (&[to, site("none"), document, ("method", "GET")], true),
        ];
        for (head, may) in cases {
            let expected = if *may { Ok(()) } else { Err(PageRefusal::Origin) };
            assert_eq!(check(false, head), expected, "{head:?}");
        }
    }

    #[test]
    fn a_name_that_leads_here_from_elsewhere_is_refused() {
        for (host, may) in [
            ("localhost", true),
            ("LOCALHOST:8080", true),
            ("127.0.0.1:8080", true),
            ("127.9.9.9", true),
            ("[::1]:8080", true),
            ("0.0.0.0:8080", true),
            // Those of the listed origin.
            ("page.example", true),
            ("page.example:443", true),
            ("page.example:8080", false),
            ("evil.example", false),
            ("localhost.evil.example:8080", false),
            ("127.0.0.1.evil.example", false),
            ("10.0.0.1:8080", false),
            // Browsers accept it as a name.
            ("a`b.evil.example", false),
        ] {
            let expected = if may { Ok(()) } else { Err(PageRefusal::Name) };
            assert_eq!(check(true, &[("host", host)]), expected, "{host}");
            assert_eq!(check(false, &[("host", host)]), Ok(()), "{host}");
        }
        // HTTP/1.0 needs no header.
        assert_eq!(check(true, &[]), Ok(()));
        assert_eq!(check(true, &[("uri", "http://evil.example/")]), Err(PageRefusal::Name));
    }
}
