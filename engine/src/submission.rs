//! What is submitted to an engine: a request, and its grammar's matcher if that exists already. It does not know what becomes of
//! them.

use baton_grammar::TokenMatcher;
use baton_request::Request;

/// A request. If it was not [prepared](crate::EngineHandle::prepare), its grammar is compiled when it is submitted.
#[derive(Debug, Default)]
pub struct Submission {
    /// The request.
    pub request: Request,
    /// Its grammar, after the request's output.
    pub(crate) matcher: Option<TokenMatcher>,
}

impl Submission {
    /// Whether the output of a prepared request ends the text of its grammar: no token may follow.
    pub fn has_ended(&self) -> bool {
        self.matcher.as_ref().is_some_and(TokenMatcher::has_ended)
    }
}

impl From<Request> for Submission {
    fn from(request: Request) -> Submission {
        Submission { request, matcher: None }
    }
}
